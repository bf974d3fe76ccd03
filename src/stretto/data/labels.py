"""What labels are, and how they become numbers.

A task names one of these kinds in its `Form`: a class for each input (`Classes`), a number (`Numbers`), a class for
each word (`WordClasses`), or answers as in the source (`Given`). Every error names the line.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.data.columns import Label
from stretto.data.records import Record
from stretto.data.sources import listed
from stretto.errors import StrettoError

#: Labels as a task reads them, and the names of their classes (None if they have none).
Numbered = tuple[list[Any], list[str] | None]


class Labels(ABC):
    """One kind of labels. The type of its values decides the tensor of a batch: floats become float32, whole
    numbers int64, a tuple a row of them, a list one entry for each token."""

    @classmethod
    @abstractmethod
    def numbered(cls, records: Sequence[Record], names: Sequence[str] | None) -> Numbered:
        """The label of each record as the task reads it, and the names of all classes.

        If `names` is None (training), they come from the data. Otherwise (testing) every label must be one of them."""

    @classmethod
    def mixed(cls, labels: Sequence[Any], order: NDArray[Any]) -> NDArray[Any]:
        """Shuffled indices -> those that may be held out, ordered so that even steps give the same mix of labels."""
        return order


class Classes(Labels):
    """Each input has one of several named classes; labels are their numbers."""

    @classmethod
    def numbered(cls, records: Sequence[Record], names: Sequence[str] | None) -> Numbered:
        known = class_names(records) if names is None else list(names)
        numbers = class_numbers(records, known)
        if names is None and len(set(numbers)) < 2:
            raise StrettoError(
                f"{records[0].where}: expected two different labels or more, got only '{records[0].label}'. "
                "Check the label column, or add examples of another class."
            )
        return numbers, known

    @classmethod
    def mixed(cls, labels: Sequence[Any], order: NDArray[Any]) -> NDArray[Any]:
        """By class; the only example of a class is never held out."""
        numbers = np.asarray(labels)
        order = order[np.argsort(numbers[order], kind="stable")]
        return order[np.bincount(numbers)[numbers[order]] > 1]


class Numbers(Labels):
    """Each input has a finite number."""

    @classmethod
    def numbered(cls, records: Sequence[Record], names: Sequence[str] | None) -> Numbered:
        return [finite(record) for record in records], None

    @classmethod
    def mixed(cls, labels: Sequence[Any], order: NDArray[Any]) -> NDArray[Any]:
        return order[np.argsort(np.asarray(labels)[order], kind="stable")]


class WordClasses(Labels):
    """Each word of an input has one of several named classes; a label is the list of their numbers."""

    @classmethod
    def numbered(cls, records: Sequence[Record], names: Sequence[str] | None) -> Numbered:
        words = [replace(record, label=tag) for record in records for tag in record.label]
        if not words and names is None:
            raise StrettoError(f"{records[0].where}: expected at least one word to learn from, got none. Add examples.")
        numbers, known = Classes.numbered(words, names)
        left = iter(numbers)
        return [list(islice(left, len(record.texts))) for record in records], known


class Given(Labels):
    """Labels stay as the layout reads them."""

    @classmethod
    def numbered(cls, records: Sequence[Record], names: Sequence[str] | None) -> Numbered:
        return [record.label for record in records], None


# ---- single labels -----------------------------------------------------------------------------------------


def class_names(records: Sequence[Record]) -> list[str]:
    """Class names of training data: those the source declares, else the sorted whole numbers if every label is
    one, else the sorted words."""
    if records[0].classes is not None:
        return list(records[0].classes)
    wholes = [whole(record.label) for record in records]
    if None not in wholes:
        return [str(number) for number in sorted({number for number in wholes if number is not None})]
    if all(number(record.label) is not None for record in records):
        odd = records[wholes.index(None)]
        raise StrettoError(
            f"{odd.where}: expected class labels (words or whole numbers), got {odd.label} among numbers. "
            "Use the regression task for scores, or write the classes as words."
        )
    return sorted({str(record.label) for record in records})


def mixed_kinds(names: Sequence[str]) -> str:
    """A hint if class names mix numbers and words, for example a placeholder such as 'n/a' among scores."""
    numbers = [name for name in names if number(name) is not None]
    words = [name for name in names if number(name) is None]
    if not numbers or not words:
        return ""
    return (
        f"labels mix numbers ({listed(numbers, most=3)}) and words ({listed(words, most=3)}): each is a class of its "
        "own; correct the file if the words are missing values, or use --task regression for scores"
    )


def class_numbers(records: Sequence[Record], names: Sequence[str]) -> list[int]:
    """The number of each record's label among `names`; an unknown label is an error that names its line."""
    exact = {name: i for i, name in enumerate(names)}
    folded = {name.casefold(): i for i, name in enumerate(names)}
    if len(folded) < len(names):  # if names differ by case alone, labels must match exactly
        folded = {}
    are_words = all(whole(name) is None for name in names)
    # the model has no real names (transformers' placeholders): use the source's own order of classes
    are_placeholders = all(re.fullmatch(r"LABEL_\d+", name) for name in names)

    def class_number(record: Record) -> int:
        label, count = str(record.label), whole(record.label)
        if are_placeholders and record.classes is not None:
            count = record.classes.index(label)
        if label in exact:
            return exact[label]
        if count is not None and str(count) in exact:  # "01" or 1.0 for "1"
            return exact[str(count)]
        if label.casefold() in folded:
            return folded[label.casefold()]
        if count is not None and are_words and 0 <= count < len(names):
            return count
        raise StrettoError(
            f"{record.where}: expected one of the labels {listed(names)}, got '{label}'. "
            "Correct the label, or train with examples of it."
        )

    return [class_number(record) for record in records]


def finite(record: Record) -> float:
    value = number(record.label)
    if value is None:
        raise StrettoError(
            f"{record.where}: expected a finite number as the label, got '{record.label}'. "
            "Correct it, or use the classification task."
        )
    return value


def number(label: Label | None) -> float | None:
    """The finite number that a label means."""
    if label is None or (isinstance(label, str) and "_" in label):  # Python would read "1_2" as 12
        return None
    try:
        value = float(label)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def whole(label: Label | None) -> int | None:
    """The whole number that a label means: 1, 1.0, "1" and "1.0" are all 1."""
    if isinstance(label, int):
        return label
    if isinstance(label, str) and re.fullmatch(r"[+-]?\d{1,300}", label):
        return int(label)  # not via float, which would round long identifiers
    value = number(label)
    return int(value) if value is not None and value.is_integer() else None
