"""The lines of text files and of stdin, decoded one by one. If a file is not UTF-8 text, the error names its kind."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from typing import IO, Any

from stretto.errors import StrettoError

#: First bytes of other kinds of files: what they are, and what to do.
SIGNATURES = {
    b"\x1f\x8b": ("a gzip file", "Rename it to end in .gz."),
    b"PK\x03\x04": ("a zip archive (an .xlsx file is one)", "Unpack it, or export it as .csv."),
    b"PAR1": ("a parquet file", "Rename it to end in .parquet."),
    b"BZh": ("a bzip2 file", "Unpack it (bunzip2)."),
    b"\xfd7zXZ": ("an xz file", "Unpack it (unxz)."),
    b"\x28\xb5\x2f\xfd": ("a zstd file", "Unpack it (unzstd)."),
    b"\xff\xfe": ("text in UTF-16", "Save it as UTF-8 (for example: iconv -f utf-16 -t utf-8)."),
    b"\xfe\xff": ("text in UTF-16", "Save it as UTF-8 (for example: iconv -f utf-16 -t utf-8)."),
}


def stdin_bytes() -> IO[bytes]:
    if sys.stdin is None:
        raise StrettoError("Expected texts on stdin, got a closed stdin. Name a file, or pipe the texts in.")
    return sys.stdin.buffer


def read_lines(source: str, stream: Iterable[bytes] | None = None) -> Generator[str, None, None]:
    """The lines of a UTF-8 file, line ends kept; decoded one by one, so that an error names the line of a bad byte."""
    number = 0
    opener: Callable[..., Any] = gzip.open if source.lower().endswith(".gz") else open
    try:
        with nullcontext(stream) if stream else opener(source, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    refuse_other_kinds(source, raw)
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise StrettoError(
            f"{source}:{number}: expected UTF-8, got the byte 0x{error.object[error.start]:02x} at byte "
            f"{error.start + 1} of the line. Save the file as UTF-8 (for example: iconv -f latin1 -t utf-8)."
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if number == 0 and isinstance(error, gzip.BadGzipFile):
            raise StrettoError(
                f"{source}: expected a gzip file (its name ends in .gz), got another kind of file. "
                "Remove .gz from its name, or compress it."
            ) from None
        raise StrettoError(
            f"{source}:{number + 1}: expected a complete gzip file, got a truncated or damaged one ({error}). "
            "Copy or compress it again."
        ) from None
    except OSError as error:
        raise StrettoError(
            f"{source}: expected a readable file, got '{error.strerror}'. Check its permissions."
        ) from None


def refuse_other_kinds(source: str, first: bytes) -> None:
    """Refuse a file whose first line shows that it holds no UTF-8 text."""
    try:
        first.decode()
        if b"\0" not in first:
            return
    except UnicodeDecodeError:
        pass
    found = next((about for start, about in SIGNATURES.items() if first.startswith(start)), None)
    if found is None and is_utf_16(first):
        found = SIGNATURES[b"\xff\xfe"]
    if found is not None:
        raise StrettoError(f"{source}: expected text in UTF-8, got {found[0]}. {found[1]}")


def is_utf_16(raw: bytes) -> bool:
    """Whether every other byte is 0, as in UTF-16 text of Latin letters without a byte order mark."""
    return len(raw) >= 4 and any(raw[start : len(raw) - 2 : 2].strip(b"\0") == b"" for start in (0, 1))
