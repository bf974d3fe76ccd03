"""Parts of a batch: cut as they come, joined as they shrink, never taller than the first layer."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from executed import small_parts
from scripted import Scripted
from tiny import random_inputs, tiny_backbone, tiny_model

from stretto.budget.sweep import sweep
from stretto.data import Dataset, batches
from stretto.engine.packed import PackedEngine
from stretto.engine.parts import Part, cut, merged
from stretto.engine.run import first_state
from stretto.errors import StrettoError
from stretto.state import Decision, State

LENGTHS = [6, 3, 9, 4, 8, 5, 7, 3]


def parts_of(lengths: list[int], batch_size: int) -> list[Part]:
    """Each row of the matrix holds its own number in the whole batch."""
    inputs = random_inputs(lengths)
    states = [first_state(inputs, 0.0, which) for which in cut(torch.tensor(lengths), batch_size)]
    return [Part(state, state.row_ids.float().unsqueeze(1)) for state in states]


def test_parts_are_cut_as_sequences_come_and_sorted_inside() -> None:
    assert [which.tolist() for which in cut(torch.tensor(LENGTHS), 3)] == [[1, 0, 2], [3, 5, 4], [7, 6]]
    assert [which.tolist() for which in cut(torch.tensor([2, 1]), None)] == [[1, 0]]


def test_neighbours_are_joined_as_long_as_their_rows_fit() -> None:
    parts = parts_of(LENGTHS, 2)  # 9, 13, 13 and 10 rows
    assert [part.state.n_rows for part in parts] == [9, 13, 13, 10]
    assert [part.state.n_rows for part in merged(parts, 13)] == [9, 13, 13, 10]
    assert [part.state.n_rows for part in merged(parts, 23)] == [22, 23]
    (whole,) = merged(parts, 45)
    state = whole.state
    assert state.lengths.tolist() == sorted(LENGTHS)
    assert state.ids.tolist() == [1, 7, 3, 5, 0, 6, 4, 2]
    assert state.sequence.tolist() == [i for i, length in enumerate(sorted(LENGTHS)) for _ in range(length)]
    assert torch.equal(whole.matrix[: state.n_rows, 0], state.row_ids.float())  # each row goes with its bookkeeping


def test_parts_with_other_notes_stay_apart() -> None:
    parts = parts_of([2, 2, 2], 1)
    parts[0].state.notes_of("mine")  # asked for, but nothing noted
    parts[1].state.notes_of("mine").sequences["counter"] = torch.zeros(1)
    assert len(merged(parts, 100)) == 3
    for part in parts:
        part.state.notes_of("mine").sequences["counter"] = torch.ones(1)
        part.state.notes_of("yours").rows["counter"] = torch.zeros(2)
    (whole,) = merged(parts, 100)
    assert whole.state.notes_of("mine").sequences["counter"].tolist() == [1, 1, 1]
    assert whole.state.notes_of("yours").rows["counter"].tolist() == [0] * 6
    assert whole.state.note_names == parts[0].state.note_names


@pytest.mark.parametrize("verb", ["exit", "drop"])
def test_no_matrix_is_taller_than_in_the_first_layer(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the sequences, or most of the tokens, go after two layers: what is left takes fewer, fuller parts."""
    heights: dict[int, list[int]] = {}
    through = PackedEngine.through

    def watched(self, run, layer, part):  # type: ignore[no-untyped-def]
        heights.setdefault(layer, []).append(part.state.n_rows)
        return through(self, run, layer, part)

    def decide(state: State) -> Decision | None:
        if verb == "exit":
            return Decision(exit=state.ids % 2 == 0) if state.layer == 2 else None
        return Decision(drop=state.position > 1) if state.layer == 3 else None

    monkeypatch.setattr(PackedEngine, "through", watched)
    engine, method = PackedEngine(tiny_backbone("bert")), Scripted(decide, "after" if verb == "exit" else "before")
    with small_parts():
        engine.run(random_inputs(LENGTHS), method, 0.0, batch_size=2)
    assert len(heights[1]) == len(heights[2]) == 4
    assert len(heights[4]) < 4
    assert max(map(max, heights.values())) == max(heights[1])


def test_predictions_and_costs_do_not_depend_on_the_batch_size() -> None:
    model = tiny_model("deebert")
    with torch.no_grad():
        for parameter in model.method.parameters():
            parameter.normal_(std=0.4)
    texts = ["good film " * (1 + 5 * i % 7) + "bad plot" * (i % 3) for i in range(3 * batches.WINDOW + 1)]
    dials = torch.linspace(0, 1, len(texts), dtype=torch.float64)
    expected = model.predict(texts, dials, batch_size=len(texts))
    assert len({answer.depth for answer in expected}) > 1
    for size, parts in itertools.product((1, 3), (nullcontext, small_parts)):
        with parts():
            answers = model.predict(texts, dials, batch_size=size)
        for got, answer in zip(answers, expected, strict=True):
            assert (got.label, got.depth, got.cost) == (answer.label, answer.depth, answer.cost)
            assert got.score == pytest.approx(answer.score, abs=1e-5)


def test_windows_hold_whole_batches_and_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    features = [{"input_ids": [1] * length, "attention_mask": [1] * length} for length in (4, 4, 4, 4, 4, 30, 4)]
    monkeypatch.setattr(batches, "WINDOW", 2)
    assert [len(inputs.input_ids) for inputs in batches.windows(features, 0, 2)] == [4, 3]
    monkeypatch.setattr(batches, "WINDOW_TOKENS", 20)  # with the padding, the third batch is too long for company
    assert [len(inputs.input_ids) for inputs in batches.windows(features, 0, 2)] == [4, 2, 1]
    assert [len(inputs.input_ids) for inputs in batches.windows(features, 0, 1)] == [2, 2, 1, 1, 1]


def test_a_run_leaves_nothing_behind() -> None:
    """What a layer computed is freed at once, and not when the garbage collector comes round."""
    model = tiny_model("deebert")
    gc.collect()
    gc.disable()
    try:
        model.packed.run(random_inputs(LENGTHS), model.method, 0.5, batch_size=2)
        assert not [thing for thing in gc.get_objects() if type(thing) is State]
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
def test_every_door_wants_a_whole_number_from_one(size: Any) -> None:
    model = tiny_model("full")
    data = Dataset([("a film",)], [0], ["bad", "good"], ["made:1"])
    for call in (
        lambda: model.run(random_inputs([3]), batch_size=size),
        lambda: sweep(model, data, batch_size=size),
    ):
        with pytest.raises(StrettoError, match="batch_size of 1 or more"):
            call()
