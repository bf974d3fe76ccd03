"""One layer of the packed engine: its weights laid out for the packed matrix, and its products."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from stretto.backbones import FeedForwardSpec, LayerSpec
from stretto.engine.attention import PackedAttention
from stretto.engine.groups import LayerShape
from stretto.engine.linear import Product, product
from stretto.engine.parts import take
from stretto.engine.windows import stretches
from stretto.state import State

#: The FFN's wide matrix is made for this many rows at a time: a larger one would be newly allocated at every call, and
#: the page faults cost more than the larger products gain.
CHUNK_ROWS = 512


def add_branch(last: Product, x: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
    """The residual plus a branch, which ends with the product `last` and may be gated ([M, 1])."""
    return last(x, residual) if gate is None else last.add_scaled(x, residual, gate)


class PackedFeedForward:
    """An FFN's weights, laid out once."""

    def __init__(self, spec: FeedForwardSpec, dtype: str, make: Callable[..., Product] = product) -> None:
        self.gated = spec.factor is not None
        self.activation = spec.activation
        self.into = make(*spec.inputs, dtype=dtype, activation=None if self.gated else spec.activation)
        self.out = make(spec.out, dtype=dtype)

    def wide(self, x: Tensor) -> Tensor:
        """[M, d] -> [M, size]: what `out` reads."""
        wide = self.into(x)
        if not self.gated:
            return wide
        first, factor = wide.chunk(2, dim=1)  # one product twice as wide is faster than two with fused activation
        return self.activation(first) * factor


class PackedLayer:
    """One layer's weights, laid out for the packed matrix."""

    def __init__(self, spec: LayerSpec, dtype: str) -> None:
        self.spec, self.dtype = spec, dtype
        relative = spec.attention.relative
        self.shape = LayerShape(spec.attention.heads, 0 if relative is None else relative.rows, spec.macs)
        self.attention_output = product(spec.attention.output, dtype=dtype)
        self.ffn = PackedFeedForward(spec.ffn, dtype)

    @cached_property
    def qkv(self) -> Product:
        attention = self.spec.attention
        return product(attention.query, attention.key, attention.value, dtype=self.dtype)

    @cached_property
    def query(self) -> Product:  # frozen rows need no query: then the products are separate
        return product(self.spec.attention.query, dtype=self.dtype)

    @cached_property
    def key_value(self) -> Product:
        return product(self.spec.attention.key, self.spec.attention.value, dtype=self.dtype)

    def attention(self, rows: Tensor, state: State, updated: Tensor | None, n_query: Tensor) -> PackedAttention:
        """Of the rows [M, d]: all live rows are keys, and queries too, or only those `updated` ([N_query] indices).

        `n_query` ([B]) says how many queries each sequence has."""
        spec, read = self.spec.attention, self.spec.attention_input(rows)
        if updated is None:
            q, k, v = self.qkv(read).split(spec.width, dim=1)
            q_position = state.position
        else:
            q = self.query(take(read, updated))
            k, v = self.key_value(read).split(spec.width, dim=1)
            q_position = state.position[updated]
        if spec.rotary is not None:
            q, k = (spec.turned(x[: len(at)], at) for x, at in ((q, q_position), (k, state.position)))
        skipping = stretches(spec, n_query, state.lengths, q_position, state.position)
        counts = n_query.tolist(), state.lengths.tolist()
        return PackedAttention(spec, self.shape, q, k, v, *counts, q_position, state.position, skipping)

    def finish(self, context: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
        """From attention's weighted sums to the layer's output: [M, width], [M, d] -> [M, d]; `gate` is [M, 1]."""
        parts = [part for part in (context, residual, gate) if part is not None]
        if len(context) <= CHUNK_ROWS:
            return self._finish(*parts)
        chunks = zip(*(part.split(CHUNK_ROWS) for part in parts), strict=True)
        return torch.cat([self._finish(*chunk) for chunk in chunks])

    def _finish(self, context: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        spec, hidden = self.spec, add_branch(self.attention_output, context, residual, gate)
        if spec.pre_norm:
            return add_branch(self.ffn.out, self.ffn.wide(spec.ffn_norm(hidden)), hidden, gate)
        hidden = spec.attention_norm(hidden)
        return spec.ffn_norm(add_branch(self.ffn.out, self.ffn.wide(hidden), hidden, gate))
