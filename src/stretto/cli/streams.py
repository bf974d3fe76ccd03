"""The standard streams of a command, which the caller may have closed or set to another encoding."""

from __future__ import annotations

import io
import os
import sys


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
