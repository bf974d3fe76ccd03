"""The command line in a child of this process: its own streams and limits, without loading torch again."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

CLOSED = "closed"


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


class Child:
    """`stretto ARGS` as a child, used as a `subprocess.Popen`. A stream is a file descriptor, a path or CLOSED;
    `most_bytes` is the largest file that may be written, as on a full disk; the child closes `unused` descriptors."""

    def __init__(
        self, *args: Any, stdin: int | str, stdout: int | str, stderr: int,
        most_bytes: int | None = None, environment: Mapping[str, str] | None = None, unused: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                torch.set_num_threads(1)  # a team of threads does not survive a fork
                os.environ.update(environment or {})
                open_streams(stdin, stdout, stderr)
                for number in unused:
                    os.close(number)
                if most_bytes is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
                code = run_main([os.fsdecode(arg) if isinstance(arg, bytes) else str(arg) for arg in args])
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired("stretto", timeout)
            else:
                time.sleep(0.002)
        return self.returncode


def open_streams(stdin: int | str, stdout: int | str, stderr: int) -> None:
    """Make these the standard streams of this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background lets its children ignore it
    for number, stream in enumerate((stdin, stdout, stderr)):
        if stream != CLOSED:
            os.dup2(stream if isinstance(stream, int) else os.open(stream, os.O_RDWR), number)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    if stdin == CLOSED:
        os.close(0)
        sys.stdin = None
    if stdout == CLOSED:
        os.close(1)
        sys.stdout = None


def stretto_child(*args: Any, stdin: bytes | str = b"", stdout: str = "", **settings: Any) -> Ended:
    """Run `stretto ARGS` to its end. `stdin` is what it reads, a path or CLOSED, `stdout` a path or CLOSED; for
    `settings` see `Child`."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if isinstance(stdin, bytes):
            given.write(stdin)
            given.seek(0)
        source = given.fileno() if isinstance(stdin, bytes) else stdin
        code = Child(*args, stdin=source, stdout=stdout or out.fileno(), stderr=err.fileno(), **settings).wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read().decode(), err.read().decode())


class Piped(Child):
    """A child that this process talks to."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        (given, write), (read, out), (read_error, err) = os.pipe(), os.pipe(), os.pipe()
        super().__init__(*args, stdin=given, stdout=out, stderr=err, unused=(write, read, read_error), **settings)
        for end in (given, out, err):
            os.close(end)
        self.stdin, self.stdout, self.stderr = os.fdopen(write, "w"), os.fdopen(read), os.fdopen(read_error)

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        streams: list[IO[str]] = [self.stdin, self.stdout, self.stderr]
        for stream in streams:
            stream.close()


def run_main(args: list[str]) -> int:
    from stretto.cli import main

    sys.argv = ["stretto", *args]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
