"""Files by pattern and by URL: 'data/*.parquet', 's3://bucket/reviews-*.jsonl' (fsspec; s3 needs the package s3fs)."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError

WILD = "*?["
#: What file systems call the version or the time of change of a file.
CHANGED = ("ETag", "etag", "mtime", "LastModified", "created")


def is_url(source: str) -> bool:
    return "://" in source


def is_pattern(source: str) -> bool:
    return any(character in source for character in WILD) and not Path(source).exists()


def expand(source: str) -> tuple[str, ...]:
    """The files that a pattern matches, sorted, as absolute names; anything else stays as it is."""
    if is_url(source):
        system, path = file_system(source)
        with reading(source):
            found = [system.unstrip_protocol(name) for name in sorted(system.glob(path))]
    elif is_pattern(source):
        found = [str(Path(name).absolute()) for name in sorted(glob.glob(source, recursive=True))]
    else:
        found = [str(Path(source).absolute()) if Path(source).exists() else source]
    if not found:
        raise StrettoError(f"Expected files that match '{source}', got none. Check the path.")
    return tuple(found)


@contextmanager
def local_copy(source: str) -> Iterator[str]:
    """A name that can be opened here: for a URL a local copy, which is removed at the end. Errors name the URL."""
    if not is_url(source):
        yield source
        return
    system, path = file_system(source)
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        copy = str(Path(folder) / Path(path).name)
        with reading(source):
            system.get_file(path, copy)
        try:
            yield copy
        except StrettoError as error:
            raise StrettoError(str(error).replace(copy, source)) from error


def stamp_of(source: str) -> list[Any]:
    """What changes with the content of a file: its size and time of change; nothing for a hub dataset."""
    if is_url(source):
        system, path = file_system(source)
        with reading(source):
            about = system.info(path)
        changed = next(
            (about[name] for name in ("ETag", "etag", "mtime", "LastModified", "created") if name in about), ""
        )
        return [about["size"], str(changed)]
    if not Path(source).is_file():
        return []
    about = Path(source).stat()
    return [about.st_size, str(about.st_mtime_ns)]


def file_system(url: str) -> tuple[Any, str]:
    import fsspec

    with reading(url):
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Inside the `with` block, every failure to read a URL becomes a StrettoError."""
    try:
        yield
    except StrettoError:
        raise
    except Exception as error:  # of any of fsspec's file systems
        raise StrettoError(
            f"Expected a URL that can be read, got '{url}': {' '.join(str(error).split()):.200}. "
            "Check the address, its credentials, and that the package for it is installed."
        ) from error
