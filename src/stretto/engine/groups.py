"""Which sequences of a packed batch are computed in one call, and where their rows stand.

Sequences stand one after another in the packed matrices, sorted by length. Neighbours of equal size are taken as they
stand; neighbours that are short and nearly of a size are padded to the largest of them, within `MOST_PADDING`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

#: Keys up to which batched products are faster than the fused kernel.
SHORT = 128
#: Most scores of one group: a larger matrix leaves the cache, and is fresh memory at every call.
MOST_SCORES = 2**18
#: What padding may add to the products of a layer. A call takes as long as that; and what is counted stays true.
MOST_PADDING = 1 / 128


@dataclass(frozen=True)
class Block:
    """The rows of a few neighbouring sequences in a packed matrix: from row `start` on, `sizes` of each."""

    start: int
    sizes: tuple[int, ...]
    device: torch.device

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + sum(self.sizes))

    @cached_property
    def most(self) -> int:
        return max(self.sizes)

    @cached_property
    def is_even(self) -> bool:
        return min(self.sizes) == self.most

    def spread(self, packed: Tensor) -> Tensor:
        """[N, ...] -> [count, most, ...]: a view if sizes are equal, else with some row where one is missing."""
        rows = packed[self.place] if self.is_even else packed.index_select(0, self._row_of_cell)
        return rows.view(len(self.sizes), self.most, *packed.shape[1:])

    def pack(self, spread: Tensor) -> Tensor:
        """[count, most, ...] -> [rows, ...]: the rows without what `spread` added."""
        cells = spread.flatten(0, 1)
        return cells if self.is_even else cells.index_select(0, self._cell_of_row)

    def cells(self, rows: Tensor) -> Tensor:
        """Rows of the packed matrix -> where they are found in [count * most]."""
        return rows - self.start if self.is_even else self._cell_of_row[rows - self.start]

    @cached_property
    def present(self) -> Tensor:
        """[count, most]: whether there is a row."""
        sizes = torch.tensor(self.sizes, device=self.device)
        return torch.arange(self.most, device=self.device) < sizes.unsqueeze(1)

    @cached_property
    def _cell_of_row(self) -> Tensor:
        return self.present.flatten().nonzero().squeeze(1)

    @cached_property
    def _row_of_cell(self) -> Tensor:
        """For a missing row the one before it."""
        return self.start + (self.present.flatten().cumsum(0) - 1).clamp(min=0)


@dataclass(frozen=True)
class Group:
    """Sequences computed in one call, from the `first` on."""

    first: int
    queries: Block
    keys: Block

    @property
    def count(self) -> int:
        return len(self.queries.sizes)

    @cached_property
    def mask(self) -> Tensor | None:
        """[count, 1, 1, n_key] to be added to scores: nobody sees a key that is not there. None: all are there."""
        if self.keys.is_even:
            return None
        present = self.keys.present[:, None, None, :]
        return torch.zeros(present.shape, device=present.device).masked_fill(~present, -torch.inf)


def together(n_query: Sequence[int], n_key: Sequence[int], heads: int, d: int, ffn: int) -> Iterator[tuple[int, int]]:
    """[first, end) of the neighbouring sequences to be computed in one call.

    A layer's multiply-adds are 2d (d (n_query + n_key) + ffn n_query), without attention itself; each pair of a query
    and a key adds 2d."""
    first = 0
    while first < len(n_query):
        end, pairs, allowed, most_query, most_key = first, 0, 0.0, 0, 0
        while end < len(n_query):
            q, k = n_query[end], n_key[end]
            most_query, most_key = max(most_query, q), max(most_key, k)
            pairs += q * k
            allowed += MOST_PADDING * (d * (q + k) + ffn * q) if most_key <= SHORT else 0
            computed = (end + 1 - first) * most_query * most_key
            if end > first and (computed - pairs > allowed or heads * computed > MOST_SCORES):
                break
            end += 1
        yield first, end
        first = end


@lru_cache(maxsize=64)  # most layers meet the sizes of the layer before
def groups(
    n_query: tuple[int, ...], n_key: tuple[int, ...], heads: int, d: int, ffn: int, device: torch.device
) -> list[Group]:
    """All sequences that have queries."""
    found, query_start, key_start = [], 0, 0
    for first, end in together(n_query, n_key, heads, d, ffn):
        queries = Block(query_start, n_query[first:end], device)
        keys = Block(key_start, n_key[first:end], device)
        query_start, key_start = queries.place.stop, keys.place.stop
        if queries.most:
            found.append(Group(first, queries, keys))
    return found
