"""What attention does with positions. These are positions in the input, also after tokens were dropped.

Shapes: b sequences, q_position [b, n_query], k_position [b, n_key]; ascending within a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def distances(q_position: Tensor, k_position: Tensor, farthest: int) -> Tensor:
    """[b, n_query, n_key]: clip(j - i), counted from -farthest."""
    return (k_position[:, None, :] - q_position[:, :, None]).clamp(-farthest, farthest) + farthest


def within(window: int, q_position: Tensor, k_position: Tensor) -> Tensor:
    """[b, n_query, n_key] bool: whether a local window lets query i see key j, |i - j| ≤ window."""
    return (k_position[:, None, :] - q_position[:, :, None]).abs() <= window


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions: in every head of size h the values m and m + h/2 are turned together by position · frequency m.

    A score then depends on the distance of its query and key alone."""

    frequencies: Tensor
    """[h / 2]"""
    factor: float = 1.0
    """On sine and cosine; some long-context variants have one."""

    @classmethod
    def of(cls, theta: float, head_size: int) -> Rotary:
        """The usual frequencies, θ^(-2m/h)."""
        return cls(theta ** -(torch.arange(0, head_size, 2, dtype=torch.float) / head_size))

    def turned(self, x: Tensor, position: Tensor) -> Tensor:
        """Queries or keys […, n, heads, h] at positions […, n] -> the same, turned."""
        angle = position.unsqueeze(-1).float() * self.frequencies.float().to(position.device)  # […, n, h / 2]
        cosine, sine = ((f(angle) * self.factor).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


@dataclass(frozen=True, eq=False)
class BiasTable:
    """A number per head and relative position that is added to scaled scores."""

    weight: Tensor
    """[buckets, heads]"""
    bucket: Tensor
    """[2 D + 1] the bucket of each distance from -D to D; what is farther counts as D."""

    def scores(self, q_position: Tensor, k_position: Tensor) -> Tensor:
        """[b, heads, n_query, n_key]"""
        by_distance = self.weight[self.bucket.to(self.weight.device)].T  # [heads, 2 D + 1]
        index = distances(q_position, k_position, len(self.bucket) // 2)
        return by_distance[:, index].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class RelativeTerms:
    """Added to scores by relative position and content: q_i·key_table[r] + k_j·query_table[r] with r = clip(j - i).

    q and k are the queries and keys (rotated, if positions are rotary too). The sum is scaled together with q_i·k_j."""

    key_table: Tensor
    """[2 D + 1, head_size] from distance -D to D; clip() limits distances to these and counts from -D."""
    query_table: Tensor
    """[2 D + 1, head_size]"""

    @property
    def rows(self) -> int:
        return len(self.key_table)

    def scores(self, q: Tensor, k: Tensor, q_position: Tensor, k_position: Tensor) -> Tensor:
        """Not yet scaled: [b, heads, n_query, head_size], [b, heads, n_key, head_size] -> [b, heads, n_query, n_key].

        Every query and key is multiplied with every row of its table once; the product for (i, j) is then looked up."""
        index = distances(q_position, k_position, self.rows // 2).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        of_query = (q @ self.key_table.T).gather(3, index)
        of_key = (k @ self.query_table.T).gather(3, index.transpose(2, 3)).transpose(2, 3)
        return of_query + of_key
