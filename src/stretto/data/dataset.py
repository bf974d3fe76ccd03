"""Datasets: examples in memory, with labels as numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from stretto.data.records import GUESS, Columns, Label, Record, read
from stretto.data.sources import listed
from stretto.errors import StrettoError


@dataclass
class Dataset:
    """Examples in memory."""

    texts: list[tuple[str, ...]]
    """A text or two; for tags the words; question and context."""
    labels: list[Any] | None
    """Class numbers (names in `label_names`); floats; for tags a class number per word; for questions `Gold`s."""
    label_names: list[str] | None
    where: list[str]

    def __len__(self) -> int:
        return len(self.texts)


def load(
    source: str | os.PathLike[str],
    *,
    task: str = "classification",
    columns: Columns = GUESS,
    split: str | None = None,
    label_names: Sequence[str] | None = None,
    labelled: bool = True,
) -> Dataset:
    """All of `source` in memory, labels as numbers; `task` says what is in it.

    Without `label_names` (training) the names come from the data: those the source declares, else the sorted
    whole numbers if every label is one, else the sorted words. With `label_names` (testing) every label must
    be one of them, or a class number where the names are words.
    """
    records = list(read(source, task=task, columns=columns, split=split, labelled=labelled))
    labels: list[Any] | None = None
    names = list(label_names) if label_names is not None and task in ("classification", "tokens") else None
    if labelled and task == "regression":
        labels = [_finite(record) for record in records]
    elif labelled and task == "span":
        labels = [record.label for record in records]
    elif labelled:
        single = [replace(r, label=tag) for r in records for tag in r.label] if task == "tokens" else records
        if not single and names is None:
            raise StrettoError(f"{records[0].where}: expected at least one word to learn from, got none. Add examples.")
        names = _names(single) if names is None else names
        labels = numbers = class_numbers(single, names)
        if label_names is None and len(set(numbers)) < 2:
            raise StrettoError(
                f"{records[0].where}: expected two different labels or more, got only '{single[0].label}'. "
                "Check the label column, or add examples of another class."
            )
        if task == "tokens":
            left = iter(numbers)
            labels = [list(islice(left, len(record.texts))) for record in records]
    return Dataset([r.texts for r in records], labels, names, [r.where for r in records])


def split_off(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Hold out about `fraction` of the data: (what is left, what is held out), both in file order.

    The examples are shuffled, ordered by label and taken at even steps, so both parts have the same mix of
    labels (of scores, for regression). A class's only example is never held out. Questions about one context stay
    together: a context that was learned from is no test.
    """
    if not 0 < fraction <= 0.5:
        raise StrettoError(f"Expected a fraction above 0 and up to 0.5, got {fraction}. Hold out 0.1, say.")
    order = np.random.default_rng(seed).permutation(len(dataset))
    kind = type(dataset.labels[0]) if dataset.labels else None
    if kind is tuple:
        held = _whole_contexts(dataset, order.tolist(), max(1, int(len(order) * fraction)))
    else:
        if kind in (int, float):
            labels = np.asarray(dataset.labels)
            order = order[np.argsort(labels[order], kind="stable")]
            if dataset.label_names is not None:
                order = order[np.bincount(labels)[labels[order]] > 1]
        if len(order) < 2:
            raise StrettoError(f"Expected two examples or more to split, got {len(dataset)}. Add examples.")
        count = max(1, int(len(order) * fraction))
        # steps of 2 or more: two neighbours are never both taken, so no class is emptied
        held = set(order[((np.arange(count) + 0.5) * len(order) / count).astype(int)].tolist())
    left = [i for i in range(len(dataset)) if i not in held]
    return _take(dataset, left), _take(dataset, sorted(held))


def sample(dataset: Dataset, count: int, seed: int) -> Dataset:
    """At most `count` random examples, in file order."""
    if count >= len(dataset):
        return dataset
    chosen = np.random.default_rng(seed).choice(len(dataset), size=count, replace=False)
    return _take(dataset, sorted(chosen.tolist()))


def by_length(dataset: Dataset) -> Dataset:
    """The same examples, the shortest texts first: batches of near-equal lengths run faster."""
    return _take(dataset, sorted(range(len(dataset)), key=lambda index: sum(map(len, dataset.texts[index]))))


def _whole_contexts(dataset: Dataset, order: Sequence[int], count: int) -> set[int]:
    """About `count` examples: all those about the contexts that come first in `order`."""
    groups: dict[str, list[int]] = {}
    for index in order:
        groups.setdefault(dataset.texts[index][1], []).append(index)
    if len(groups) < 2:
        raise StrettoError(
            f"Expected questions about two contexts or more to split, got {len(groups)}. Add examples, or give the "
            "part to measure on yourself (--dev)."
        )
    held: set[int] = set()
    for group in list(groups.values())[:-1]:
        if len(held) >= count:
            break
        held.update(group)
    return held


def _take(dataset: Dataset, indices: list[int]) -> Dataset:
    texts = [dataset.texts[i] for i in indices]
    labels = None if dataset.labels is None else [dataset.labels[i] for i in indices]
    return Dataset(texts, labels, dataset.label_names, [dataset.where[i] for i in indices])


# ---- labels to numbers -------------------------------------------------------------------------------------


def _names(records: Sequence[Record]) -> list[str]:
    """The label names of training data."""
    if records[0].classes is not None:
        return list(records[0].classes)
    wholes = [_whole(record.label) for record in records]
    if None not in wholes:
        return [str(number) for number in sorted({number for number in wholes if number is not None})]
    if all(_number(record.label) is not None for record in records):
        odd = records[wholes.index(None)]
        raise StrettoError(
            f"{odd.where}: expected class labels (words or whole numbers), got {odd.label} among numbers. "
            "Use the regression task for scores, or write the classes as words."
        )
    return sorted({str(record.label) for record in records})


def class_numbers(records: Sequence[Record], names: list[str]) -> list[int]:
    """The number of each record's label among `names`; an unknown label is an error that names its line."""
    exact = {name: i for i, name in enumerate(names)}
    folded = {name.casefold(): i for i, name in enumerate(names)}
    if len(folded) < len(names):  # names that differ by case alone must be met exactly
        folded = {}
    are_words = all(_whole(name) is None for name in names)
    # transformers' names for want of names: the source's own order of classes is then all there is to go by
    are_placeholders = all(re.fullmatch(r"LABEL_\d+", name) for name in names)

    def number(record: Record) -> int:
        label = str(record.label)
        whole = _whole(record.label)
        if are_placeholders and record.classes is not None:
            whole = record.classes.index(label)
        if label in exact:
            return exact[label]
        if whole is not None and str(whole) in exact:  # "01" or 1.0 for "1"
            return exact[str(whole)]
        if label.casefold() in folded:
            return folded[label.casefold()]
        if whole is not None and are_words and 0 <= whole < len(names):
            return whole
        raise StrettoError(
            f"{record.where}: expected one of the labels {listed(names)}, got '{label}'. "
            "Correct the label, or train with examples of it."
        )

    return [number(record) for record in records]


def _finite(record: Record) -> float:
    value = _number(record.label)
    if value is None:
        raise StrettoError(
            f"{record.where}: expected a finite number as the label, got '{record.label}'. "
            "Correct it, or use the classification task."
        )
    return value


def _number(label: Label | None) -> float | None:
    if label is None or (isinstance(label, str) and "_" in label):  # Python would read "1_2" as 12
        return None
    try:
        value = float(label)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _whole(label: Label | None) -> int | None:
    """The whole number a label stands for: 1, 1.0, "1" and "1.0" are all 1."""
    if isinstance(label, int):
        return label
    if isinstance(label, str) and re.fullmatch(r"[+-]?\d{1,300}", label):
        return int(label)  # not by way of float, which would round long identifiers
    value = _number(label)
    return int(value) if value is not None and value.is_integer() else None
