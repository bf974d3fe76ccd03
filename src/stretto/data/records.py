"""Records: the rows of a source, read in the layout of a task.

`read` streams `Record`s. Each has its file and line ("reviews.csv:12"), so that every error names the line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from stretto.data.columns import Columns, Label, Layout, Texts
from stretto.data.sources import Table, listed, open_table
from stretto.errors import StrettoError

__all__ = ["GUESS", "Columns", "Label", "Record", "Records", "read"]

GUESS = Columns()


@dataclass(frozen=True)
class Record:
    """One input, as in its source."""

    texts: tuple[str, ...]  # one text, or two for a pair; words; question and context
    label: Any  # a word or a number; a list of them, for each word; answers; None if there is none
    where: str  # "reviews.csv:12": the line where it begins (parquet and hub: the row, from 1)
    classes: tuple[str, ...] | None = None  # all label names, if the source declares them (a hub ClassLabel)
    given: dict[str, Any] = field(default_factory=dict)  # columns as in the source: those kept, those of the texts


class Records(Iterator[Record]):
    """Records one by one, their number and whether the next is ready."""

    def __init__(self, records: Iterator[Record], table: Table) -> None:
        self.records, self.table = records, table

    def __next__(self) -> Record:
        return next(self.records)

    def count(self) -> int | None:
        """The total number, if it can be found quickly."""
        return self.table.count()

    def ready(self) -> bool:
        """Whether the next one can be read without waiting."""
        return self.table.ready()


def read(
    source: str | os.PathLike[str],
    *,
    layout: type[Layout] = Texts,
    columns: Columns = GUESS,
    split: str | None = None,
    labelled: bool = True,
    keep: Sequence[str] = (),
) -> Records:
    """The records of `source` (a path, "-" or a hub id; see `sources`), one by one.

    `layout` is the expected content of a row (see `columns`). `split` chooses a split of a hub dataset. With
    `labelled=False` labels are not read (None), unless `columns` names their column. `keep` names further columns that
    are `given`.
    """
    source = os.fspath(source)
    table = open_table(source, split, columns.text or "text", columns.delimiter)
    return Records(_records("stdin" if source == "-" else source, table, layout, columns, labelled, keep), table)


def _records(
    source: str, table: Table, kind: type[Layout], columns: Columns, labelled: bool, keep: Sequence[str]
) -> Iterator[Record]:
    with closing(table.rows) as rows:  # closes its file at once, also after a bad row
        first = next(rows, None)
        if first is None:
            raise StrettoError(
                f"{source}: expected at least one row of data, got none. Check that the file is complete."
            )
        # the first row decides the columns; a later row without one is an error
        layout = kind(source, list(first[1]), columns, table.classes, labelled)
        if missing := [name for name in keep if name not in first[1]]:
            raise StrettoError(
                f"{source}: expected the column '{missing[0]}' to keep, got {listed(first[1])}. Name one of them."
            )
        given = tuple(dict.fromkeys((*keep, *layout.text_columns)))
        for where, row in chain([first], rows):
            texts = layout.texts(where, row)
            column = layout.label_column
            label = None if column is None else layout.label(where, row, column, texts)
            if label is None and labelled:
                raise StrettoError(f"{where}: expected a label in '{column}', got none. Fill it in or remove the row.")
            yield Record(texts, label, where, layout.classes, {name: row.get(name) for name in given})
