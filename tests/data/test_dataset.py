"""Labels to numbers, and splitting."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import hub_dataset, jsonl, write

from stretto.data import Dataset, load, split_off
from stretto.errors import StrettoError
from stretto.tasks import Classification, Regression

# ---- labels ------------------------------------------------------------------------------------------------


def labelled_file(tmp_path: Path, labels: list[Any]) -> Path:
    return write(tmp_path / "r.jsonl", jsonl(*({"text": "x", "label": label} for label in labels)))


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["pos", "neg", "pos"], ["neg", "pos"], [1, 0, 1]),
        ([" pos", "neg", "pos "], ["neg", "pos"], [1, 0, 1]),
        ([1, 0, 2], ["0", "1", "2"], [1, 0, 2]),
        (["1", "0", "10", "2"], ["0", "1", "2", "10"], [1, 0, 3, 2]),
        ([5, -1, 5], ["-1", "5"], [1, 0, 1]),
        ([1.0, 0.0, "1", "01"], ["0", "1"], [1, 0, 1, 1]),
        ([True, False], ["false", "true"], [1, 0]),
        ([1, "many"], ["1", "many"], [0, 1]),
        (["1_2", "1_3"], ["1_2", "1_3"], [0, 1]),
        (["Yes", "yes"], ["Yes", "yes"], [0, 1]),
        ([2**60, 2**60 + 1], [str(2**60), str(2**60 + 1)], [0, 1]),
        (["nan", "inf"], ["inf", "nan"], [1, 0]),
    ],
)
def test_labels_become_numbers(tmp_path: Path, labels: list[Any], names: list[str], numbers: list[int]) -> None:
    data = load(labelled_file(tmp_path, labels))
    assert (data.label_names, data.labels) == (names, numbers)


@pytest.mark.parametrize(
    ("known", "labels", "numbers"),
    [
        (["neg", "pos"], ["pos", "pos"], [1, 1]),  # one class alone is fine at test time
        (["pos", "neg"], ["pos", "neg"], [0, 1]),  # the given order counts
        (["neg", "pos"], [1, "0", 1.0], [1, 0, 1]),  # class numbers, where names are words
        (["1", "5"], [5, "1", "05"], [1, 0, 1]),  # but names, where names are numbers
        (["NEGATIVE", "POSITIVE"], ["positive"], [1]),
    ],
)
def test_labels_are_matched_to_known_names(
    tmp_path: Path, known: list[str], labels: list[Any], numbers: list[int]
) -> None:
    data = load(labelled_file(tmp_path, labels), label_names=known)
    assert (data.label_names, data.labels) == (known, numbers)


@pytest.mark.parametrize(
    ("known", "label"),
    [
        (["neg", "pos"], "meh"),
        (["neg", "pos"], 2),
        (["neg", "pos"], -1),
        (["1", "5"], 0),
        (["Yes", "yes"], "YES"),
        (["None", "Some"], "other"),
    ],
)
def test_an_unknown_label_is_told_with_the_known_ones(tmp_path: Path, known: list[str], label: Any) -> None:
    path = labelled_file(tmp_path, [known[0], label])
    with pytest.raises(StrettoError) as info:
        load(path, label_names=known)
    names = ", ".join(f"'{name}'" for name in known)
    assert f"{path}:2: expected one of the labels {names}, got '{label}'. Correct" in str(info.value)


def test_long_lists_of_names_are_cut_in_messages(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"'n18', 'n19', \.\.\. \(77 in all\), got 'x'"):
        load(labelled_file(tmp_path, ["x"]), label_names=[f"n{i}" for i in range(77)])


def test_declared_classes_are_matched_by_name_or_failing_names_by_order(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    hub_dataset().to_parquet(path)  # sports, world, sports
    assert load(path, label_names=["arts", "sports", "world"]).labels == [1, 2, 1]
    assert load(path, label_names=["LABEL_0", "LABEL_1", "LABEL_2"]).labels == [1, 0, 1]
    with pytest.raises(StrettoError, match=r"r\.parquet:1: expected one of the labels 'x', 'y', got 'sports'"):
        load(path, label_names=["x", "y"])


@pytest.mark.parametrize("labels", [["pos", "pos"], [1, 1, 1], [1, "1", 1.0]])
def test_one_label_is_not_enough_to_learn_from(tmp_path: Path, labels: list[Any]) -> None:
    with pytest.raises(StrettoError, match=r"r\.jsonl:1: expected two different labels or more, got only .* Check"):
        load(labelled_file(tmp_path, labels))


def test_scores_are_not_taken_for_classes(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"r\.jsonl:2: expected class labels .*, got 0\.37 .*regression task"):
        load(labelled_file(tmp_path, [1, 0.37, "0.5"]))


def test_regression_labels(tmp_path: Path) -> None:
    data = load(labelled_file(tmp_path, [1, "2.5", -0.5]), task=Regression)
    assert (data.labels, data.label_names) == ([1.0, 2.5, -0.5], None)
    assert all(isinstance(label, float) for label in data.labels or [])


@pytest.mark.parametrize("label", ["good", "inf", "nan", True, 10**400])
def test_regression_labels_must_be_finite_numbers(tmp_path: Path, label: Any) -> None:
    with pytest.raises(StrettoError, match=r"r\.jsonl:2: expected a finite number as the label, got '.*classification"):
        load(labelled_file(tmp_path, [1.0, label]), task=Regression)


@pytest.mark.parametrize("task", ["tokens", None])
def test_a_task_is_passed_itself(tmp_path: Path, task: Any) -> None:
    with pytest.raises(StrettoError, match=rf"Expected a task such as stretto\.tasks\.Tokens, got {task!r}\."):
        load(labelled_file(tmp_path, ["pos", "neg"]), task=task)


# ---- splitting ---------------------------------------------------------------------------------------------


def numbered(labels: list[Any] | None, names: list[str] | None = None) -> Dataset:
    count, form = 20 if labels is None else len(labels), Regression.form if names is None else Classification.form
    return Dataset([(str(i),) for i in range(count)], labels, names, [f"r:{i}" for i in range(count)], form)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=60), st.sampled_from([0.1, 0.2, 0.5]), st.integers(0, 9))
def test_split_off_keeps_everything_and_every_class(labels: list[int], fraction: float, seed: int) -> None:
    data = numbered(labels, ["a", "b", "c", "d"])
    left, held = split_off(data, fraction, seed)
    assert sorted(left.where + held.where) == sorted(data.where)
    assert 1 <= len(held) <= max(1, fraction * len(data))
    assert set(left.labels or []) == set(labels)
    counts, held_counts = Counter(labels), Counter(held.labels)
    assert all(abs(held_counts[c] - fraction * counts[c]) <= 1.5 + fraction * 4 for c in counts)
    for part in (left, held):
        assert part.label_names == data.label_names
        assert part.labels == [labels[int(text)] for (text,) in part.texts]
        assert [int(text) for (text,) in part.texts] == sorted(int(text) for (text,) in part.texts)


def test_split_off_is_stratified_and_settled_by_the_seed() -> None:
    data = numbered([0] * 60 + [1] * 30 + [2] * 10, ["a", "b", "c"])
    _, held = split_off(data, 0.1, seed=3)
    assert Counter(held.labels) == {0: 6, 1: 3, 2: 1}
    assert split_off(data, 0.1, seed=3)[1] == held
    assert split_off(data, 0.1, seed=4)[1] != held


def test_split_off_spreads_scores_and_takes_unlabelled_data() -> None:
    _, held = split_off(numbered([i / 10 for i in range(40)]), 0.1, seed=0)
    assert [int(score) for score in held.labels or []] == [0, 1, 2, 3]  # one from each quarter of the range
    left, held = split_off(numbered(None), 0.2, seed=0)
    assert (len(left), len(held), held.labels) == (16, 4, None)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 0.6, 1.0, float("nan")])
def test_split_off_wants_a_fraction(fraction: float) -> None:
    with pytest.raises(StrettoError, match=rf"Expected a fraction above 0 and up to 0\.5, got {fraction}\."):
        split_off(numbered([0, 1], ["a", "b"]), fraction, seed=0)


@pytest.mark.parametrize("labels", [[0], [0, 1]])
def test_split_off_wants_enough_examples(labels: list[int]) -> None:
    with pytest.raises(StrettoError, match=rf"to split, got {len(labels)}\."):
        split_off(numbered(labels, ["a", "b"]), 0.5, seed=0)
