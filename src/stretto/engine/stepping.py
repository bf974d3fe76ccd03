"""The packed engine one layer at a time: sequences enter at any time and are returned as soon as they leave.

    stepping = Stepping(engine, decider)
    stepping.add(inputs, dial)            # now, or between any two steps
    for finished in stepping.step():      # one part goes through one layer
        finished.id, finished.logits, finished.trace

Sequences wait in parts, by the layer that is next for them. A step chooses a layer (by default the lowest, so that new
sequences catch up), joins the parts that wait for it (see `parts`), and takes the first of them through.
`PackedEngine.run` is a loop over this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.engine.decider import Decider
from stretto.engine.parts import TALL, Part, cut, merged, take
from stretto.engine.run import Run, first_state
from stretto.state import Inputs, Trace

if TYPE_CHECKING:
    from stretto.engine.packed import PackedEngine

#: From the parts that wait, by the layer (from 1) that is next for them, to the layer that is run now.
Choice = Callable[[Mapping[int, Sequence[Part]]], int]


@dataclass(frozen=True)
class Finished:
    """A sequence that has left."""

    id: int
    logits: Tensor
    """[C]; where every token is answered [n, C], n the tokens that came in."""
    trace: Trace
    """Of this sequence alone: B = 1."""
    hidden: Tensor | None
    """[n, d] last state of each token as the head reads it, zeros where it was dropped and not restored; None unless
    `keep_hidden`."""


class Stepping:
    """Sequences on their way through the layers.

    `most_rows` is the height up to which parts are joined (default: `TALL`, or that of the tallest part added).
    `choose` selects the next layer among those that parts wait for. The lowest (`min`, the default) joins most parts,
    but old sequences wait while new ones enter. The highest (`max`) finishes started sequences first."""

    def __init__(
        self,
        engine: PackedEngine,
        decider: Decider,
        *,
        most_rows: int | None = None,
        keep_hidden: bool = False,
        context: Any = None,
        choose: Choice = min,
    ) -> None:
        self.engine, self.keep_hidden, self.context, self.choose = engine, keep_hidden, context, choose
        self.run = Run(engine.backbone, decider, exits=engine.exits_of(decider), keep_hidden=keep_hidden)
        self.parts: dict[int, list[Part]] = {}
        """The waiting parts, by their next layer (from 1)."""
        self._unjoined: set[int] = set()  # layers with new parts since parts were last joined there
        self._grows, self._most_rows = most_rows is None, TALL if most_rows is None else most_rows

    def __len__(self) -> int:
        """Sequences that have not left."""
        return sum(part.state.n_sequences for part in self._all_parts())

    @torch.inference_mode()
    def add(self, inputs: Inputs, dial: float | Tensor, *, batch_size: int | None = None) -> range:
        """Add these sequences, `batch_size` to a part (default: all in one); returns their numbers, in order."""
        lengths = inputs.attention_mask.sum(dim=1)
        self.run.forget_before(min((int(part.state.ids.min()) for part in self._all_parts()), default=self.run.next.id))
        first = self.run.enter(lengths, inputs.input_ids.shape[1])
        for which in cut(lengths, batch_size):
            state = first_state(inputs, dial, which, self.context, first)
            self._wait(1, Part(state, self.engine.embed(inputs, state, first.id)))
            if self._grows:
                self._most_rows = max(self._most_rows, state.n_rows)
        return range(first.id, self.run.next.id)

    @torch.inference_mode()
    def advance(self) -> None:
        """One part goes through one layer; sequences that leave are kept until `step` returns them."""
        if not self.parts:
            return
        layer = self.choose(self.parts)
        waiting = self.parts.pop(layer)
        if layer in self._unjoined:
            self._unjoined.discard(layer)
            waiting = merged(waiting, self._most_rows)
        part, *others = waiting
        if others:
            self.parts[layer] = others
        for left in self.engine.through(self.run, layer, part):
            self._wait(layer + 1, left)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One part goes through one layer; returns the sequences that have left, with their answers."""
        self.advance()
        departed, self.run.departed = self.run.departed, []
        return [finished for left in departed for finished in self._hand_out(left.ids, left.logits)]

    @torch.inference_mode()
    def forget(self, ids: Collection[int]) -> None:
        """Drop sequences that are no longer needed; numbers that have left are ignored."""
        for layer, parts in list(self.parts.items()):
            del self.parts[layer]
            for part in parts:
                unwanted = torch.tensor(sorted(ids), dtype=torch.long, device=part.state.ids.device)
                leaving = torch.isin(part.state.ids, unwanted).nonzero().squeeze(1)
                stay = part.state.forget_sequences(leaving) if len(leaving) else None
                self._wait(layer, part if stay is None else Part(part.state, take(part.matrix, stay)))

    def _all_parts(self) -> list[Part]:
        return [part for parts in self.parts.values() for part in parts]

    def _wait(self, layer: int, part: Part) -> None:
        if part.state.n_sequences:
            self.parts.setdefault(layer, []).append(part)
            self._unjoined.add(layer)

    def _hand_out(self, ids: Tensor, logits: Tensor) -> list[Finished]:
        run, trace = self.run, self.run.books.trace(ids)
        lengths = trace.lengths.tolist()
        each = logits.split(lengths) if run.head.every_row else logits.unbind()
        hidden: Sequence[Tensor | None] = [None] * len(each)
        if self.keep_hidden and run.shelf is not None:
            hidden = run.shelf.get(run.books.row_ids(ids)).split(lengths)
        return [
            Finished(id, answer, trace.one(i), states)
            for i, (id, answer, states) in enumerate(zip(ids.tolist(), each, hidden, strict=True))
        ]
