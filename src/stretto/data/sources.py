"""Files, stdin and hub datasets, read row by row in bounded memory.

Formats, by the name's ending (`.gz` may follow all but .parquet):
  .csv             comma-separated with a header, quoted as in spreadsheets; a quoted field may span lines
  .tsv             the same with tabs ("excel-tab": a field that begins with " is quoted)
  .jsonl           one JSON object per line; blank lines are skipped
  .json            the same, or one list of objects
  .txt             each line is a text; an empty line is an empty text
  .parquet
  -                stdin; a line that begins with { is a JSON object, any other line is a text
  owner/name       a dataset of the Hugging Face hub, or owner/name:config; or a folder from `save_to_disk`
"""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stretto.data.hub import reachable
from stretto.data.lines import read_lines, stdin_bytes
from stretto.data.pipe import Pipe
from stretto.errors import StrettoError

Failures = tuple[type[Exception], ...]
Row = tuple[str, dict[str, Any]]  # where it begins ("reviews.csv:12"), and its fields
Rows = Generator[Row, None, None]  # closing it closes its file


#: Bytes of a text file whose rows are counted for a progress bar; it takes about a second.
MOST_TO_COUNT = 2**28
#: Characters of a csv field. Python's own limit, 2¹⁷, is too low for long texts. With no limit, a file with an open
#: quote would be read to its end.
LONGEST_FIELD = 2**24


@dataclass
class Table:
    """Rows, with the class names and the number of rows if the source has them."""

    rows: Rows
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of class numbers, by the column that holds them (hub datasets and their parquet files)."""
    count: Callable[[], int | None] = lambda: None
    """The number of rows, if it can be found quickly."""
    ready: Callable[[], bool] = lambda: True
    """Whether the next row can be read without waiting."""


def open_table(source: str, split: str | None = None, text_column: str = "text", delimiter: str | None = None) -> Table:
    """Open `source`; `split` is for hub datasets, `text_column` names the plain lines of stdin and .txt, `delimiter`
    replaces the comma of a .csv or the tab of a .tsv file."""
    path = Path(source)
    check_source(source)
    if source != "-" and (path.is_dir() or _is_on_the_hub(source)):
        return _dataset(source, split)
    if split is not None:
        raise StrettoError(
            f"Expected a hub dataset to split, got '{source}' and the split '{split}'. Leave the split out."
        )
    if source == "-":
        pipe = Pipe(stdin_bytes())
        return Table(_stdin_rows(read_lines("stdin", pipe), text_column), ready=pipe.ready)
    if not path.exists():
        raise _not_found(path)
    kind = _kind(path)
    if delimiter is not None and kind in (".csv", ".tsv"):
        character = separator(delimiter)
        return Table(_csv_rows(source, character), count=partial(_count_rows, path, character))
    if delimiter is not None:
        raise StrettoError(f"Expected a .csv or .tsv file with --delimiter, got '{source}'. Leave it out.")
    if kind == ".parquet":
        return _parquet(source)
    if kind == ".txt":
        return Table(_txt_rows(source, text_column), count=partial(_count_rows, path))
    if kind not in _ROWS_OF:
        raise StrettoError(
            f"{source}: expected a name ending in .csv, .tsv, .jsonl, .json or .txt (also with .gz) or .parquet, "
            f"got '{path.name}'. Rename or convert the file."
        )
    return Table(_ROWS_OF[kind](source), count=partial(_count_rows, path, "\t" if kind == ".tsv" else ","))


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message: 'a', 'b', ... with long names and long lists shortened."""
    names = list(names)
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(f"'{name:.40}'" for name in names[:most]) + more


# ---- kinds of sources ----------------------------------------------------------------------------------------


def _kind(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def check_source(source: str) -> None:
    """Refuse a dataset on a hub that does not answer."""
    if _is_on_the_hub(source) and not reachable():
        raise StrettoError(
            f"{source}: expected a file or a hub dataset within reach, got no answer from the hub. "
            "Check the name and the network, or give the data file itself."
        )


def _is_on_the_hub(source: str) -> bool:
    if Path(source).exists():
        return False
    is_data_file = _kind(Path(source)) in (*_ROWS_OF, ".txt", ".parquet")  # "data/train.csv" is a path
    return not is_data_file and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", source) is not None


def _not_found(path: Path) -> StrettoError:
    folder = path.parent
    there = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, there)
    if close:
        advice = "Did you mean " + " or ".join(f"'{folder / name}'" for name in close) + "?"
    elif not folder.is_dir():
        advice = f"There is no folder '{folder}' either; check the path."
    else:
        advice = "Check the path; a dataset of the hub is written owner/name."
    return StrettoError(f"Expected a file or a hub dataset, got '{path}': file not found. {advice}")


# ---- text files --------------------------------------------------------------------------------------------


def _count_rows(path: Path, delimiter: str = ",") -> int | None:
    """Number of rows of a text file, if it is small enough to be read twice."""
    kind = _kind(path)
    if path.suffix.lower() == ".gz" or kind == ".json" or path.stat().st_size > MOST_TO_COUNT:
        return None
    with path.open("rb") as file:
        if kind == ".txt":
            return sum(1 for _ in file)
        if kind == ".jsonl":
            return sum(1 for line in file if line.strip())
    try:
        csv.field_size_limit(LONGEST_FIELD)
        with path.open(encoding="utf-8", newline="") as text:
            return sum(1 for row in csv.reader(text, delimiter=delimiter) if row) - 1
    except (csv.Error, UnicodeDecodeError):
        return None  # the error is reported when it is read


def separator(name: str) -> str:
    """The character that --delimiter names."""
    found = {"tab": "\t", "\\t": "\t"}.get(name, name)
    if len(found) != 1 or found in '"\r\n':
        raise StrettoError(f"Expected one character or 'tab' as the delimiter, got '{name}'. Write --delimiter ';'.")
    return found


def _csv_rows(source: str, delimiter: str = ",") -> Rows:
    csv.field_size_limit(LONGEST_FIELD)
    with closing(read_lines(source)) as lines:  # also after a bad row: a traceback would keep the file open
        reader = csv.reader(lines, delimiter=delimiter, strict=True)  # strict: a stray quote is an error
        yield from _csv_values(source, reader, delimiter)


def _csv_values(source: str, reader: Any, delimiter: str) -> Rows:
    header: list[str] | None = None
    line = 1
    try:
        for values in reader:
            where = f"{source}:{line}"
            line = reader.line_num + 1  # line_num is the last line of a row; errors name its first line
            if not values:  # a blank line
                continue
            if header is None:
                header = values
                check_separated(where, header, delimiter)
                if len(set(header)) < len(header):
                    raise StrettoError(f"{where}: expected different column names, got {listed(header)}. Rename one.")
            elif len(values) != len(header):
                raise StrettoError(
                    f"{where}: expected {len(header)} fields ({listed(header)}), got {len(values)}. "
                    "Quote the fields that hold separators or line breaks."
                )
            else:
                yield where, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise StrettoError(
            f"{source}:{line}: expected closed quotes in the row that begins here, got '{error}'. "
            'Close the quote and double a quote inside a field (""), or convert the file to .jsonl.'
        ) from None


def check_separated(where: str, header: list[str], delimiter: str) -> None:
    """Refuse a single column whose name shows that another character separates the fields."""
    other = next((each for each in ",;\t|" if each != delimiter and each in header[0]), None)
    if len(header) == 1 and other is not None:
        shown, name = repr(delimiter), "tab" if other == "\t" else f"'{other}'"
        raise StrettoError(
            f"{where}: expected columns separated by {shown}, got the one column {header[0]!r:.60}, which seems to be "
            f"separated by {name}. Add --delimiter {name} (in Python: Columns(delimiter={other!r}))."
        )


def _tsv_rows(source: str) -> Rows:
    return _csv_rows(source, "\t")


def _jsonl_rows(source: str) -> Rows:
    with closing(read_lines(source)) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{source}:{number}", _json_object(f"{source}:{number}", line)


def _json_rows(source: str) -> Rows:
    """One list of objects, as `stretto predict` writes it, or an object per line."""
    with closing(read_lines(source)) as lines:
        first = next(lines, "")
        if not first.lstrip().startswith("["):
            lines.close()
            yield from _jsonl_rows(source)
            return
        try:
            rows = json.loads(first + "".join(lines))
        except (ValueError, RecursionError) as error:
            raise StrettoError(
                f"{source}: expected a JSON list of objects, got bad JSON ({error}). Correct it, or write one object "
                "per line."
            ) from None
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise StrettoError(
                    f"{source}:{number}: expected a JSON list of objects, got {row!r:.60} in it. "
                    'Write each row as {"text": ..., "label": ...}.'
                )
            yield f"{source}:{number}", row


def _txt_rows(source: str, text_column: str) -> Rows:
    for number, line in enumerate(read_lines(source), start=1):
        yield f"{source}:{number}", {text_column: line.rstrip("\r\n")}


def _stdin_rows(lines: Iterable[str], text_column: str) -> Rows:
    for number, line in enumerate(lines, start=1):
        where = f"stdin:{number}"
        # an empty line is an empty text, so that every line gets an answer
        yield where, _json_object(where, line) if line.startswith("{") else {text_column: line.rstrip("\r\n")}


def _json_object(where: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets
        place = f" at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else ""
        raise StrettoError(
            f"{where}: expected one JSON object per line, got bad JSON "
            f"({getattr(error, 'msg', error)}{place}). "
            'Write each row on one line as {"text": ..., "label": ...} (jq -c does this).'
        ) from None
    if not isinstance(value, dict):
        raise StrettoError(
            f"{where}: expected one JSON object per line, got a JSON {type(value).__name__}. "
            'Write each row on one line as {"text": ..., "label": ...} (jq -c ".[]" splits a list).'
        )
    return value


_ROWS_OF: dict[str, Callable[[str], Rows]] = {
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
}


# ---- tables that carry their own schema --------------------------------------------------------------------


def _parquet(source: str) -> Table:
    import pyarrow
    import pyarrow.parquet

    failures = (pyarrow.ArrowException, OSError, UnicodeError)  # the last one for a name that is not UTF-8
    try:
        file = pyarrow.parquet.ParquetFile(source)
    except failures as error:
        raise StrettoError(
            f"{source}: expected a parquet file, got '{_brief(error)}'. Write or copy it again."
        ) from None
    # `datasets` writes the class names into the schema
    about = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
    features = about.get("info", {}).get("features", {})
    inner = {name: _element(feature) for name, feature in features.items()}
    classes = {name: tuple(f["names"]) for name, f in inner.items() if f.get("_type") == "ClassLabel"}
    rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
    return Table(_numbered(rows, source, failures), classes, count=lambda: int(file.metadata.num_rows))


def _element(feature: Any) -> dict[str, Any]:
    """The feature of a column; for a list (older versions of `datasets` write it as a list), that of its elements."""
    if isinstance(feature, list):
        feature = feature[0] if feature else {}
    return feature.get("feature", feature) if isinstance(feature.get("feature"), dict) else feature


def _dataset(source: str, split: str | None) -> Table:
    """A hub dataset (streamed), or a folder made by `save_to_disk` (memory-mapped)."""
    import datasets

    failures = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
    is_folder = Path(source).is_dir()
    try:
        if is_folder:
            found = datasets.load_from_disk(source)
        else:
            name, _, config = source.partition(":")
            found = datasets.load_dataset(name, config or None, streaming=True)
    except failures as error:
        kind = "a folder made by save_to_disk" if is_folder else "a file or a hub dataset that can be reached"
        raise StrettoError(
            f"{source}: expected {kind}, got '{_brief(error)}'. "
            "Check the name and the network, or give the data file itself."
        ) from error
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            raise StrettoError(
                f"{source}: expected one of the splits {listed(found)}, got {split}. Choose it with --split."
            )
        found, source = found[split], f"{source}[{split}]"
    elif split is not None:
        raise StrettoError(f"{source}: expected no split (there is only one), got '{split}'. Leave the split out.")
    features = found.features or {}  # unknown for some streamed datasets
    inner = {name: getattr(f, "feature", f) for name, f in features.items()}  # of a list, its elements
    classes = {name: tuple(f.names) for name, f in inner.items() if isinstance(f, datasets.ClassLabel)}
    return Table(_numbered(found, source, failures), classes, count=lambda: len(found) if is_folder else None)


def _numbered(rows: Iterable[dict[str, Any]], source: str, failures: Failures) -> Rows:
    """Rows with their number, from 1. Errors while reading name it too."""
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{source}:{number}", row
    except failures as error:
        raise StrettoError(
            f"{source}:{number + 1}: expected another row, got '{_brief(error)}'. Check the file or the network."
        ) from error


def _brief(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
