"""The folder that a long run writes: one run at a time, and a finished result is replaced only on request.

A run holds the lock `OUTPUT.lock` while it works. The file names its owner, and the operating system drops the lock
with the process, so that the lock of a killed run is taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from stretto.errors import StrettoError
from stretto.saving.files import write_errors
from stretto.saving.same_run import digest
from stretto.saving.trust import check_name

#: Locks that this process holds: a command and the function it calls may both ask for one.
HELD: set[Path] = set()


@contextmanager
def locked(output: str | Path, *, main: bool = True) -> Iterator[None]:
    """No other run may work on `output` inside; if one does, a `StrettoError` names it.

    Of the processes of one run the `main` one holds the lock."""
    check_name(str(output))
    place = Path(os.path.realpath(output))
    if not main or place in HELD:
        yield
        return
    path = place.with_name(f"{place.name}.lock")
    missing = [folder for folder in path.parents if not folder.exists()]
    with write_errors(output):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = acquire(path, output)
    HELD.add(place)
    try:
        yield
    finally:
        HELD.discard(place)
        with file:
            path.unlink(missing_ok=True)  # before the lock is released: a waiting process checks the file again
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()  # if it is still empty


def acquire(path: Path, output: str | Path) -> IO[str]:
    """The lock file, open and locked, with our name in it."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise StrettoError(
                    f"Expected to be the only process that writes '{output}', got {owner(file)} at work there. "
                    "Wait until it ends, stop it, or choose another output."
                ) from None
        except OSError:
            pass  # a file system without locks
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()  # its owner has just removed it
    file.truncate(0)
    who = {"process": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M}"}
    file.write(json.dumps(who) + "\n")
    file.flush()
    return file


def owner(file: IO[str]) -> str:
    """The owner of a lock, in words."""
    try:
        file.seek(0)
        who = json.loads(file.read())
        return f"process {who['process']} on {who['host']} (since {who['since']})"
    except (ValueError, KeyError, TypeError, OSError):  # it is being written
        return "another process"


# ---- finished and unfinished -------------------------------------------------------------------------------


def refuse_finished(output: Path, mark: str, what: str) -> None:
    """Refuse a folder with a finished result, which has the file `mark`."""
    if (output / mark).exists():
        raise StrettoError(
            f"Expected a new output folder, got '{output}', which holds a finished {what}. "
            "Choose another, or add --overwrite."
        )


def remove_work(output: Path, mark: str, plan: Path, *, restart: bool) -> None:
    """Remove the work folder of `plan` if its run is finished, or with `restart`."""
    if restart or wrote(output / mark, read_plan(plan)):
        shutil.rmtree(plan.parent, ignore_errors=True)


def read_plan(path: Path) -> Any:
    """The plan of an unfinished run, the first line of its file; None if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text.partition("\n")[0] if path.suffix == ".jsonl" else text)
    except (OSError, ValueError):
        return None


def wrote(mark: Path, plan: Any) -> bool:
    """Whether a finished folder was written by the run of this plan."""
    try:
        content = json.loads(mark.read_text(encoding="utf-8"))
        return plan is not None and content.get("provenance", content).get("plan") == digest(plan)
    except (OSError, ValueError, AttributeError):
        return False
