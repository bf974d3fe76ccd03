"""Deciders whose decisions are written in the test, and ragged states to ask methods about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stretto.engine.decider import Exits, Silent
from stretto.state import Decision, Point, State


class Scripted(Silent):
    """Decides whatever the function says."""

    def __init__(
        self, decide: Callable[[State], Decision | None], *points: Point, restore: bool = False,
        exits: Exits | None = None,
    ) -> None:  # fmt: skip
        super().__init__(exits)
        self.script, self.restore, self.points = decide, restore, frozenset(points)

    def decide(self, state: State) -> Decision | None:
        return self.script(state)


def ragged_state(
    *scores: list[float], dial: float | list[float] = 0.0, layer: int = 1, protect: tuple[int, ...] = (), **named: Any
) -> State:
    """Sequences between the attention and FFN of a layer; `scores` are the attention their tokens received."""
    lengths = torch.tensor([len(sequence) for sequence in scores])
    sequence = torch.arange(len(scores)).repeat_interleave(lengths)
    position = torch.cat([torch.arange(int(length)) for length in lengths])
    received = torch.tensor([score for sequence in scores for score in sequence])
    return State(
        layer=layer, point="between", rows=torch.zeros(len(sequence), 4), sequence=sequence, position=position,
        frozen=torch.zeros_like(sequence, dtype=torch.bool),
        protected=torch.isin(position, torch.tensor([0, *protect])),
        ids=torch.arange(len(scores)), row_ids=torch.arange(len(sequence)),
        dial=torch.as_tensor(dial, dtype=torch.float64).expand(len(scores)), lengths=lengths,
        decider_macs=torch.zeros_like(lengths), **{"providers": {"attention_received": lambda: received}, **named},
    )  # fmt: skip


def by_sequence(values: Tensor, state: State) -> list[list[Any]]:
    """[N] -> one list per sequence."""
    return [part.tolist() for part in values.split(state.lengths.tolist())]
