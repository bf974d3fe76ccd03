"""The interface that the engines call: a `Decider`. It is a method, or it only watches, records or follows a script.

A `Decider` names the points where it is called, and decides there. It has no loop and no mask. Its notes between layers
are private (`State.notes_of`), so that several deciders can work on one `State`. `ask` calls one of them, optionally
with another dial.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from stretto.state import Decision, Point, Stack, State


class LayerExits(Protocol):
    """Exits as an engine runs them: one after each layer but the last."""

    macs: int
    """Multiply-adds of one exit, for one sequence."""

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        """[N, d] -> [B, d]: what an exit reads."""

    def __call__(self, layer: int, pooled: Tensor) -> Tensor:
        """Answers of the exit after `layer` (from 1): [B, d] -> [B, C]."""


class Exits(LayerExits, Protocol):
    """Exits as a decider owns them, with weights that may change."""

    def parameters(self) -> Iterator[Tensor]: ...

    def packed(self) -> LayerExits:
        """The same exits with their weights, as they are now, laid out for the packed engine."""


class OwnHead(Protocol):
    """A head that answers some sequences instead of the model's own. For them all rows of the last layer are computed,
    even if the model's head reads only one."""

    macs: int
    """Multiply-adds for one sequence."""

    def answers(self, state: State) -> Tensor:
        """[B] bool: sequences that this head answers."""

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        """[N, d] -> [B, …]: what it reads."""

    def __call__(self, pooled: Tensor) -> Tensor:
        """[B, …] -> [B, C]"""


class Decider(Protocol):
    """What an engine needs to know of a decider."""

    @property
    def points(self) -> frozenset[Point]:
        """Where `decide` is called."""

    @property
    def stacks(self) -> frozenset[Stack]:
        """In which stacks it is called: the encoder, the decoder, or both (`State.stack`)."""

    @property
    def exits(self) -> Exits | None:
        """What answers the sequences that leave after a layer; None: the final head does."""

    @property
    def restore(self) -> bool:
        """Whether dropped tokens get their last state back after the last layer."""

    def own_head(self) -> OwnHead | None:
        """A head that answers instead of the model's own; None if there is none."""

    def decide(self, state: State) -> Decision | None:
        """What to do with the live rows at this point of this layer; None means nothing."""


class Silent:
    """Decides nothing: the full model. Deciders that are not methods start from it."""

    points: frozenset[Point] = frozenset()
    stacks: frozenset[Stack] = frozenset({"encoder"})
    restore = False

    def __init__(self, exits: Exits | None = None) -> None:
        self.exits = exits

    def own_head(self) -> OwnHead | None:
        return None

    def decide(self, state: State) -> Decision | None:
        return None


NOTHING = Decision()


def ask(decider: Decider, state: State, dial: Tensor | None = None) -> Decision:
    """The decision of a decider, if this is one of its points. `dial` ([B]; default: the state's) is for it only."""
    if state.point not in decider.points or state.stack not in decider.stacks:
        return NOTHING
    before = state.dial
    state.dial = before if dial is None else dial
    decision = decider.decide(state)
    state.dial = before
    return decision or NOTHING
