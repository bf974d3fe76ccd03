"""One decoder block for the rows of a step: its weights laid out once, and its products."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from stretto.backbones.decoder import BlockSpec
from stretto.engine.decode_cache import Memory, Source
from stretto.engine.layer import PackedFeedForward
from stretto.engine.linear import Product, product
from stretto.engine.parts import rounded


class PackedBlock:
    """Rows are [M, d] with M a little above the number of live rows (`few`), so that oneDNN meets few shapes."""

    def __init__(self, spec: BlockSpec, number: int, dtype: str) -> None:
        self.spec, self.number, self.dtype = spec, number, dtype
        self.attention_output = product(spec.attention.output, dtype=dtype)
        self.cross_query = product(spec.cross.query, dtype=dtype)
        self.cross_key_value = product(spec.cross.key, spec.cross.value, dtype=dtype)
        self.cross_output = product(spec.cross.output, dtype=dtype)
        self.ffn = PackedFeedForward(spec.ffn, dtype)

    @cached_property
    def qkv(self) -> Product:
        own = self.spec.attention
        return product(own.query, own.key, own.value, dtype=self.dtype)

    @cached_property
    def query(self) -> Product:  # where states wait, their keys and values make one product with those of the rows
        return product(self.spec.attention.query, dtype=self.dtype)

    @cached_property
    def key_value(self) -> Product:
        return product(self.spec.attention.key, self.spec.attention.value, dtype=self.dtype)

    def __call__(
        self, x: Tensor, count: int, memory: Memory, rows: Tensor | None, missing: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[M, d] -> [M, d]. The first `count` rows of x are live: those of `rows` (indices; None: all there are).

        `missing` is as `Memory.missing` says; `bias` is [heads, n], added to the scores of their n tokens."""
        spec, before = self.spec, self.spec.pre_norm
        context = self._attend(spec.attention_norm(x) if before else x, count, memory, rows, missing, bias)
        x = self.attention_output(context, x)
        x = x if before else spec.attention_norm(x)
        query = self.cross_query(spec.cross_norm(x) if before else x)
        context = memory.source[self.number].attend(query[:count], rows, memory.beams, spec.cross.scale)
        x = self.cross_output(fill(context, x), x)
        x = x if before else spec.cross_norm(x)
        x = self.ffn.out(self.ffn.wide(spec.ffn_norm(x) if before else x), x)
        return x if before else spec.ffn_norm(x)

    def _attend(
        self, read: Tensor, count: int, memory: Memory, rows: Tensor | None, missing: tuple[Tensor, Tensor] | None,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """[M, d] -> [M, inner]: write keys and values, those that were missing too, and look at all of them."""
        own, here, heads = memory.own[self.number], memory.length, self.spec.attention.heads
        if missing is None:
            q, k, v = self.qkv(read)[:count].chunk(3, dim=1)
        else:
            assert memory.states is not None
            waiting = memory.states[missing]  # [P, d]
            waiting = self.spec.attention_norm(waiting) if self.spec.pre_norm else waiting
            both = self.key_value(rounded(torch.cat([read[:count], waiting])))[: count + len(waiting)]
            old_k, old_v = both[count:].unflatten(1, (2, heads, -1)).unbind(1)
            own.k[missing[0], :, missing[1]], own.v[missing[0], :, missing[1]] = old_k, old_v
            q, (k, v) = self.query(read)[:count], both[:count].chunk(2, dim=1)
        where = slice(None) if rows is None else rows
        own.k[where, :, here] = k.unflatten(1, (heads, -1))
        own.v[where, :, here] = v.unflatten(1, (heads, -1))
        own.written[where] = here + 1
        added = None if bias is None else bias.unsqueeze(1)
        return fill(own.attend(q.contiguous(), rows, here + 1, self.spec.attention.scale, added), read)

    def project_source(self, memory: Memory, rows: Tensor | None, source: Source) -> Tensor | None:
        """Make keys and values of the sources of sentences that come to this block for the first time; None if there
        are no such sentences, else [S] which they were."""
        keys = memory.source[self.number]
        if keys.all_ready:
            return None
        needed = torch.ones_like(keys.ready)
        if rows is not None:
            needed = torch.zeros_like(keys.ready).index_fill_(0, rows // memory.beams, True)
        new = needed & ~keys.ready
        if not bool(new.any()):
            return None
        chosen = new[source.sentence].nonzero().squeeze(1)
        both = self.cross_key_value(rounded(source.rows[chosen]))[: len(chosen)]
        both = both.unflatten(1, (2, self.spec.cross.heads, -1))
        keys.write(source.sentence[chosen], source.place[chosen], both[:, 0], both[:, 1])
        keys.ready = keys.ready | new
        keys.all_ready = bool(keys.ready.all())
        return new


def few(rows: int) -> int:
    """Rows the matrix of a step gets: exact where there are few, since each more would cost."""
    return rows if rows <= 16 else -(-rows // 8) * 8


def fill(rows: Tensor, like: Tensor) -> Tensor:
    """[count, d] with rows of zeros behind it, as many as `like` has."""
    if len(rows) == len(like):
        return rows
    filled = rows.new_zeros(len(like), rows.shape[1])
    filled[: len(rows)] = rows
    return filled
