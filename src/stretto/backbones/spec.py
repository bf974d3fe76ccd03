"""What a layer is made of, as data. Both engines and the ledger (`stretto.engine.cost`) read this and nothing else.

A backbone hands out one `LayerSpec` per layer; layers may differ. The modules are Hugging Face's own: nothing is
copied. With x the rows a layer reads:

    post-norm   h = norm(x + attention(x)),   norm(h + FFN(h))
    pre-norm    h = x + attention(norm(x)),   h + FFN(norm(h))

Wherever positions count, they are those in the input, whatever was dropped between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Dropping(Protocol):
    """What has a dropout probability that may be changed: an `nn.Dropout`."""

    p: float


def distances(q_position: Tensor, k_position: Tensor, farthest: int) -> Tensor:
    """[b, n_query], [b, n_key] -> [b, n_query, n_key]: clip(j - i), counted from -farthest."""
    return (k_position[:, None, :] - q_position[:, :, None]).clamp(-farthest, farthest) + farthest


@dataclass(frozen=True, eq=False)
class RelativeTerms:
    """What attention scores get by relative position and content: q_i·key_table[r] + k_j·query_table[r] with
    r = clip(j - i). They are scaled together with q_i·k_j."""

    key_table: Tensor
    """[2 D + 1, head_size] from distance -D to D; clip() keeps to these and counts from -D."""
    query_table: Tensor
    """[2 D + 1, head_size]"""

    @property
    def rows(self) -> int:
        return len(self.key_table)

    def products(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Every query and key with every row of its table: […, head_size] each -> […, 2 D + 1] each."""
        return q @ self.key_table.T, k @ self.query_table.T

    def scores(self, of_query: Tensor, of_key: Tensor, q_position: Tensor, k_position: Tensor) -> Tensor:
        """Which of the `products` ([b, heads, n, 2 D + 1] of queries and of keys) belong to query i and key j, not yet
        scaled: positions [b, n_query], [b, n_key] -> [b, heads, n_query, n_key]."""
        index = distances(q_position, k_position, self.rows // 2)[:, None].expand(-1, of_query.shape[1], -1, -1)
        return of_query.gather(3, index) + of_key.gather(3, index.transpose(2, 3)).transpose(2, 3)


@dataclass(frozen=True, eq=False)
class BiasTable:
    """A number per head and relative position that is added to scaled scores."""

    weight: Tensor
    """[buckets, heads]"""
    bucket: Tensor
    """[2 D + 1] the bucket of each distance from -D to D; what is farther counts as D."""

    @property
    def by_distance(self) -> Tensor:
        """[heads, 2 D + 1]"""
        return self.weight[self.bucket.to(self.weight.device)].T

    def scores(self, q_position: Tensor, k_position: Tensor) -> Tensor:
        """[b, n_query], [b, n_key] -> [b, heads, n_query, n_key]."""
        index = distances(q_position, k_position, len(self.bucket) // 2)
        return self.by_distance[:, index].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """softmax(scale · q·k + what positions add) v, then the output projection; `heads` heads of `head_size` each."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    heads: int
    dropout: Dropping
    """Of attention weights, while training."""
    bias: BiasTable | None = None
    relative: RelativeTerms | None = None
    scaled: bool = True
    """Whether scores are divided by the root of the head size."""

    @property
    def width(self) -> int:
        """Of all heads together: heads · head_size."""
        return len(self.query.weight)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def scale(self) -> float:
        return self.head_size**-0.5 if self.scaled else 1.0

    def by_head(self, x: Tensor) -> Tensor:
        """[b, n, width] -> [b, heads, n, head_size]."""
        return x.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class FeedForwardSpec:
    """out(activation(into(x))), or out(activation(into(x)) · factor(x)) where it is gated."""

    into: nn.Linear
    activation: Callable[[Tensor], Tensor]
    out: nn.Linear
    factor: nn.Linear | None = None

    @property
    def size(self) -> int:
        """Values between `into` and `out`."""
        return self.out.weight.shape[1]

    @property
    def macs(self) -> int:
        """Multiply-adds of each row."""
        linears = (self.into, self.out, self.factor)
        return sum(linear.weight.numel() for linear in linears if linear is not None)


class LayerMacs(NamedTuple):
    """Multiply-adds of a layer: of each row that is a query, a key (and value), or goes on to the output projection
    and the FFN; and of each pair of a query and a key (once for its score, once more for its weighted sum)."""

    query: int
    key: int
    ffn: int
    pair: int


@dataclass(frozen=True, eq=False)
class LayerSpec:
    attention: AttentionSpec
    attention_norm: nn.Module
    ffn: FeedForwardSpec
    ffn_norm: nn.Module
    pre_norm: bool = False
    """Whether the norms stand before attention and FFN, inside the residual branches, instead of behind them."""

    def attention_input(self, rows: Tensor) -> Tensor:
        """[…, d] -> […, d]: what queries, keys and values are made of."""
        return self.attention_norm(rows) if self.pre_norm else rows

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of the rows, of all heads together, and of the values inside the FFN."""
        return self.attention.output.weight.shape[0], self.attention.width, self.ffn.size

    @property
    def macs(self) -> LayerMacs:
        attention, ffn = self.attention, self.ffn
        tables = 0 if attention.relative is None else attention.width * attention.relative.rows
        return LayerMacs(
            query=attention.query.weight.numel() + tables,
            key=attention.key.weight.numel() + attention.value.weight.numel() + tables,
            ffn=attention.output.weight.numel() + ffn.macs,
            pair=attention.width,
        )


def attention_probabilities(spec: LayerSpec, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    """How much each row (third axis) attends to each: [B, T, d] -> [B, heads, T, T].

    `bias` ([B, 1 or heads, 1 or T, T]) is added to scaled scores; `positions` is [B, T]."""
    attention, read = spec.attention, spec.attention_input(hidden)
    query, key = (attention.by_head(linear(read)) for linear in (attention.query, attention.key))
    scores = query @ key.transpose(2, 3)
    if attention.relative is not None:
        products = attention.relative.products(query, key)
        scores = scores + attention.relative.scores(*products, positions, positions)
    return torch.softmax(scores * attention.scale + bias, dim=-1)
