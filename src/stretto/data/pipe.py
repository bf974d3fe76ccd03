"""Lines of a pipe or a terminal, and whether the next one has arrived."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from io import UnsupportedOperation
from typing import IO

CHUNK = 2**16


class Pipe:
    """Lines as bytes, line ends kept. Sources that are no pipe (a file, a buffer in memory) are always ready."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.read, self.ended = stream, b"", False
        try:
            self.descriptor: int | None = stream.fileno()
        except (UnsupportedOperation, ValueError):
            self.descriptor = None

    def __iter__(self) -> Iterator[bytes]:
        if self.descriptor is None:
            yield from self.stream
            return
        while True:
            while b"\n" not in self.read and not self.ended:
                self._wait_for_more()
            line, end, self.read = self.read.partition(b"\n")
            if line or end:
                yield line + end
            elif self.ended:
                return

    def ready(self) -> bool:
        """Whether the next line, or the end, can be read without waiting."""
        if self.descriptor is None:
            return True
        while b"\n" not in self.read and not self.ended:
            if not select.select([self.descriptor], [], [], 0)[0]:
                return False
            self._wait_for_more()
        return True

    def _wait_for_more(self) -> None:
        assert self.descriptor is not None
        chunk = os.read(self.descriptor, CHUNK)
        self.read += chunk
        self.ended = not chunk
