"""The standard streams of a command: open, in UTF-8, and free of what libraries write there by themselves."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def open_streams() -> None:
    """Give stdout and stderr UTF-8, as the files we write have. Refuse a closed stdout: results would be lost.

    The numbers of closed streams are kept occupied: else the next file that is opened would get one of them, and be
    read or written in place of the stream. A name that is not UTF-8 is shown with its bytes escaped."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # open until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if sys.stdout is None:
        print("error: Expected an open stdout, got a closed one. Redirect it to a file or /dev/null.", file=sys.stderr)
        sys.exit(1)


@contextmanager
def without_panics() -> Iterator[None]:
    """Inside, nothing is written to stderr: a panic of tokenizers does so by itself before it is raised.

    For commands alone: it holds for the whole process, and so for all threads."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
