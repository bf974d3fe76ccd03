"""Tables: drawn with rich on a terminal, aligned plain text in a pipe or a file, Markdown and HTML in a report.

A table is a list of rows, each a mapping from heading to value; the first row decides the columns and their order.
`formats` gives a heading its format specification (".3f"); a value that is None leaves its cell empty.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from numbers import Number
from typing import IO, Any

Rows = Sequence[Mapping[str, Any]]
Formats = Mapping[str, str]


def show_table(rows: Rows, formats: Formats | None = None, *, title: str = "", file: IO[str] | None = None) -> None:
    """Print a table to `file` (default: stdout), in colour or plain."""
    stream = sys.stdout if file is None else file
    if stream.isatty():
        _show_rich(rows, formats or {}, title, stream)
    else:
        heading = f"{title}\n" if title else ""
        print(f"{heading}{plain_table(rows, formats)}", file=stream)


def plain_table(rows: Rows, formats: Formats | None = None) -> str:
    """Columns aligned by spaces: numbers to the right, words to the left."""
    lines, to_right = _cells(rows, formats or {})
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, to_right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join(map(line, lines))


def markdown_table(rows: Rows, formats: Formats | None = None) -> str:
    lines, to_right = _cells(rows, formats or {})
    marks = ["---:" if right else "---" for right in to_right]
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in cells] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [escaped[0], marks, *escaped[1:]])


def html_table(rows: Rows, formats: Formats | None = None) -> str:
    lines, to_right = _cells(rows, formats or {})
    styles = [' style="text-align: right"' if right else "" for right in to_right]

    def line(cells: Sequence[str], tag: str) -> str:
        marked = (f"<{tag}{style}>{escape(cell)}</{tag}>" for cell, style in zip(cells, styles, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    return "\n".join(["<table>", line(lines[0], "th"), *(line(cells, "td") for cells in lines[1:]), "</table>"])


def _show_rich(rows: Rows, formats: Formats, title: str, stream: IO[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines, to_right = _cells(rows, formats)
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading, right in zip(lines[0], to_right, strict=True):
        table.add_column(Text(heading), justify="right" if right else "left")
    for cells in lines[1:]:
        table.add_row(*map(Text, cells))  # Text: a label such as "[bold]" is not markup
    Console(file=stream).print(table)


def _cells(rows: Rows, formats: Formats) -> tuple[list[list[str]], list[bool]]:
    """The headings and every row as strings, and which columns hold numbers."""
    if not rows:
        return [["(none)"]], [False]
    headings = list(rows[0])
    lines = [headings]
    for row in rows:
        values = [row.get(heading) for heading in headings]
        lines.append([_cell(value, formats.get(heading, "")) for heading, value in zip(headings, values, strict=True)])
    to_right = [all(isinstance(row.get(h), Number | None) for row in rows) for h in headings]
    return lines, to_right


def _cell(value: Any, spec: str) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format(value, spec or "g")
    return str(value)
