"""Sequences come in at any time and leave at once; each is answered, and pays, as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executed import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from random_decisions import CHANCES, Chances, method_for, rows_of
from scripted import Scripted
from tiny import random_inputs, tiny_backbone, uses_types

from stretto.backbones import Backbone
from stretto.engine.books import Ring
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.stepping import Finished, Stepping
from stretto.state import Decision, Inputs, Output

#: What comes in together, and how many steps after what came before.
ARRIVALS = st.lists(
    st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 9)), min_size=1, max_size=5
)


def as_output(finished: Finished) -> Output:
    return Output(
        finished.logits.unsqueeze(0), finished.trace, None if finished.hidden is None else finished.hidden.unsqueeze(0)
    )


def cropped(inputs: Inputs) -> Inputs:
    """A batch without the columns that none of its sequences has."""
    width = int(inputs.attention_mask.sum(dim=1).max())
    tensors = {name: value[:, :width] for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return Inputs(**tensors)


@pytest.mark.parametrize(
    ("model_type", "head"),
    [("bert", "SequenceClassification"), ("mpnet", "SequenceClassification"), ("electra", "TokenClassification")],
)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    arrivals=ARRIVALS, chances=CHANCES, seed=st.integers(0, 99), most_rows=st.sampled_from([None, 0, 12]),
    choose=st.sampled_from([min, max]), hidden=st.booleans(),
)  # fmt: skip
def test_whenever_it_comes_a_sequence_gets_what_it_gets_alone(
    model_type: str, head: str, arrivals: list[tuple[list[int], int]], chances: Chances, seed: int,
    most_rows: int | None, choose: Callable[..., int], hidden: bool,
) -> None:  # fmt: skip
    backbone = tiny_backbone(model_type, head=head)
    engine = PackedEngine(backbone)
    lengths = [length for batch, _ in arrivals for length in batch]
    names = list(range(len(lengths)))
    everything = random_inputs(lengths, seed, types=uses_types(model_type))
    stepping = Stepping(
        engine, method_for(backbone, chances, seed, names), most_rows=most_rows, choose=choose, keep_hidden=hidden
    )
    found: list[Finished] = []
    for batch, delay in arrivals:
        for _ in range(delay):
            found += stepping.step()
        start = stepping.run.next.id
        some = list(range(start, start + len(batch)))
        assert stepping.add(cropped(rows_of(everything, some)), 0.0) == range(start, start + len(batch))
    while len(stepping):
        found += stepping.step()
    assert sorted(one.id for one in found) == names
    for one in found:
        decider = method_for(backbone, chances, seed, [one.id])
        alone = engine.run(cropped(rows_of(everything, [one.id])), decider, 0.0, keep_hidden=hidden)
        assert_same(as_output(one), alone)


def exit_after(backbone: Backbone, layers: dict[int, int]) -> Scripted:
    """Sequences that leave after the layer named for their number; the others go to the end."""

    def decide(state: Any) -> Decision:
        last = torch.tensor([layers.get(id, backbone.n_layers) for id in state.ids.tolist()])
        return Decision(exit=last == state.layer)

    return Scripted(decide, "after")


def test_who_leaves_is_handed_out_at_once_and_who_comes_later_catches_up() -> None:
    backbone = tiny_backbone("bert")  # 4 layers
    stepping = Stepping(PackedEngine(backbone), exit_after(backbone, {1: 1, 3: 2}))
    assert stepping.add(random_inputs([5, 3, 4]), 0.0) == range(3)
    assert [one.id for one in stepping.step()] == [1]
    assert len(stepping) == 2
    assert stepping.add(random_inputs([6]), 0.0) == range(3, 4)
    assert stepping.step() == []  # the new one goes through layer 1 alone
    assert [len(parts) for parts in stepping.parts.values()] == [2]
    (one,) = stepping.step()  # all three through layer 2, as one part
    assert (one.id, int(one.trace.depth), int(one.trace.lengths)) == (3, 2, 6)
    assert stepping.step() == []
    assert sorted(one.id for one in stepping.step()) == [0, 2]
    assert len(stepping) == 0 and stepping.step() == []


def test_the_oldest_first_if_that_is_the_choice() -> None:
    stepping = Stepping(PackedEngine(tiny_backbone("bert")), Silent(), choose=max)
    stepping.add(random_inputs([5]), 0.0)
    stepping.step()
    stepping.add(random_inputs([5]), 0.0)
    assert [[one.id for one in stepping.step()] for _ in range(7)] == [[], [], [0], [], [], [], [1]]


def test_what_nobody_waits_for_is_dropped() -> None:
    backbone = tiny_backbone("bert")
    engine = PackedEngine(backbone)
    inputs = random_inputs([5, 3, 4, 6])
    stepping = Stepping(engine, exit_after(backbone, {1: 1}))
    stepping.add(inputs, 0.0, batch_size=2)
    found = stepping.step() + stepping.step()
    stepping.forget([0, 1, 3, 77])
    assert len(stepping) == 1
    while len(stepping):
        found += stepping.step()
    assert [one.id for one in found] == [1, 2]
    assert_same(as_output(found[1]), engine.run(rows_of(inputs, [2]), Silent(), 0.0))


def test_memory_is_that_of_what_is_under_way() -> None:
    stepping = Stepping(PackedEngine(tiny_backbone("bert")), Silent(), keep_hidden=True, choose=max)
    for _ in range(30):
        stepping.add(random_inputs([4, 3]), 0.0, batch_size=1)
        while len(stepping) > 3:
            stepping.step()
    assert stepping.run.shelf is not None
    assert stepping.run.next == (60, 240)
    assert len(stepping.run.books.ring.table) <= 16
    assert len(stepping.run.shelf.table) <= 64


def test_a_ring_keeps_what_is_in_use_as_it_grows() -> None:
    ring = Ring(1, torch.long, torch.device("cpu"))
    assert ring.reserve(3) == 0
    ring.put(torch.arange(3), torch.tensor([[10], [11], [12]]))
    ring.first = 2
    assert ring.reserve(2) == 3  # in the places of 0 and 1, which are zero again
    assert ring.get(torch.tensor([2, 3, 4])).squeeze(1).tolist() == [12, 0, 0]
    assert len(ring.table) == 3
    ring.put(torch.tensor([4]), torch.tensor([[14]]))
    assert ring.reserve(4) == 5
    assert ring.get(torch.arange(2, 9)).squeeze(1).tolist() == [12, 0, 14, 0, 0, 0, 0]
