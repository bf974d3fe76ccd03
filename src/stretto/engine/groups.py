"""Which sequences of a packed batch are computed in one call, and where their rows are.

Sequences are in the packed matrices one after another, sorted by length. Neighbours of equal size need no padding.
Short neighbours of nearly equal size are padded to the largest of them, within `MOST_PADDING`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.backbones.spec import LayerMacs

#: Keys up to which batched products are faster than the fused kernel.
SHORT = 128
#: Most scores of one group: a larger matrix does not fit the cache and is newly allocated at every call.
MOST_SCORES = 2**18
#: The most that padding may add to the products of a layer, attention not counted, so that counted and executed FLOPs
#: agree within 1 %.
MOST_PADDING = 1 / 128


class LayerShape(NamedTuple):
    """What the size of a layer's products depends on. The unit is a pair of a query and a key: its score and weighted
    sum."""

    heads: int
    relative: int
    """Rows of each table of relative terms; 0 if there are none."""
    macs: LayerMacs

    def attention(self, n_query: int, n_key: int) -> float:
        """Scores, relative terms and weighted sums, in pairs."""
        return n_query * n_key + self.relative * (n_query + n_key) / 2

    def rows(self, n_query: int, n_key: int, n_ffn: int) -> float:
        """Projections, relative terms and FFN, in pairs."""
        macs = self.macs
        return (macs.query * n_query + macs.key * n_key + macs.ffn * n_ffn) / (2 * macs.pair)


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
        """[N, ...] -> [count, most, ...]: a view if sizes are equal, else any row in place of a missing one."""
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
        """[count, 1, 1, n_key] added to scores: hides keys that are padding. None: there is no padding."""
        if self.keys.is_even:
            return None
        present = self.keys.present[:, None, None, :]
        return torch.zeros(present.shape, device=present.device).masked_fill(~present, -torch.inf)


def together(
    shape: LayerShape, n_query: Sequence[int], n_key: Sequence[int], n_ffn: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """[first, end) of the neighbouring sequences to be computed in one call."""
    first = 0
    while first < len(n_query):
        end, most_query, most_key, needed, rows = first, 0, 0, 0.0, 0.0
        while end < len(n_query):
            most_query, most_key = max(most_query, n_query[end]), max(most_key, n_key[end])
            needed += shape.attention(n_query[end], n_key[end])
            rows += shape.rows(n_query[end], n_key[end], n_ffn[end])
            count = end + 1 - first
            padding = count * shape.attention(most_query, most_key) - needed
            too_much = padding > (MOST_PADDING * rows if most_key <= SHORT else 0)
            if end > first and (too_much or count * shape.heads * most_query * most_key > MOST_SCORES):
                break
            end += 1
        yield first, end
        first = end


@lru_cache(maxsize=128)  # most layers meet the sizes of the layer before, in each of several parts
def groups(
    shape: LayerShape, n_query: tuple[int, ...], n_key: tuple[int, ...], all_fed: bool, device: torch.device
) -> tuple[Group, ...]:
    """All sequences that have queries. `all_fed`: every query row goes on to the FFN; if not, perhaps none does.

    For inference: results are cached from call to call, without gradients."""
    found, query_start, key_start = [], 0, 0
    for first, end in together(shape, n_query, n_key, n_query if all_fed else [0] * len(n_query)):
        queries = Block(query_start, n_query[first:end], device)
        keys = Block(key_start, n_key[first:end], device)
        query_start, key_start = queries.place.stop, keys.place.stop
        if queries.most:
            found.append(Group(first, queries, keys))
    return tuple(found)
