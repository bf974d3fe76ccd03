"""Datasets: examples in memory, with labels as numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from stretto.data.columns import Layout, Texts
from stretto.data.labels import Classes, Labels
from stretto.data.records import GUESS, Columns, read
from stretto.errors import StrettoError


@dataclass(frozen=True)
class Form:
    """What the examples of a task look like."""

    layout: type[Layout] = Texts
    """Their columns and what these hold."""
    labels: type[Labels] = Classes
    """How labels become numbers."""


class Formed(Protocol):
    """A task, or its class."""

    form: ClassVar[Form]


class TextsWithClasses:
    """The default, if no task is named."""

    form: ClassVar[Form] = Form()


@dataclass
class Dataset:
    """Examples in memory."""

    texts: list[tuple[str, ...]]
    """A text or two; for tags the words; question and context."""
    labels: list[Any] | None
    """As `Form.labels` gives them: class numbers (names in `label_names`); floats; for tags a class number per word;
    for questions `Gold`s."""
    label_names: list[str] | None
    where: list[str]
    form: Form = TextsWithClasses.form

    def __len__(self) -> int:
        return len(self.texts)


def load(
    source: str | os.PathLike[str],
    *,
    task: Formed | type[Formed] = TextsWithClasses,
    columns: Columns = GUESS,
    split: str | None = None,
    label_names: Sequence[str] | None = None,
    labelled: bool = True,
) -> Dataset:
    """All of `source` in memory, labels as numbers; `task` (such as `stretto.tasks.Tokens`) defines its form.

    If `label_names` is None (training), the names come from the data: those the source declares, else the sorted
    whole numbers if every label is one, else the sorted words. Otherwise (testing) every label must
    be one of them, or a class number where the names are words.
    """
    form = form_of(task)
    records = list(read(source, layout=form.layout, columns=columns, split=split, labelled=labelled))
    labels, names = form.labels.numbered(records, label_names) if labelled else (None, None)
    return Dataset([r.texts for r in records], labels, names, [r.where for r in records], form)


def form_of(task: Formed | type[Formed]) -> Form:
    form = getattr(task, "form", None)
    if not isinstance(form, Form):
        raise StrettoError(f"Expected a task such as stretto.tasks.Tokens, got {task!r:.60}. Pass the task itself.")
    return form


def split_off(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Hold out about `fraction` of the data: (what is left, what is held out), both in file order.

    The examples are shuffled, ordered by label and taken at even steps, so both parts have the same mix of
    labels (of scores, for regression). A class's only example is never held out. Questions about one context stay
    together: a context that was trained on is no test.
    """
    if not 0 < fraction <= 0.5:
        raise StrettoError(f"Expected a fraction above 0 and up to 0.5, got {fraction}. Use 0.1, for example.")
    order = np.random.default_rng(seed).permutation(len(dataset))
    shared = dataset.form.layout.shared
    if shared is not None:
        held = _whole_groups(dataset, shared, order.tolist(), max(1, int(len(order) * fraction)))
    else:
        if dataset.labels is not None:
            order = dataset.form.labels.mixed(dataset.labels, order)
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
    return divide(dataset, count, seed)[1]


def divide(dataset: Dataset, count: int, seed: int) -> tuple[Dataset, Dataset]:
    """What is left, and `count` random examples; both in file order. Labels are ignored."""
    chosen = set(np.random.default_rng(seed).choice(len(dataset), size=count, replace=False).tolist())
    left = [i for i in range(len(dataset)) if i not in chosen]
    return _take(dataset, left), _take(dataset, sorted(chosen))


def by_length(dataset: Dataset) -> Dataset:
    """The same examples, the shortest texts first: batches of near-equal lengths run faster."""
    return _take(dataset, sorted(range(len(dataset)), key=lambda index: sum(map(len, dataset.texts[index]))))


def _whole_groups(dataset: Dataset, shared: int, order: Sequence[int], count: int) -> set[int]:
    """About `count` examples: all those with the contexts (text number `shared`) that come first in `order`."""
    groups: dict[str, list[int]] = {}
    for index in order:
        groups.setdefault(dataset.texts[index][shared], []).append(index)
    if len(groups) < 2:
        raise StrettoError(
            f"Expected questions about two contexts or more to split, got {len(groups)}. Add examples, or name the "
            "dev data (--dev)."
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
    return Dataset(texts, labels, dataset.label_names, [dataset.where[i] for i in indices], dataset.form)
