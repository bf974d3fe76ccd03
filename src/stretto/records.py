"""Records: which columns of a source hold the text and the label, and what they may hold.

`read` streams `Record`s, each knowing where it came from ("reviews.csv:12"), so that every complaint names
the line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from stretto.errors import StrettoError
from stretto.readers import Table, listed, open_table

TEXT_COLUMNS = ("text", "sentence", "review", "content", "question")
PAIR_COLUMNS = (
    ("text_a", "text_b"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
LABEL_COLUMNS = ("label", "labels", "score", "category", "class", "target")

Label = str | int | float


@dataclass(frozen=True)
class Columns:
    """Which columns to read; None means guess from the usual names."""

    text: str | None = None
    text_b: str | None = None
    label: str | None = None


GUESS = Columns()


@dataclass(frozen=True)
class Record:
    """One input as it stands in its source."""

    texts: tuple[str, ...]  # one text, or two for a pair
    label: Label | None
    where: str  # "reviews.csv:12": the line where it begins (parquet and hub: the row, from 1)
    classes: tuple[str, ...] | None = None  # all label names, if the source declares them (a hub ClassLabel)
    names: tuple[str, ...] = ("text",)  # the columns the texts came from


def read(
    source: str | os.PathLike[str],
    *,
    columns: Columns = GUESS,
    split: str | None = None,
    labelled: bool = True,
) -> Iterator[Record]:
    """The records of `source` (a path, "-" or a hub id; see readers.py), one by one.

    `split` chooses a part of a hub dataset. With `labelled=False` a record may lack its label (None).
    """
    source = os.fspath(source)
    table = open_table(source, split, columns.text or "text")
    return _records("stdin" if source == "-" else source, table, columns, labelled)


def _records(source: str, table: Table, columns: Columns, labelled: bool) -> Iterator[Record]:
    first = next(table.rows, None)
    if first is None:
        raise StrettoError(f"{source}: expected at least one row of data, got none. Check that the file is complete.")
    names = list(first[1])  # the first row settles the columns; a later row that lacks one is an error
    text_columns = _text_columns(source, names, columns)
    label_column = _label_column(source, [n for n in names if n not in text_columns], columns, labelled)
    classes = table.classes.get(label_column or "")
    for where, row in chain([first], table.rows):
        texts = tuple(_text(where, row, name) for name in text_columns)
        label = None if label_column is None else _label(where, row, label_column, classes)
        if label is None and labelled:
            raise StrettoError(
                f"{where}: expected a label in '{label_column}', got none. Fill it in or remove the row."
            )
        yield Record(texts, label, where, classes, text_columns)


def _text_columns(source: str, names: list[str], columns: Columns) -> tuple[str, ...]:
    if columns.text is None and columns.text_b is not None:
        raise StrettoError(f"Expected --text beside --text-b, got only --text-b {columns.text_b}. Name both columns.")
    if columns.text is not None:
        chosen = (columns.text,) if columns.text_b is None else (columns.text, columns.text_b)
        for name, flag in zip(chosen, ("--text", "--text-b"), strict=False):
            _check_column(source, names, name, flag)
        return chosen
    pairs = [pair for pair in PAIR_COLUMNS if set(pair) <= set(names)]
    paired = {name for pair in pairs for name in pair}
    guesses = [*pairs, *((name,) for name in TEXT_COLUMNS if name in names and name not in paired)]
    if len(guesses) == 1:
        return guesses[0]
    found = " and ".join("+".join(guess) for guess in guesses) or "none"
    raise StrettoError(
        f"{source}: expected one column (or pair) known to hold the text, got {found} among the columns "
        f"{listed(names)}. Name it with --text, and the other of a pair with --text-b (in Python: Columns)."
    )


def _label_column(source: str, names: list[str], columns: Columns, labelled: bool) -> str | None:
    if columns.label is not None:
        _check_column(source, names, columns.label, "--label")
        return columns.label
    guesses = [name for name in LABEL_COLUMNS if name in names]
    if len(guesses) == 1 or "label" in guesses:
        return guesses[0]  # "label" is first in the list, and plain enough to win
    if not labelled:
        return None
    raise StrettoError(
        f"{source}: expected one column known to hold the label, got {' and '.join(guesses) or 'none'} among "
        f"the columns {listed(names)}. Name it with --label (in Python: Columns)."
    )


def _check_column(source: str, names: list[str], name: str, flag: str) -> None:
    if name not in names:
        raise StrettoError(
            f"{source}: expected a column '{name}', got the columns {listed(names)}. Choose with {flag}."
        )


def _text(where: str, row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        came = "null" if name in row else f"only the fields {listed(row)}"
        raise StrettoError(f"{where}: expected a text in '{name}', got {came}. Fill it in (an empty text is '').")
    if not isinstance(value, str):
        raise StrettoError(
            f"{where}: expected a text in '{name}', got {value!r:.60} ({type(value).__name__}). "
            "Write it as a string, or choose another column with --text."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character (\ud83d), which no tokenizer takes
        raise StrettoError(
            f"{where}: expected Unicode text in '{name}', got half a surrogate pair ({value[error.start]!a}) "
            f"at character {error.start + 1}. Repair or remove it."
        ) from None
    return value


def _label(where: str, row: dict[str, Any], name: str, classes: tuple[str, ...] | None) -> Label | None:
    value = row.get(name)
    if isinstance(value, bool):
        return str(value).lower()
    if classes is not None and isinstance(value, int):
        return classes[value] if 0 <= value < len(classes) else None  # hidden test labels are -1
    if isinstance(value, str):
        return value.strip() or None
    if value is None or (isinstance(value, float) and math.isnan(value)):  # NaN: pandas' empty cell
        return None
    if isinstance(value, (int, float)):
        return value
    raise StrettoError(
        f"{where}: expected a word or a number in '{name}', got {value!r:.60} ({type(value).__name__}). "
        "Give each example one label, or choose another column with --label."
    )
