"""Keys and values of a decoder: what each row has written so far, and the source's.

A row is one text being written: a sentence, or one of its beams. A token that leaves at block n has no keys and values
above n yet. Its state waits (`Memory.states`), and is projected when the row next goes that deep, as part of one tall
product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones.decoder import BlockSpec
from stretto.engine.attention import VECTOR
from stretto.engine.groups import MOST_PADDING

#: Positions that fit at first; twice as many whenever they do not suffice.
CAPACITY = 32
#: Heads of all rows together up to which the fused attention kernel is faster: it is one call, but has a fixed cost per
#: head. Plain batched products are three calls, and slow for fewer than `VECTOR` keys.
FEW_HEADS = 32


@dataclass(frozen=True)
class Source:
    """What the encoder made of the sentences."""

    rows: Tensor
    """[all sources' rows, d], one sentence after another."""
    lengths: Tensor
    """[S]"""

    @classmethod
    def padded(cls, hidden: Tensor, attention_mask: Tensor) -> Source:
        """[S, T, d] and [S, T] as Hugging Face has it."""
        return cls(hidden[attention_mask.bool()], attention_mask.sum(dim=1))

    @cached_property
    def sentence(self) -> Tensor:
        """The sentence of each row."""
        return torch.arange(len(self.lengths), device=self.rows.device).repeat_interleave(self.lengths)

    @cached_property
    def mean(self) -> Tensor:
        """[S, d]"""
        total = self.rows.new_zeros(len(self.lengths), self.rows.shape[1])
        return total.index_add_(0, self.sentence, self.rows) / self.lengths.unsqueeze(1)

    def take(self, sentences: Tensor) -> Source:
        """These sentences, in this order."""
        parts = self.rows.split(self.lengths.tolist())
        chosen = [parts[number] for number in sentences.tolist()]
        return Source(torch.cat(chosen) if chosen else self.rows[:0], self.lengths[sentences])


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """[b, heads, m, size], [b, heads, n, size] twice -> [b, heads, m, size]; `bias` ([b or 1, heads or 1, 1, n]) is
    added to scaled scores."""
    batch, heads, queries, size = q.shape
    n = k.shape[2]
    if batch * heads <= FEW_HEADS or n < VECTOR:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    flat_q, flat_k, flat_v = (part.reshape(batch * heads, -1, size) for part in (q, k, v))
    if bias is None:
        scores = torch.baddbmm(q.new_empty(1), flat_q, flat_k.transpose(1, 2), beta=0, alpha=scale)
    else:
        added = bias.expand(batch, heads, queries, n).reshape(batch * heads, queries, n)
        scores = torch.baddbmm(added, flat_q, flat_k.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), flat_v).view(q.shape)


@dataclass
class SourceGroup:
    """Neighbouring sentences with sources of nearly equal length, from sentence `first` on."""

    first: int
    lengths: Tensor
    """[count]"""
    bias: Tensor | None
    """[count, 1, 1, longest]: minus infinity where a sentence has no token; None: all have."""
    kv: dict[int, Tensor]
    """Block -> [2, count, heads, longest, size] keys and values. A block that no sentence entered has none."""

    @property
    def end(self) -> int:
        return self.first + len(self.lengths)

    def write(self, block: int, new: Tensor, made: Tensor) -> None:
        """Keys and values ([rows of these sources, 2, heads, size]) of the sentences `new` (indices in this group)."""
        longest = int(self.lengths.max()) if self.bias is None else self.bias.shape[3]
        if self.bias is None:  # no padding: [count, longest, 2, heads, size]
            spread = made.unflatten(0, (len(new), longest))
        else:
            there = (self.bias[new, 0, 0] == 0).flatten().nonzero().squeeze(1)
            spread = made.new_zeros(len(new) * longest, *made.shape[1:]).index_copy_(0, there, made)
            spread = spread.unflatten(0, (len(new), longest))
        spread = spread.permute(2, 0, 3, 1, 4)
        if len(new) == len(self.lengths):
            self.kv[block] = spread.contiguous()
        else:
            if block not in self.kv:
                self.kv[block] = spread.new_zeros(2, len(self.lengths), *spread.shape[2:])
            self.kv[block][:, new] = spread

    def attend(self, block: int, q: Tensor, sentences: Tensor, scale: float) -> Tensor:
        """[R', heads, size] queries of rows of these sentences (indices in this group) -> same."""
        k, v = self.kv[block].index_select(1, sentences).unbind(0)
        bias = None if self.bias is None else self.bias.index_select(0, sentences)
        return attend(q.unsqueeze(2), k, v, scale, bias).squeeze(2)

    def take(self, kept: Tensor, first: int) -> None:
        self.first = first
        if len(kept) < len(self.lengths):
            self.lengths = self.lengths[kept]
            self.bias = None if self.bias is None else self.bias.index_select(0, kept)
            self.kv = {block: kv.index_select(1, kept) for block, kv in self.kv.items()}


class SourceKeys:
    """Keys and values of the source in all blocks, shared by the beams of a sentence."""

    def __init__(self, groups: list[tuple[int, int]], lengths: Tensor, n_blocks: int, like: Tensor) -> None:
        """`groups` are [first, end) of the sentences computed together; `lengths` is [S]."""
        self.groups = []
        for first, end in groups:
            of = lengths[first:end]
            absent = torch.arange(int(of.max()), device=of.device) >= of.unsqueeze(1)
            bias = None
            if bool(absent.any()):
                bias = like.new_zeros(absent.shape).masked_fill_(absent, -torch.inf)[:, None, None, :]
            self.groups.append(SourceGroup(first, of, bias, {}))
        self.ready = torch.zeros(n_blocks, len(lengths), dtype=torch.bool, device=lengths.device)
        """[N, S] bool: the source is projected. A sentence that never enters a block needs no keys there."""
        self.all_ready = [False] * n_blocks

    def new(self, block: int, sentences: Tensor | None) -> Tensor | None:
        """Which of these sentences (indices, possibly repeated; None: all) enter a block for the first time, in
        ascending order; None: none of them."""
        if self.all_ready[block]:
            return None
        missing = ~self.ready[block]
        if sentences is not None:
            missing = torch.zeros_like(missing).index_fill_(0, sentences, True).logical_and_(missing)
        new = missing.nonzero().squeeze(1)
        return new if len(new) else None

    def write(self, block: int, new: Tensor, lengths: Tensor, made: Tensor) -> None:
        """Keys and values ([rows, 2, heads, size]) of the sources, of these lengths, of sentences `new` (ascending)."""
        for group in self.groups:
            inside = (new >= group.first) & (new < group.end)
            of = new[inside] - group.first
            if len(of):
                before = int(lengths[new < group.first].sum())
                group.write(block, of, made[before : before + int(lengths[inside].sum())])
        self.ready[block, new] = True
        self.all_ready[block] = bool(self.ready[block].all())

    def attend(self, block: int, q: Tensor, sentences: Tensor | None, beams: int, scale: float) -> Tensor:
        """[R', heads, size] queries of rows of these sentences (ascending; None: of `beams` rows of each) -> same."""
        _, heads, size = q.shape
        found = []
        if sentences is None:  # [S, beams, heads, size] -> [S, heads, beams, size]
            by_sentence = q.view(-1, beams, heads, size).transpose(1, 2)
            for group in self.groups:
                k, v = group.kv[block].unbind(0)
                part = by_sentence if len(self.groups) == 1 else by_sentence[group.first : group.end]
                found.append(attend(part, k, v, scale, group.bias).transpose(1, 2).reshape(-1, heads, size))
        elif len(self.groups) == 1:
            return self.groups[0].attend(block, q, sentences, scale)
        else:
            ends = torch.tensor([group.end for group in self.groups], device=sentences.device)
            counts = torch.searchsorted(sentences, ends).diff(prepend=ends.new_zeros(1)).tolist()
            parts = zip(self.groups, q.split(counts), sentences.split(counts), strict=True)
            found = [group.attend(block, part, of - group.first, scale) for group, part, of in parts if len(of)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def take(self, sentences: Tensor) -> None:
        """Forget all sentences but these (indices, ascending)."""
        first, kept_groups = 0, []
        for group in self.groups:
            kept = sentences[(sentences >= group.first) & (sentences < group.end)] - group.first
            if len(kept):
                group.take(kept, first)
                first += len(kept)
                kept_groups.append(group)
        self.groups, self.ready = kept_groups, self.ready[:, sentences]
        self.all_ready = self.ready.all(dim=1).tolist()


def source_groups(lengths: Tensor, block: BlockSpec) -> list[tuple[int, int]]:
    """[S] ascending lengths -> [first, end) of sentences to be computed together: padding adds at most `MOST_PADDING`
    to what a token takes in a block besides attention."""
    allowed = int(MOST_PADDING * (block.token_macs + block.key_macs) / (2 * block.cross.width))
    found, first = [], 0
    sizes = lengths.tolist()
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sizes[end] - sizes[first] > allowed:
            found.append((first, end))
            first = end
    return found


class Memory:
    """All that is kept of the rows between two steps: keys and values of every block, and states that wait."""

    def __init__(
        self, *, n_blocks: int, rows: int, beams: int, heads: int, size: int, like: Tensor,
        lengths: Tensor, groups: list[tuple[int, int]], lazy: bool,
    ) -> None:  # fmt: skip
        """`like` is a [?, d] tensor; `lengths` [S] are the sources'; `lazy`: tokens may leave early."""
        self.n_rows, self.beams, self.length = rows, beams, 0
        self.source = SourceKeys(groups, lengths, n_blocks, like)
        self.own = like.new_empty(n_blocks, 2, rows, heads, CAPACITY, size)
        """[N, 2, R, heads, capacity, size] keys and values of the rows' own tokens."""
        self.states: Tensor | None = None
        """[capacity, R, d] the state each token left with; of the newest token what it is now."""
        self.waiting: Tensor | None = None
        """[N, R, capacity] tokens that have no keys and values in a block yet; only where they may leave early."""
        if lazy:
            self.states = like.new_empty(CAPACITY, rows, like.shape[1])
            self.waiting = torch.zeros(n_blocks, rows, CAPACITY, dtype=torch.bool, device=like.device)

    def add_token(self) -> None:
        """Make room for one more position; at first its keys and values are waited for everywhere."""
        capacity = self.own.shape[4]
        if self.length == capacity:
            self.own = torch.cat([self.own, torch.empty_like(self.own)], dim=4)
            if self.states is not None and self.waiting is not None:
                self.states = torch.cat([self.states, torch.empty_like(self.states)])
                self.waiting = torch.cat([self.waiting, torch.zeros_like(self.waiting)], dim=2)
        if self.waiting is not None:
            self.waiting[:, :, self.length] = True

    def missing(self, block: int, rows: Tensor | None, count: int) -> tuple[Tensor, Tensor] | None:
        """Which (row, position) have no keys and values yet in a block that `count` rows (None: all) now enter. They
        get them there. None: only the newest token of each row."""
        if self.waiting is None or block == 0:  # every token goes through the first block
            return None
        waiting = self.waiting[block, :, : self.length + 1]
        if rows is not None:
            waiting = waiting.index_select(0, rows)
        row, position = waiting.nonzero(as_tuple=True)
        if rows is None:
            self.waiting[block] = False
        else:
            self.waiting[block].index_fill_(0, rows, False)
        if row.shape[0] == count:
            return None
        return row if rows is None else rows.index_select(0, row), position

    @property
    def exits(self) -> Tensor:
        """[R] the block at which the newest token of each row left: it went through all blocks before."""
        assert self.waiting is not None
        return self.waiting.shape[0] - self.waiting[1:, :, self.length].sum(dim=0)

    def take(self, rows: Tensor) -> None:
        """After a step: keep only these rows (indices, with repetition)."""
        count, length = len(rows), self.length
        kept = self.own[..., :length, :]
        kept[:, :, :count] = kept.index_select(2, rows)  # in place: fresh memory would cost more than the copy
        self.own, self.n_rows = self.own[:, :, :count], count
        if self.states is not None and self.waiting is not None:
            self.states[:length, :count] = self.states[:length].index_select(1, rows)
            self.states, self.waiting = self.states[:, :count], self.waiting.index_select(1, rows)
