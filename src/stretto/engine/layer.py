"""One layer of the packed engine: its weights laid out for the packed matrix, and its products."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.linear import Product, product

#: The FFN's wide matrix is made for this many rows at a time: a larger one would be fresh memory at every call, and
#: the page faults cost more than the products gain.
CHUNK_ROWS = 512


def add_branch(last: Product, x: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
    """The residual plus a branch, which ends with the product `last` and may be gated ([M, 1])."""
    return last(x, residual) if gate is None else last.add_scaled(x, residual, gate)


class PackedLayer:
    """One layer's weights, laid out for the packed matrix."""

    def __init__(self, backbone: Backbone, layer: int, dtype: str) -> None:
        self.modules, self.dtype, self.pre_norm = backbone.modules(layer), dtype, backbone.pre_norm
        self.attention_output = product(self.modules.attention_output, dtype=dtype)
        self.ffn_in = product(self.modules.ffn_in, dtype=dtype, activation=self.modules.activation)
        self.ffn_out = product(self.modules.ffn_out, dtype=dtype)

    @cached_property
    def qkv(self) -> Product:
        return product(self.modules.query, self.modules.key, self.modules.value, dtype=self.dtype)

    @cached_property
    def query(self) -> Product:  # frozen rows need no query: then the products are separate
        return product(self.modules.query, dtype=self.dtype)

    @cached_property
    def key_value(self) -> Product:
        return product(self.modules.key, self.modules.value, dtype=self.dtype)

    def attention_input(self, rows: Tensor) -> Tensor:
        """[M, d] -> [M, d]: what queries, keys and values are made of."""
        return self.modules.attention_norm(rows) if self.pre_norm else rows

    def finish(self, context: Tensor, residual: Tensor, gate: Tensor | None) -> Tensor:
        """From attention's weighted sums to the layer's output: [M, d], [M, d] -> [M, d]; `gate` is [M, 1]."""
        parts = [part for part in (context, residual, gate) if part is not None]
        if len(context) <= CHUNK_ROWS:
            return self._finish(*parts)
        chunks = zip(*(part.split(CHUNK_ROWS) for part in parts), strict=True)
        return torch.cat([self._finish(*chunk) for chunk in chunks])

    def _finish(self, context: Tensor, residual: Tensor, gate: Tensor | None = None) -> Tensor:
        modules, hidden = self.modules, add_branch(self.attention_output, context, residual, gate)
        if self.pre_norm:
            return add_branch(self.ffn_out, self.ffn_in(modules.ffn_norm(hidden)), hidden, gate)
        hidden = modules.attention_norm(hidden)
        return modules.ffn_norm(add_branch(self.ffn_out, self.ffn_in(hidden), hidden, gate))
