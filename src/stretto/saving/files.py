"""The one way stretto writes: a file or a folder appears under its name when it is complete, or nothing changes.

Everything is written to a temporary neighbour, synced to disk and renamed. A failed write removes its neighbour at
once. A killed one leaves it, and the next write to the same place removes it. A full disk, and any other reason why a
file cannot be written, is a `StrettoError`.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from torch import Tensor

#: Suffix of everything that is still being written.
PART = ".part"
#: Suffix of a folder that has just been replaced.
OLD = ".old" + PART
UTF_8: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


# ---- files -------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: str | Path, newline: str | None = None) -> Iterator[IO[str]]:
    """A text file to write to, line by line. A device or a pipe (/dev/stdout) is written directly.

    Half a surrogate pair (of a file name that is not UTF-8) is written as in JSON: \\udce9."""
    target = Path(path)
    if target.exists() and not target.is_file():
        with write_errors(target), target.open("w", newline=newline, **UTF_8) as device:
            yield device
        return
    with replacing_file(target) as neighbour, neighbour.open("w", newline=newline, **UTF_8) as file:
        yield file


def write_text(path: str | Path, text: str) -> None:
    with writing(path) as file:
        file.write(text)


def write_json(path: str | Path, content: Any, indent: int = 2) -> None:
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file."""
    from safetensors.torch import save_file

    with replacing_file(path) as neighbour:
        save_file({name: tensor.contiguous() for name, tensor in untied(tensors).items()}, neighbour)


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with copies in the place of those that share memory (tied weights): safetensors has none."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        apart[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return apart


@contextmanager
def replacing_file(path: str | Path) -> Iterator[Path]:
    """The name of a neighbour for a library to write to; it becomes `path` if there is no error. Links are followed."""
    place = Path(os.path.realpath(path))
    with write_errors(path):
        remove_leftovers(place)
        neighbour = neighbour_of(place)
        try:
            neighbour.touch()
            mode = neighbour.stat().st_mode
            yield neighbour
            neighbour.chmod(mode)  # safetensors writes for the owner alone; a server may run as another user
            sync(neighbour)
            neighbour.replace(place)
        finally:
            neighbour.unlink(missing_ok=True)


# ---- folders -----------------------------------------------------------------------------------------------


@contextmanager
def replacing_folder(path: str | Path, own: Sequence[str] = ("*",)) -> Iterator[Path]:
    """A temporary folder that becomes `path` if there is no error. Links are followed.

    Files that the user added to an earlier folder stay: those that match none of the patterns `own` and are not among
    the new ones."""
    place = Path(os.path.realpath(path))
    with write_errors(path):
        place.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(place, own)
        neighbour = neighbour_of(place)
        try:
            neighbour.mkdir()
            yield neighbour
            for file in neighbour.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)  # as above
                sync(file)
            sync(neighbour)
            if place.exists():
                swap(neighbour, place)
                keep_others(neighbour, place, own)
            else:
                neighbour.rename(place)
            sync(place.parent)
        finally:
            shutil.rmtree(neighbour, ignore_errors=True)


def swap(one: Path, other: Path) -> None:
    """Exchange the names of two folders: in one step on Linux, elsewhere in three."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename is not None and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return
    aside = one.with_suffix(OLD)
    other.rename(aside)
    try:
        one.rename(other)
    except BaseException:
        aside.rename(other)
        raise
    aside.rename(one)


def keep_others(old: Path, place: Path, own: Sequence[str]) -> None:
    """Move the user's files from the old folder to the new one."""
    for entry in old.iterdir():
        if not any(entry.match(pattern) for pattern in own) and not (place / entry.name).exists():
            entry.rename(place / entry.name)


# ---- shared by both ----------------------------------------------------------------------------------------


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Turn errors of writing `path` into a StrettoError, except a closed pipe."""
    try:
        yield
    except Exception as error:
        if not is_write_error(error):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise StrettoError(
            f"Expected to write '{path}', got: {reason}. Nothing was changed there. "
            "Free some space or choose another place."
        ) from error


def is_write_error(error: Exception) -> bool:
    from safetensors import SafetensorError

    if isinstance(error, OSError):
        return not isinstance(error, BrokenPipeError)
    if type(error) is Exception:
        return "(os error " in str(error)  # from tokenizers
    from_torch = any(words in str(error) for words in ("PytorchStreamWriter failed", "unexpected pos"))
    return isinstance(error, SafetensorError) or (isinstance(error, RuntimeError) and from_torch)


def neighbour_of(place: Path) -> Path:
    """A new name next to `place` that contains its owner: `.NAME.HOST-PROCESS-RANDOM.part`."""
    return place.with_name(f".{place.name[:100]}.{host()}-{os.getpid()}-{secrets.token_hex(4)}{PART}")


def host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def remove_leftovers(place: Path, own: Sequence[str] = ("*",)) -> None:
    """Remove the incomplete files that killed processes of this machine left next to `place`.

    A leftover folder may be the previous result. The user's files in it are kept, and all of it if there is no new
    result."""
    stem = f".{place.name[:100]}.{host()}-"
    for leftover in place.parent.glob(f"{glob.escape(stem)}*{PART}"):
        process = re.match(r"\d+", leftover.name.removeprefix(stem))
        if process is None or runs(int(process[0])):
            continue
        if not leftover.is_dir():
            leftover.unlink(missing_ok=True)
        elif leftover.name.endswith(OLD) and not place.exists():
            leftover.rename(place)
        else:
            if place.is_dir():
                keep_others(leftover, place, own)
            shutil.rmtree(leftover, ignore_errors=True)


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def sync(path: Path) -> None:
    """Sync to disk, so that the content is there before the rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
