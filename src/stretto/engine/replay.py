"""Run once, ask often: what every exit would read, for every sequence, and replays of it at any dial.

A method that only exits after layers does not change what the layers compute, so one full pass holds all there is
to know. A recording serves two masters: exits learn from it (the frozen backbone runs once, not once per epoch),
and a sweep over the dial costs one pass instead of one per dial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.decider import Decider, Exits, Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.run import Run, first_state
from stretto.state import Decision, Inputs, Output, State


@dataclass(frozen=True)
class Recording:
    """n sequences, E = L - 1 exits, d hidden size."""

    pooled: Tensor
    """[n, E, d] what each exit reads."""
    first: Tensor
    """[n, d] what the final head reads."""
    lengths: Tensor
    """[n] tokens."""

    def __len__(self) -> int:
        return len(self.lengths)


class Recorder(Silent):
    """Writes down what each exit would read."""

    points = frozenset({"after"})

    def __init__(self, exits: Exits, batch: int, n_exits: int, d: int) -> None:
        super().__init__(exits)
        self.pooled = next(exits.parameters()).new_zeros(batch, n_exits, d)

    def decide(self, state: State) -> Decision | None:
        self.pooled[state.ids, state.layer - 1] = state.pooled.to(self.pooled)
        return None


def record(engine: PackedEngine, exits: Exits, batches: Iterable[Inputs]) -> Recording:
    """One full pass over the batches."""
    pooled, first, lengths = [], [], []
    for inputs in batches:
        recorder = Recorder(exits, len(inputs.input_ids), engine.backbone.n_layers - 1, engine.backbone.d)
        output = engine.run(inputs.to(recorder.pooled.device), recorder, 0.0, keep_hidden=True)
        assert output.hidden is not None
        pooled.append(recorder.pooled)
        first.append(output.hidden[:, 0].clone())
        lengths.append(output.trace.lengths.clone())
    return Recording(torch.cat(pooled), torch.cat(first), torch.cat(lengths))


@torch.inference_mode()
def replay(backbone: Backbone, decider: Decider, recording: Recording, dial: float | Tensor) -> Output:
    """What the packed engine would answer and spend, for a decider that only exits.

    Each sequence is played by a single row, its pooled state: pooling one row gives that row."""
    one_token = torch.ones(len(recording), 1, dtype=torch.long, device=recording.lengths.device)
    inputs = Inputs(one_token, one_token)
    run = Run(backbone, decider, inputs, first_state(inputs, dial))
    run.trace.lengths = recording.lengths
    run.trace.decider_macs = recording.lengths * backbone.embedding_macs
    for layer in range(1, backbone.n_layers + 1):
        ids = run.state.ids
        lengths = recording.lengths[ids]
        run.book(layer, lengths, lengths, lengths)
        if layer == backbone.n_layers:
            run.answer(torch.arange(len(ids), device=ids.device), recording.first[ids])
        else:
            run.after(layer, recording.pooled[ids, layer - 1])
        if run.finished:
            break
    return run.output()
