"""Write rows of answers to a file, in the format of its ending. The file gets its name when it is complete.

  .jsonl         a JSON object per line
  .json          a JSON list of objects
  .csv, .tsv     one column per part of the answer
  .parquet       the same with types
All but .parquet may be compressed: `.jsonl.gz`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stretto.errors import StrettoError
from stretto.saving.files import replacing_file, writing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.deploy.predict import Row

Batches = Iterable[list["Row"]]
ENDINGS = ".jsonl, .json, .csv or .tsv (also with .gz) or .parquet"


def check_name(path: Path, *, flat: bool) -> None:
    """Refuse an unknown ending, and .csv or .tsv for answers that hold lists (not `flat`)."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a device
    if kind_of(path) not in (*WRITERS, ".parquet") or path.name.lower().endswith(".parquet.gz"):
        raise StrettoError(f"Expected an output name ending in {ENDINGS}, got '{path}'. Rename it.")
    if kind_of(path) in (".csv", ".tsv") and not flat:
        raise StrettoError(
            f"Expected an output name ending in .jsonl, .json or .parquet, got '{path}': these answers hold lists, "
            f"which {kind_of(path)} cannot. Rename it."
        )


def kind_of(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def write_rows(batches: Batches, path: Path) -> None:
    """All rows to a file, in the format of its ending; to a device as JSON lines."""
    kind = kind_of(path)
    if path.exists() and not path.is_file():
        with writing(path) as device:
            write_lines(batches, device)
    elif kind == ".parquet":
        write_parquet(batches, path)
    else:
        with compressed(path) if path.suffix.lower() == ".gz" else writing(path, newline="") as file:
            WRITERS[kind](batches, file)


@contextmanager
def compressed(path: Path) -> Iterator[IO[str]]:
    with replacing_file(path) as unfinished, unfinished.open("wb") as raw:
        packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0)  # the same rows give the same file
        with io.TextIOWrapper(packed, encoding="utf-8", newline="") as file:
            yield file


def write_lines(batches: Batches, file: IO[str]) -> None:
    for rows in batches:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        file.flush()


def write_list(batches: Batches, file: IO[str]) -> None:
    before = "[\n"
    for rows in batches:
        for row in rows:
            file.write(before + json.dumps(row, ensure_ascii=False))
            before = ",\n"
    file.write("\n]\n")


def write_csv(batches: Batches, file: IO[str], dialect: str = "excel") -> None:
    """One column per label where there are probabilities: `p_good`."""
    writer: csv.DictWriter[str] | None = None
    for rows in batches:
        flat = [flat_row(row) for row in rows]
        if writer is None:
            writer = csv.DictWriter(file, list(flat[0]), dialect=dialect)
            writer.writeheader()
        writer.writerows(flat)


def write_tsv(batches: Batches, file: IO[str]) -> None:
    write_csv(batches, file, "excel-tab")


def flat_row(row: Row) -> Row:
    row = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}
    spread = {f"p_{name}": value for name, value in row.get("probabilities", {}).items()}
    return {**{name: value for name, value in row.items() if name != "probabilities"}, **spread}


def write_parquet(batches: Batches, path: Path) -> None:
    """Types come from the first rows; a column that is empty in them is text."""
    import pyarrow
    import pyarrow.parquet

    writer: Any = None
    with replacing_file(path) as unfinished:
        try:
            for rows in batches:
                if writer is None:
                    found = pyarrow.Table.from_pylist(rows).schema
                    empty = [pyarrow.types.is_null(field.type) for field in found]
                    schema = pyarrow.schema(
                        field.with_type(pyarrow.string()) if is_empty else field
                        for field, is_empty in zip(found, empty, strict=True)
                    )
                    writer = pyarrow.parquet.ParquetWriter(unfinished, schema)
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
        except pyarrow.ArrowException as error:
            raise StrettoError(
                f"Expected columns of one type for '{path}', got: {' '.join(str(error).split()):.200}. "
                "Write .jsonl, or do not --keep the column."
            ) from error
        finally:
            if writer is not None:
                writer.close()


WRITERS: dict[str, Callable[[Batches, IO[str]], None]] = {
    ".jsonl": write_lines, ".json": write_list, ".csv": write_csv, ".tsv": write_tsv,
}  # fmt: skip
