"""The command line in a child of this process: its own streams and limits, without loading torch again."""

from __future__ import annotations

import io
import os
import resource
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import Any

CLOSED = "closed"


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


def stretto_child(*args: Any, stdin: bytes | str = b"", stdout: str = "", most_bytes: int | None = None) -> Ended:
    """Run `stretto ARGS`. A stream may be CLOSED; `most_bytes` is the largest file that may be written, as on a full
    disk."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if isinstance(stdin, bytes):
            given.write(stdin)
            given.seek(0)
        child = os.fork()
        if child == 0:
            code = 99
            try:
                for number, file in enumerate((given, out, err)):
                    os.dup2(file.fileno(), number)
                sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
                sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
                sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
                if stdin == CLOSED:
                    os.close(0)
                    sys.stdin = None
                if stdout == CLOSED:
                    os.close(1)
                    sys.stdout = None
                if most_bytes is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
                code = run_main([os.fsdecode(arg) if isinstance(arg, bytes) else str(arg) for arg in args])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return Ended(os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode())


def run_main(args: list[str]) -> int:
    from stretto.cli import main

    sys.argv = ["stretto", *args]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
