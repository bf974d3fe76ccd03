"""Attention over packed rows: each sequence sees its own rows only, with no mask and no padding.

Sequences stand one after another in the packed matrices. Neighbours of equal size (a `Group`) are computed in
one call. Short sequences are plain batched matrix products: the fused kernel of `scaled_dot_product_attention` pays
per head for what it saves in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones import RelativeTerms

#: Keys up to which batched products are faster than the fused kernel.
SHORT = 128
#: Most scores of one group: a larger matrix leaves the cache, and is fresh memory at every call.
MOST_SCORES = 2**18
#: torch's softmax over a last axis shorter than this is not vectorised.
VECTOR = 16


@dataclass(frozen=True)
class Group:
    """`count` neighbouring sequences, from the `first` on, with `n_query` query rows and `n_key` key rows each."""

    first: int
    count: int
    n_query: int
    n_key: int
    query_start: int
    key_start: int

    def queries(self, packed: Tensor, heads: int) -> Tensor:
        """[N_query, d] -> [count, heads, n_query, d / heads] (a view)."""
        return self._split(packed, self.query_start, self.n_query, heads)

    def keys(self, packed: Tensor, heads: int) -> Tensor:
        """[N_key, d] -> [count, heads, n_key, d / heads] (a view)."""
        return self._split(packed, self.key_start, self.n_key, heads)

    def positions(self, q_position: Tensor, k_position: Tensor) -> tuple[Tensor, Tensor]:
        """[N_query], [N_key] -> [count, n_query], [count, n_key] (views)."""
        q = q_position[self.query_start : self.query_start + self.count * self.n_query]
        k = k_position[self.key_start : self.key_start + self.count * self.n_key]
        return q.view(self.count, -1), k.view(self.count, -1)

    def _split(self, packed: Tensor, start: int, length: int, heads: int) -> Tensor:
        rows = packed[start : start + self.count * length]
        return rows.view(self.count, length, heads, -1).transpose(1, 2)


def groups(n_query: list[int], n_key: list[int], heads: int) -> Iterator[Group]:
    """Runs of neighbouring sequences of equal size, as many as fit. A sequence without queries is passed over."""
    query_start = key_start = first = 0
    sizes = list(zip(n_query, n_key, strict=True))
    while first < len(sizes):
        queries, keys = sizes[first]
        end = min(len(sizes), first + max(1, MOST_SCORES // max(1, heads * queries * keys)))
        last = first
        while last < end and sizes[last] == sizes[first]:
            last += 1
        count = last - first
        if queries:
            yield Group(first, count, queries, keys, query_start, key_start)
        query_start += count * queries
        key_start += count * keys
        first = last


def relative_scores(terms: RelativeTerms, q: Tensor, k: Tensor, q_position: Tensor, k_position: Tensor) -> Tensor:
    """(q_i·key_table[r] + k_j·query_table[r]) / √head_dim, r = clip(j - i).

    [b, heads, n_query, head_dim], [b, heads, n_key, head_dim], [b, n_query], [b, n_key] -> [b, heads, n_query, n_key].
    Every query and key meets every row of its table once; which of the products belongs to (i, j) is looked up."""
    farthest = len(terms.key_table) // 2
    distance = (k_position[:, None, :] - q_position[:, :, None]).clamp(-farthest, farthest) + farthest
    index = distance.unsqueeze(1).expand(-1, q.shape[1], -1, -1)  # [b, heads, n_query, n_key]
    of_query = (q @ terms.key_table.T).gather(3, index)
    of_key = (k @ terms.query_table.T).gather(3, index.transpose(2, 3)).transpose(2, 3)
    return (of_query + of_key) / q.shape[-1] ** 0.5


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis, which is made long enough to be vectorised."""
    n = scores.shape[-1]
    if n >= VECTOR:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(F.pad(scores, (0, VECTOR - n), value=-torch.inf), dim=-1)[..., :n]


def probabilities(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """[b, heads, n_query, head_dim], [b, heads, n_key, head_dim] -> [b, heads, n_query, n_key]."""
    added = q.new_zeros(1) if bias is None else bias.flatten(0, 1)
    scores = torch.baddbmm(
        added, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2),
        beta=0 if bias is None else 1, alpha=q.shape[-1] ** -0.5,
    )  # fmt: skip
    return softmax(scores).unflatten(0, q.shape[:2])


def weighted_sums(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """[b, heads, n, head_dim] each, with n_query or n_key rows -> [b, heads, n_query, head_dim]."""
    if k.shape[2] > SHORT:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return probabilities(q, k, bias) @ v


@dataclass
class PackedAttention:
    """One layer's attention for one batch. q is [≥ N_query, d]; k and v are [≥ N_key, d]; `heads` divide d."""

    q: Tensor
    k: Tensor
    v: Tensor
    n_query: list[int]
    n_key: list[int]
    heads: int
    bias_table: Tensor | None = None  # [heads, T, T] by relative position
    q_position: Tensor | None = None
    k_position: Tensor | None = None
    relative: RelativeTerms | None = None

    @cached_property
    def probabilities(self) -> list[tuple[Group, Tensor]]:
        """Per group [count, heads, n_query, n_key], for methods that need to see where attention goes."""
        found = []
        for group in groups(self.n_query, self.n_key, self.heads):
            q, k = group.queries(self.q, self.heads), group.keys(self.k, self.heads)
            found.append((group, probabilities(q, k, self._bias(group))))
        return found

    def received(self) -> Tensor:
        """[N_key]: attention paid to each key row, summed over heads and query rows."""
        total = self.k.new_zeros(sum(self.n_key))
        for group, p in self.probabilities:
            total[group.key_start : group.key_start + group.count * group.n_key] = p.sum(dim=(1, 2)).flatten()
        return total

    def context(self, out: Tensor) -> None:
        """Write the weighted sums of all query rows to the first rows of `out` ([≥ N_query, d])."""
        for group in groups(self.n_query, self.n_key, self.heads):
            q, k, v = group.queries(self.q, self.heads), group.keys(self.k, self.heads), group.keys(self.v, self.heads)
            summed = weighted_sums(q, k, v, self._bias(group))
            rows = group.count * group.n_query
            out[group.query_start : group.query_start + rows] = summed.transpose(1, 2).reshape(rows, -1)

    def context_of(self, rows: Tensor, n_rows: list[int], out: Tensor) -> None:
        """Weighted sums of some query rows alone, to the first rows of `out`.

        `rows` are ascending indices of query rows; each sequence has `n_rows` of them."""
        end = 0
        for group, p in self.probabilities:
            v = group.keys(self.v, self.heads)
            wanted = n_rows[group.first : group.first + group.count]
            step = group.count if len(set(wanted)) == 1 else 1  # sequences taken together
            for index in range(0, group.count, step):
                count = wanted[index]
                start, end = end, end + step * count
                offset = group.query_start + index * group.n_query
                queries = p[index : index + step].transpose(1, 2).flatten(0, 1)  # [step * n_query, heads, n_key]
                chosen = queries.index_select(0, rows[start:end] - offset).unflatten(0, (step, count))
                summed = chosen.transpose(1, 2) @ v[index : index + step]  # [step, heads, count, d / heads]
                out[start:end] = summed.transpose(1, 2).reshape(step * count, out.shape[1])

    def _bias(self, group: Group) -> Tensor | None:
        """[count, heads, n_query, n_key] to be added to the scaled scores, or None."""
        if self.bias_table is None and self.relative is None:
            return None
        assert self.q_position is not None and self.k_position is not None
        q_position, k_position = group.positions(self.q_position, self.k_position)
        bias = None
        if self.bias_table is not None:
            bias = self.bias_table[:, q_position[:, :, None], k_position[:, None, :]].transpose(0, 1)
        if self.relative is not None:
            q, k = group.queries(self.q, self.heads), group.keys(self.k, self.heads)
            terms = relative_scores(self.relative, q, k, q_position, k_position)
            bias = terms if bias is None else bias + terms
        return bias
