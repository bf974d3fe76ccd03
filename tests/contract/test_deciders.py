"""Deciders that share a run: each keeps its own notes and decides what it decides alone."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import pytest
import torch
from scripted import ragged_state
from tiny import LABELLING, make, random_inputs, tiny_backbone

from stretto.engine.decider import Decider, Silent, ask
from stretto.engine.packed import PackedEngine
from stretto.methods import Method
from stretto.methods.exits import ExitHeads
from stretto.state import Compared, Decision, State

LENGTHS = [9, 5, 1, 12, 5, 7]
#: Decisions in order, each with its layer and point.
Decided = list[tuple[int, str, Decision]]


class InTurn(Silent):
    """Calls several deciders at every point, each with its own dial, and follows the first of them."""

    points = frozenset({"before", "between", "after"})

    def __init__(self, exits: ExitHeads, *deciders: tuple[Decider, float]) -> None:
        super().__init__(exits)
        self.deciders, self.decided = deciders, [Decided() for _ in deciders]

    def decide(self, state: State) -> Decision:
        for (decider, dial), decided in zip(self.deciders, self.decided, strict=True):
            decision = ask(decider, state, torch.full_like(state.dial, dial))
            decided.append((state.layer, state.point, decision))
        return self.decided[0][-1][2]


class Repeating(Silent):
    """Repeats the decisions of another decider, and notes nothing."""

    points = InTurn.points

    def __init__(self, decided: Decided) -> None:
        super().__init__()
        self.decided = iter(decided)

    def decide(self, state: State) -> Decision:
        layer, point, decision = next(self.decided)
        assert (layer, point) == (state.layer, state.point)
        return decision


@cache
def model() -> tuple[PackedEngine, ExitHeads]:
    backbone = tiny_backbone("bert")
    exits = make("deebert", backbone).exits
    assert exits is not None
    return PackedEngine(backbone), exits


@cache
def method_and_dial(name: str) -> tuple[Method, float]:
    method = make(name, model()[0].backbone)
    sweep = method.dial.sweep
    return method, sweep[3 * len(sweep) // 4]


def decided_by(*deciders: tuple[Decider, float]) -> list[Decided]:
    engine, exits = model()
    together = InTurn(exits, *deciders)
    engine.run(random_inputs(LENGTHS), together, 0.0)
    return together.decided


def assert_same_decisions(got: Decided, expected: Decided) -> None:
    assert len(got) == len(expected) > 0
    for (_, _, mine), (_, _, theirs) in zip(got, expected, strict=True):
        for field in fields(Decision):
            left, right = getattr(mine, field.name), getattr(theirs, field.name)
            if isinstance(left, Compared):
                assert left.what == right.what
                left, right = left[1:], right[1:]
            torch.testing.assert_close(left, right, msg=field.name)


@pytest.mark.parametrize("name", LABELLING)
def test_two_methods_on_the_same_states_decide_as_each_does_alone(name: str) -> None:
    """The second is compared with itself on the same states, without the notes of the first."""
    first = method_and_dial(name)
    (alone,) = decided_by(first)
    for other in LABELLING:
        second = method_and_dial(other)
        if other == name:  # two of a kind keep their notes apart too
            second = make(name, model()[0].backbone), second[1]
        _, expected = decided_by((Repeating(alone), 0.0), second)
        both = decided_by(first, second)
        assert_same_decisions(both[0], alone)
        assert_same_decisions(both[1], expected)


def test_a_decider_is_called_at_its_points_with_its_own_dial() -> None:
    class Curious(Silent):
        points = frozenset({"between"})

        def decide(self, state: State) -> Decision:
            assert state.dial.tolist() == [0.7, 0.8]
            return Decision(drop=state.position > 0)

    state = ragged_state([0.0, 1.0], [0.0], dial=0.1)
    decision = ask(Curious(), state, torch.tensor([0.7, 0.8], dtype=torch.float64))
    assert decision.verbs.keys() == {"drop"}
    assert state.dial.tolist() == [0.1, 0.1]
    state.point = "before"
    assert not ask(Curious(), state).verbs


def test_notes_on_the_input_are_read_only() -> None:
    def write(state: State) -> None:
        state.input_notes["word"] = state.position  # type: ignore[index]

    class Writer(Silent):
        points = frozenset({"after"})

        def decide(self, state: State) -> None:
            write(state)

    with pytest.raises(TypeError, match="does not support item assignment"):
        model()[0].run(random_inputs(LENGTHS), Writer(), 0.0)


class Freezing(Silent):
    """Freezes every second token: once, saying later that none is to be frozen, or before every layer."""

    points = frozenset({"before"})

    def __init__(self, exits: ExitHeads, once: bool) -> None:
        super().__init__(exits)
        self.once = once

    def decide(self, state: State) -> Decision:
        second = state.position % 2 == 1
        return Decision(freeze=second & (state.layer == 1) if self.once else second)


def test_a_frozen_token_does_not_thaw() -> None:
    backbone = tiny_backbone("bert")
    exits = make("deebert", backbone).exits
    assert exits is not None
    once, always = (
        PackedEngine(backbone).run(random_inputs(LENGTHS), Freezing(exits, each), 0.0) for each in (True, False)
    )
    assert torch.equal(once.trace.n_query, always.trace.n_query)
    torch.testing.assert_close(once.logits, always.logits)
