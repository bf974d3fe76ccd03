"""One decoder block for the rows of a step: its weights laid out once, and its products.

In a small model most of a step's time is the overhead of its calls, so this code makes few calls: keys and values are
written in one copy, and nothing is gathered while all rows are live.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.backbones.decoder import BlockSpec
from stretto.engine.decode_cache import Memory, Source, attend
from stretto.engine.layer import PackedFeedForward
from stretto.engine.linear import Product, product, step_product
from stretto.engine.parts import rounded


class Live(NamedTuple):
    """The rows that enter a block."""

    n_rows: int
    rows: Tensor | None
    """[n_rows] ascending indices; None: all rows there are."""
    sentences: Tensor | None
    """[n_rows] the sentence of each (its index among those that are being written); None: all rows of all."""


class PackedBlock:
    """Rows are [M, d] with M a little above the number of live rows (`few`), so that oneDNN sees few shapes."""

    def __init__(self, spec: BlockSpec, number: int, dtype: str) -> None:
        self.spec, self.number, self.dtype = spec, number, dtype
        self.heads, self.size = spec.attention.heads, spec.attention.head_size
        self.pre_norm, self.scale, self.cross_scale = spec.pre_norm, spec.attention.scale, spec.cross.scale
        self.attention_norm, self.cross_norm = norm_of(spec.attention_norm), norm_of(spec.cross_norm)
        self.ffn_norm = norm_of(spec.ffn_norm)
        self.attention_output = step_product(spec.attention.output, dtype=dtype)
        self.cross_query = step_product(spec.cross.query, dtype=dtype)
        self.cross_key_value = product(spec.cross.key, spec.cross.value, dtype=dtype)
        self.cross_output = step_product(spec.cross.output, dtype=dtype)
        self.ffn = PackedFeedForward(spec.ffn, dtype, step_product)

    @cached_property
    def qkv(self) -> Product:
        own = self.spec.attention
        return step_product(own.query, own.key, own.value, dtype=self.dtype)

    @cached_property
    def query(self) -> Product:  # where states wait, their keys and values make one product with those of the rows
        return step_product(self.spec.attention.query, dtype=self.dtype)

    @cached_property
    def key_value(self) -> Product:
        return step_product(self.spec.attention.key, self.spec.attention.value, dtype=self.dtype)

    def __call__(
        self, x: Tensor, live: Live, memory: Memory, missing: tuple[Tensor, Tensor] | None, bias: Tensor | None
    ) -> Tensor:
        """[M, d] -> [M, d], the live rows first. `missing` is as `Memory.missing` says; `bias` is [1, heads, 1, n],
        added to the scores of their n tokens."""
        before, count = self.pre_norm, live.n_rows
        context = self._attend(self.attention_norm(x) if before else x, live, memory, missing, bias)
        x = self.attention_output(fill(context, x.shape[0]), x)
        x = x if before else self.attention_norm(x)
        query = self.cross_query(self.cross_norm(x) if before else x)[:count].view(count, self.heads, self.size)
        context = memory.source.attend(self.number, query, live.sentences, memory.beams, self.cross_scale)
        x = self.cross_output(fill(context.view(count, -1), x.shape[0]), x)
        x = x if before else self.cross_norm(x)
        x = self.ffn.out(self.ffn.wide(self.ffn_norm(x) if before else x), x)
        return x if before else self.ffn_norm(x)

    def _attend(
        self, read: Tensor, live: Live, memory: Memory, missing: tuple[Tensor, Tensor] | None, bias: Tensor | None
    ) -> Tensor:
        """[M, d] -> [count, inner]: write keys and values, also missing ones of older tokens, then attend to all."""
        count, rows, _ = live
        own, here, heads, size = memory.own[self.number], memory.length, self.heads, self.size
        if missing is None:
            made = self.qkv(read)[:count].view(count, 3, heads, size)
            q, kv = made[:, 0], made[:, 1:].transpose(0, 1)  # [count, heads, size], [2, count, heads, size]
            newest = own.select(3, here)  # [2, R, heads, size]
            if rows is None:
                newest.copy_(kv)
            else:
                newest.index_copy_(1, rows, kv)
        else:
            assert memory.states is not None
            row, position = missing
            waiting = memory.states[position, row]  # [P, d], those of the newest tokens among them
            waiting = self.attention_norm(waiting) if self.pre_norm else waiting
            made = self.key_value(fill(waiting, few(row.shape[0])))[: row.shape[0]].view(-1, 2, heads, size)
            own[:, row, :, position] = made
            q = self.query(read)[:count].view(count, heads, size)
        kv = own[:, :, :, : here + 1]
        k, v = (kv if rows is None else kv.index_select(1, rows)).unbind(0)
        return attend(q.unsqueeze(2), k, v, self.scale, bias).view(count, -1)

    def project_source(self, memory: Memory, source: Source, new: Tensor) -> None:
        """Make keys and values of the sources of the sentences `new` ([S'], ascending)."""
        chosen, lengths = source.rows, source.lengths
        if len(new) < len(lengths):
            chosen, lengths = source.take(new).rows, lengths[new]
        made = self.cross_key_value(rounded(chosen))[: len(chosen)].view(-1, 2, self.heads, self.size)
        memory.source.write(self.number, new, lengths, made)


def norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm to be called often: torch's layer norm without the module around it, others as they are."""
    if type(module) is not nn.LayerNorm:
        return module
    shape, weight, bias, eps = module.normalized_shape, module.weight.detach(), module.bias.detach(), module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def few(rows: int) -> int:
    """Rows the matrix of a step gets: exact where there are few, since each more would cost."""
    return rows if rows <= 16 else -(-rows // 8) * 8


def fill(rows: Tensor, count: int) -> Tensor:
    """[R, d] -> [count, d] with rows of zeros behind them."""
    there, width = rows.shape
    if there == count:
        return rows
    filled = rows.new_zeros(count, width)
    filled[:there] = rows
    return filled
