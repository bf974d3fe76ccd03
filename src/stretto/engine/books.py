"""What is stored of each sequence and each row until its answer is returned.

Sequences and rows are numbered as they enter. Numbers are never reused; the tables only hold live ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.state import Trace


class Ring:
    """A table whose rows are numbered. Number n is in row n modulo the length, so that old rows are overwritten."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.table = torch.zeros(0, width, dtype=dtype, device=device)
        self.first = 0
        """The lowest number in use."""
        self.end = 0
        """The next free number."""

    def reserve(self, count: int) -> int:
        """The first of `count` new numbers, one after another; their rows are zero."""
        start, self.end = self.end, self.end + count
        if self.end - self.first > len(self.table):
            old = torch.arange(self.first, start, device=self.table.device)
            kept = self.get(old) if len(old) else None
            size = max(self.end - self.first, 2 * len(self.table))
            self.table = self.table.new_zeros(size, self.table.shape[1])
            if kept is not None:
                self.put(old, kept)
        elif count:
            self.table[torch.arange(start, self.end, device=self.table.device) % len(self.table)] = 0
        return start

    def put(self, numbers: Tensor, rows: Tensor) -> None:
        self.table[numbers % len(self.table)] = rows.to(self.table.dtype)  # autocast may have made them narrow

    def get(self, numbers: Tensor) -> Tensor:
        """[M] -> [M, width]"""
        return self.table[numbers % len(self.table)]


class Counted(NamedTuple):
    """What one layer did. All tensors are [B], B the sequences that were alive."""

    layer: int
    ids: Tensor
    n_query: Tensor
    n_key: Tensor
    n_ffn: Tensor
    skipped: Tensor | None
    """None: nothing."""


KINDS = ("n_query", "n_key", "n_ffn", "skipped")
LENGTH, MACS, FIRST_ROW, COUNTS = range(4)  # columns; the counts of all layers follow, of each kind in turn


class Books:
    """The live sequences: their lengths, and what has been executed for each."""

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self.n_layers = n_layers
        self.ring = Ring(COUNTS + len(KINDS) * n_layers, torch.long, device)
        self.pending: list[Counted] = []  # written all at once when they are read: many small writes are slow

    def enter(self, lengths: Tensor, first_rows: Tensor, macs: Tensor) -> None:
        """New sequences; [B] tokens, numbers of their first rows, multiply-adds of deciders so far."""
        self._write()
        first = self.ring.reserve(len(lengths))
        numbers = torch.arange(first, self.ring.end, device=lengths.device) % len(self.ring.table)
        self.ring.table[numbers, :COUNTS] = torch.stack([lengths, macs, first_rows], dim=1)

    def count(
        self, layer: int, ids: Tensor, n_query: Tensor, n_key: Tensor, n_ffn: Tensor, skipped: Tensor | None = None
    ) -> None:
        self.pending.append(Counted(layer, ids, n_query, n_key, n_ffn, skipped))

    def add_macs(self, ids: Tensor, macs: Tensor) -> None:
        """[k] multiply-adds of the deciders."""
        self.ring.table[ids % len(self.ring.table), MACS] += macs

    def lengths(self, ids: Tensor) -> Tensor:
        """[k] tokens that came in."""
        return self.ring.get(ids)[:, LENGTH]

    def first_row(self, id: int) -> int:
        """The number of the first row of a sequence."""
        return int(self.ring.table[id % len(self.ring.table), FIRST_ROW])

    def row_ids(self, ids: Tensor) -> Tensor:
        """The numbers of all rows of these sequences, by sequence and position."""
        length, _, first_row = self.ring.get(ids)[:, :COUNTS].unbind(dim=1)
        start = length.cumsum(0) - length
        return torch.arange(int(length.sum()), device=ids.device) + (first_row - start).repeat_interleave(length)

    def trace(self, ids: Tensor) -> Trace:
        self._write()
        found = self.ring.get(ids)
        counts = dict(zip(KINDS, found[:, COUNTS:].split(self.n_layers, dim=1), strict=True))
        return Trace(lengths=found[:, LENGTH], decider_macs=found[:, MACS], **counts)

    def _write(self) -> None:
        if not self.pending:
            return
        ids = torch.cat([entry.ids for entry in self.pending]) % len(self.ring.table)
        layers = torch.tensor([entry.layer for entry in self.pending], device=ids.device)
        sizes = torch.tensor([len(entry.ids) for entry in self.pending], device=ids.device)
        column = COUNTS + layers.repeat_interleave(sizes) - 1
        some_skipped = any(entry.skipped is not None for entry in self.pending)
        for kind, name in enumerate(KINDS if some_skipped else KINDS[:-1]):
            counts = [getattr(entry, name) for entry in self.pending]
            zeros = (torch.zeros_like(entry.ids) for entry in self.pending)
            whole = torch.cat([zero if count is None else count for count, zero in zip(counts, zeros, strict=True)])
            self.ring.table[ids, column + kind * self.n_layers] = whole
        self.pending.clear()
