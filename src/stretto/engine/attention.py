"""Attention over packed rows: each sequence sees its own rows only.

`groups` chooses the sequences that are computed in one call. Short ones are plain batched matrix products: the fused
kernel of `scaled_dot_product_attention` has a fixed cost per head, which is too high for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones import AttentionSpec
from stretto.backbones.positions import within
from stretto.engine.groups import SHORT, Block, Group, LayerShape, groups, together
from stretto.engine.windows import Stretches

#: Added to scores that a window hides. Not -inf: a cell without a query may see nothing at all.
HIDDEN = -1e30
#: torch's softmax over a last axis shorter than this is not vectorised.
VECTOR = 16


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis, which is made long enough to be vectorised."""
    n = scores.shape[-1]
    if n >= VECTOR:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(F.pad(scores, (0, VECTOR - n), value=-torch.inf), dim=-1)[..., :n]


def probabilities(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[b, heads, n_query, head_size], [b, heads, n_key, head_size] -> [b, heads, n_query, n_key]; `bias` is added to
    scaled scores, and may be smaller where it is the same for all heads or queries."""
    added = q.new_zeros(1) if bias is None else bias.expand(-1, q.shape[1], -1, -1).flatten(0, 1)
    scores = torch.baddbmm(
        added, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2),
        beta=0 if bias is None else 1, alpha=scale,
    )  # fmt: skip
    return softmax(scores).unflatten(0, q.shape[:2])


def weighted_sums(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """[b, heads, n, head_size] each, with n_query or n_key rows -> [b, heads, n_query, head_size]."""
    if k.shape[2] > SHORT:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return probabilities(q, k, bias, scale) @ v


@dataclass
class PackedAttention:
    """One layer's attention for one batch. q is [≥ N_query, width]; k and v are [≥ N_key, width]."""

    spec: AttentionSpec
    shape: LayerShape
    q: Tensor
    k: Tensor
    v: Tensor
    n_query: list[int]
    n_key: list[int]
    q_position: Tensor
    """[N_query] in the input."""
    k_position: Tensor
    """[N_key]"""
    stretches: Stretches | None = None
    """Of the long sequences, where a local window lets them skip keys."""

    def grouped(self, all_fed: bool) -> Sequence[Group]:
        found = groups(self.shape, tuple(self.n_query), tuple(self.n_key), all_fed, self.q.device)
        return found if self.stretches is None else in_stretches(found, self.stretches)

    def skipped(self, n_key: Tensor, fed: Tensor | None) -> Tensor | None:
        """[B] pairs that are not computed; see `Stretches.skipped`. None: all are."""
        return None if self.stretches is None else self.stretches.skipped(self.spec, n_key, fed)

    @cached_property
    def probabilities(self) -> list[tuple[Group, Tensor]]:
        """Per group [count, heads, n_query, n_key], for methods that read the attention received."""
        found = []
        for group in self.grouped(all_fed=False):
            q, k = self._by_head(self.q, group.queries), self._by_head(self.k, group.keys)
            found.append((group, probabilities(q, k, self._bias(group, q, k), self.spec.scale)))
        return found

    def received(self) -> Tensor:
        """[N_key]: attention paid to each key row, summed over heads and query rows."""
        total = self.k.new_zeros(sum(self.n_key))
        for group, p in self.probabilities:
            by_query = p.sum(dim=1)  # [count, n_query, n_key]
            if not group.queries.is_even:
                by_query = by_query * group.queries.present.unsqueeze(2)
            total[group.keys.place] += group.keys.pack(by_query.sum(dim=1))  # stretches share keys
        return total

    def context(self, out: Tensor) -> None:
        """Write the weighted sums of all query rows to the first rows of `out` ([≥ N_query, width])."""
        for group, summed in self._sums():
            out[group.queries.place] = group.queries.pack(summed.transpose(1, 2).flatten(2))

    def _sums(self) -> Iterator[tuple[Group, Tensor]]:
        """Per group [count, heads, n_query, head_size]."""
        if "probabilities" in self.__dict__:  # a decider has read the attention received
            for group, p in self.probabilities:
                yield group, p @ self._by_head(self.v, group.keys)
            return
        for group in self.grouped(all_fed=True):
            q = self._by_head(self.q, group.queries)
            k, v = self._by_head(self.k, group.keys), self._by_head(self.v, group.keys)
            yield group, weighted_sums(q, k, v, self._bias(group, q, k), self.spec.scale)

    def context_of(self, rows: Tensor, out: Tensor) -> None:
        """Weighted sums of some query rows alone (ascending indices), to the first rows of `out`."""
        start, sums_only, taken = 0, self.shape._replace(relative=0), rows.tolist()
        for group, p in self.probabilities:
            v, by_query = self._by_head(self.v, group.keys), p.transpose(1, 2).flatten(0, 1)  # [cells, heads, n_key]
            ends = [bisect_left(taken, end) for end in accumulate(group.queries.sizes, initial=group.queries.start)]
            wanted, n_key = [end - first for first, end in pairwise(ends)], group.keys.sizes
            for first, end in together(sums_only, wanted, n_key, wanted):
                part, keys = Block(start, tuple(wanted[first:end]), rows.device), max(n_key[first:end])
                start = part.place.stop
                if part.most:
                    cells = group.queries.cells(part.spread(rows).flatten())
                    chosen = by_query[..., :keys].index_select(0, cells).unflatten(0, (end - first, -1))
                    summed = chosen.transpose(1, 2) @ v[first:end, :, :keys]  # [end - first, heads, most, head_size]
                    out[part.place] = part.pack(summed.transpose(1, 2).flatten(2))

    def _by_head(self, packed: Tensor, block: Block) -> Tensor:
        """[N, width] -> [count, heads, n, head_size]."""
        return self.spec.by_head(block.spread(packed))

    @cached_property
    def _window(self) -> int | None:
        """None: no distance is long enough for the window to hide anything."""
        window = self.spec.window
        return None if window is None or int(self.k_position.max()) <= window else window

    def _bias(self, group: Group, q: Tensor, k: Tensor) -> Tensor | None:
        """To be added to the group's scaled scores, [count, heads, n_query, n_key] or less."""
        spec, found = self.spec, [] if group.mask is None else [group.mask.to(q.dtype)]
        if self._window is not None or spec.bias is not None or spec.relative is not None:
            positions = group.queries.spread(self.q_position), group.keys.spread(self.k_position)
            if self._window is not None:
                hidden = ~within(self._window, *positions).unsqueeze(1)
                found.append(torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, HIDDEN))
            if spec.bias is not None:
                found.append(spec.bias.scores(*positions))
            if spec.relative is not None:
                found.append(spec.relative.scores(q, k, *positions) * spec.scale)
        return reduce(torch.add, found) if found else None


def in_stretches(found: Sequence[Group], stretches: Stretches) -> list[Group]:
    """Each stretch of a long sequence in a group of its own, and the other groups as they are."""
    numbers = (stretches.q_start, stretches.q_end, stretches.k_start, stretches.k_end)
    spans: dict[int, list[tuple[int, ...]]] = {}
    for sequence, *span in zip(stretches.sequence.tolist(), *(n.tolist() for n in numbers), strict=True):
        spans.setdefault(sequence, []).append(tuple(span))
    split: list[Group] = []
    for group in found:
        if group.keys.most <= SHORT:
            split.append(group)
            continue
        for sequence in range(group.first, group.first + group.count):  # long ones are not padded: all are long
            for q_start, q_end, k_start, k_end in spans[sequence]:
                queries = Block(q_start, (q_end - q_start,), group.queries.device)
                split.append(Group(sequence, queries, Block(k_start, (k_end - k_start,), group.keys.device)))
    return split
