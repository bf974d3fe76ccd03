"""Attention over packed rows: each sequence sees its own rows only.

`groups` says which sequences are computed in one call. Short ones are plain batched matrix products: the fused kernel
of `scaled_dot_product_attention` pays per head for what it saves in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones import AttentionSpec
from stretto.engine.groups import SHORT, Block, Group, LayerShape, groups, together

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

    def grouped(self, all_fed: bool) -> tuple[Group, ...]:
        return groups(self.shape, tuple(self.n_query), tuple(self.n_key), all_fed, self.q.device)

    @cached_property
    def probabilities(self) -> list[tuple[Group, Tensor]]:
        """Per group [count, heads, n_query, n_key], for methods that need to see where attention goes."""
        found = []
        for group in self.grouped(all_fed=False):
            q, k = self._by_head(self.q, group.queries), self._by_head(self.k, group.keys)
            found.append((group, probabilities(q, k, self._bias(group), self.spec.scale)))
        return found

    def received(self) -> Tensor:
        """[N_key]: attention paid to each key row, summed over heads and query rows."""
        total = self.k.new_zeros(sum(self.n_key))
        for group, p in self.probabilities:
            by_query = p.sum(dim=1)  # [count, n_query, n_key]
            if not group.queries.is_even:
                by_query = by_query * group.queries.present.unsqueeze(2)
            total[group.keys.place] = group.keys.pack(by_query.sum(dim=1))
        return total

    def context(self, out: Tensor) -> None:
        """Write the weighted sums of all query rows to the first rows of `out` ([≥ N_query, width])."""
        for group, summed in self._sums():
            out[group.queries.place] = group.queries.pack(summed.transpose(1, 2).flatten(2))

    def _sums(self) -> Iterator[tuple[Group, Tensor]]:
        """Per group [count, heads, n_query, head_size]."""
        if "probabilities" in self.__dict__:  # somebody has asked where attention goes
            for group, p in self.probabilities:
                yield group, p @ self._by_head(self.v, group.keys)
            return
        for group in self.grouped(all_fed=True):
            q = self._by_head(self.q, group.queries)
            k, v = self._by_head(self.k, group.keys), self._by_head(self.v, group.keys)
            yield group, weighted_sums(q, k, v, self._bias(group), self.spec.scale)

    def context_of(self, rows: Tensor, n_rows: list[int], out: Tensor) -> None:
        """Weighted sums of some query rows alone, to the first rows of `out`.

        `rows` are ascending indices of query rows; each sequence has `n_rows` of them."""
        start = 0
        for group, p in self.probabilities:
            v, by_query = self._by_head(self.v, group.keys), p.transpose(1, 2).flatten(0, 1)  # [cells, heads, n_key]
            wanted, n_key = n_rows[group.first : group.first + group.count], group.keys.sizes
            for first, end in together(self.shape, wanted, n_key, wanted):
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
    def _relative_products(self) -> tuple[Tensor, Tensor]:
        """[N_query, heads, 2 D + 1], [N_key, heads, 2 D + 1]: each row once, however the sequences are grouped."""
        assert self.spec.relative is not None
        q, k = self.q[: len(self.q_position)], self.k[: len(self.k_position)]
        return self.spec.relative.products(*(rows.unflatten(1, (self.spec.heads, -1)) for rows in (q, k)))

    def _bias(self, group: Group) -> Tensor | None:
        """To be added to the group's scaled scores, [count, heads, n_query, n_key] or less."""
        bias = None if group.mask is None else group.mask.to(self.q.dtype)
        if self.spec.bias is None and self.spec.relative is None:
            return bias
        positions = group.queries.spread(self.q_position), group.keys.spread(self.k_position)
        if self.spec.bias is not None:
            terms = self.spec.bias.scores(*positions)
            bias = terms if bias is None else bias + terms
        if self.spec.relative is not None:
            of_query, of_key = self._relative_products
            products = group.queries.spread(of_query).transpose(1, 2), group.keys.spread(of_key).transpose(1, 2)
            terms = self.spec.relative.scores(*products, *positions) * self.spec.scale
            bias = terms if bias is None else bias + terms
        return bias
