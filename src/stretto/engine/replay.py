"""One full pass recorded: what every exit reads, for every sequence, to be replayed at any dial.

A method that only exits after layers does not change what the layers compute, so one full pass has all information. A
recording has two uses: exits are trained on it (the frozen backbone runs once, not once per epoch), and a sweep over
the dial takes one pass instead of one per dial.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.decider import Decider, Exits, Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.run import Run, first_state
from stretto.engine.windows import skipped_undisturbed
from stretto.state import Decision, Inputs, Output, State


@dataclass(frozen=True)
class Recording:
    """n sequences, E = L - 1 exits, d hidden size."""

    pooled: Tensor
    """[n, E, d] what each exit reads."""
    last: Tensor
    """[n, d] what the final head reads."""
    lengths: Tensor
    """[n] tokens."""

    def __len__(self) -> int:
        return len(self.lengths)


class Recorder(Silent):
    """Records what each exit reads; no sequence leaves."""

    points = frozenset({"after"})

    def __init__(self, exits: Exits) -> None:
        super().__init__(exits)
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def decide(self, state: State) -> Decision | None:
        self.seen[state.layer].append((state.ids, state.pooled))
        return None

    def pooled(self, batch: int, n_exits: int) -> Tensor:
        """[batch, E, d]. A sequence whose tokens were all frozen at some layer is the same after all later ones."""
        _, some = self.seen[1][0]
        now, layers = some.new_zeros(batch, some.shape[1]), []
        for layer in range(1, n_exits + 1):
            for ids, pooled in self.seen[layer]:
                now = now.index_copy(0, ids, pooled.to(now.dtype))
            layers.append(now)
        return torch.stack(layers, dim=1)


#: (recorder, batch size) -> the recorder, perhaps above another decider that drops or freezes tokens on the way.
Above = Callable[[Decider, int], Decider]


def alone(recorder: Decider, batch: int) -> Decider:
    """With nothing beneath it."""
    return recorder


def record(engine: PackedEngine, exits: Exits, batches: Iterable[Inputs], above: Above = alone) -> Recording:
    """One pass over the batches."""
    pooled, last, lengths = [], [], []
    for inputs in batches:
        recorder, batch = Recorder(exits), len(inputs.input_ids)
        device = next(exits.parameters()).device
        output = engine.run(inputs.to(device), above(recorder, batch), 0.0, keep_hidden=True)
        assert output.read is not None
        pooled.append(recorder.pooled(batch, engine.backbone.n_layers - 1))
        last.append(output.read)
        lengths.append(output.trace.lengths.clone())
    return Recording(torch.cat(pooled), torch.cat(last), torch.cat(lengths))


@torch.inference_mode()
def replay(backbone: Backbone, decider: Decider, recording: Recording, dial: float | Tensor) -> Output:
    """The answers and costs of the packed engine, for a decider that only exits.

    Each sequence is represented by one row, its pooled state: pooling one row gives that row."""
    one_token = torch.ones(len(recording), 1, dtype=torch.long, device=recording.lengths.device)
    inputs = Inputs(one_token, one_token)
    run, state = Run(backbone, decider), first_state(inputs, dial)
    run.enter(recording.lengths, columns=1)
    for layer in range(1, backbone.n_layers + 1):
        ids = state.ids
        lengths = recording.lengths[ids]
        alone = run.first_row_alone(state, layer)
        updated = lengths if alone is None else torch.where(alone, 1, lengths)
        skipped = skipped_undisturbed(backbone.specs[layer - 1].attention, updated, lengths)
        run.books.count(layer, ids, updated, lengths, updated, skipped)
        if layer == backbone.n_layers:
            run.answer(state, torch.arange(len(ids), device=ids.device), recording.last[ids])
        else:
            run.after(state, layer, recording.pooled[ids, layer - 1])
        if not state.n_sequences:
            break
    return run.output(len(recording), columns=1)
