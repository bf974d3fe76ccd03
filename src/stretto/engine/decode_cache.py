"""Keys and values of a decoder: what each row has written so far, and the source's.

A row is one text being written: a sentence, or one of its beams. A token that leaves at block n has no keys and values
above n yet. Its state waits (`Memory.states`), and is projected when the row next goes that deep, as part of one tall
product. Since every token between two visits of a row to a block left below it, what is missing at a block is always
the end of the row's text: one number per row and block tells it (`OwnKeys.written`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stretto.backbones.decoder import BlockSpec
from stretto.engine.attention import softmax
from stretto.engine.groups import MOST_PADDING

#: Positions that fit at first; twice as many whenever they do not suffice.
CAPACITY = 32


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
    def place(self) -> Tensor:
        """The position of each row in its sentence."""
        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.rows), device=self.rows.device) - starts[self.sentence]

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
    """[b, heads, m, size], [b, heads, n, size] twice -> [b, heads, m, size]; `bias` broadcasts to [b, heads, m, n]."""
    shape, (flat_q, flat_k, flat_v) = q.shape, (part.flatten(0, 1) for part in (q, k, v))
    if bias is None:
        scores = torch.baddbmm(q.new_zeros(1), flat_q, flat_k.transpose(1, 2), beta=0, alpha=scale)
    else:
        added = bias.expand(*shape[:3], k.shape[2]).flatten(0, 1)
        scores = torch.baddbmm(added, flat_q, flat_k.transpose(1, 2), alpha=scale)
    return torch.bmm(softmax(scores), flat_v).view(shape)


class OwnKeys:
    """One block's keys and values of the rows' own tokens."""

    def __init__(self, rows: int, heads: int, size: int, like: Tensor) -> None:
        self.k = like.new_empty(rows, heads, CAPACITY, size)
        self.v = torch.empty_like(self.k)
        self.written = torch.zeros(rows, dtype=torch.long, device=like.device)
        """[R] how many tokens of each row have their keys and values here."""

    def make_room(self, length: int) -> None:
        """Let `length` positions fit."""
        capacity = self.k.shape[2]
        if length > capacity:
            for name in ("k", "v"):
                old = getattr(self, name)
                new = old.new_empty(*old.shape[:2], 2 * capacity, old.shape[3])
                new[:, :, :capacity] = old
                setattr(self, name, new)

    def attend(self, q: Tensor, rows: Tensor | None, length: int, scale: float, bias: Tensor | None) -> Tensor:
        """[R', inner] queries of these rows (None: of all) to their first `length` tokens -> [R', inner]."""
        k, v = self.k[:, :, :length], self.v[:, :, :length]
        if rows is not None:
            k, v = k.index_select(0, rows), v.index_select(0, rows)
        by_head = q.view(len(q), k.shape[1], 1, k.shape[3])
        return attend(by_head, k, v, scale, bias).view(len(q), -1)

    def take(self, rows: Tensor, length: int) -> None:
        """Let these rows (indices, with repetition) take the places of those that were."""
        count = len(rows)
        for kept in (self.k, self.v):  # in place: fresh memory would cost more than the copy
            kept[:count, :, :length] = kept[:, :, :length].index_select(0, rows)
        self.k, self.v, self.written = self.k[:count], self.v[:count], self.written.index_select(0, rows)


@dataclass
class SourceGroup:
    """Neighbouring sentences whose sources are nearly of a length, from sentence `first` on."""

    first: int
    lengths: Tensor
    """[count]"""
    k: Tensor
    """[count, heads, longest, size]"""
    v: Tensor
    bias: Tensor | None
    """[count, 1, 1, longest]: minus infinity where a sentence has no token; None: all have."""

    def take(self, kept: Tensor, first: int) -> None:
        self.first, self.lengths = first, self.lengths[kept]
        if len(kept) < len(self.k):
            self.k, self.v = self.k.index_select(0, kept), self.v.index_select(0, kept)
            self.bias = None if self.bias is None else self.bias.index_select(0, kept)


class SourceKeys:
    """One block's keys and values of the source, shared by the beams of a sentence."""

    def __init__(self, groups: list[tuple[int, int]], lengths: Tensor, heads: int, size: int, like: Tensor) -> None:
        """`groups` are [first, end) of the sentences computed together; `lengths` is [S]."""
        self.groups = []
        for first, end in groups:
            of = lengths[first:end]
            longest = int(of.max())
            k = like.new_zeros(end - first, heads, longest, size)
            absent = torch.arange(longest, device=of.device) >= of.unsqueeze(1)
            bias = None
            if bool(absent.any()):
                bias = like.new_zeros(absent.shape).masked_fill_(absent, -torch.inf)[:, None, None, :]
            self.groups.append(SourceGroup(first, of, k, torch.zeros_like(k), bias))
        self.ready = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
        """[S] whose source has been projected: a sentence that never comes this deep needs no keys here."""
        self.all_ready = False

    def write(self, sentence: Tensor, place: Tensor, k: Tensor, v: Tensor) -> None:
        """[P] sentences and places in their sources, ascending, and [P, heads, size] of each."""
        for group in self.groups:
            inside = (sentence >= group.first) & (sentence < group.first + len(group.k))
            at = (sentence[inside] - group.first, slice(None), place[inside])
            group.k[at], group.v[at] = k[inside], v[inside]

    def attend(self, q: Tensor, rows: Tensor | None, beams: int, scale: float) -> Tensor:
        """[R', inner] queries of these rows (None: of all) to the sources of their sentences -> [R', inner]."""
        heads, size = self.groups[0].k.shape[1], self.groups[0].k.shape[3]
        found = []
        if rows is None:  # [S, beams, heads, size] -> [S, heads, beams, size]
            by_sentence = q.view(-1, beams, heads, size).transpose(1, 2)
            for group in self.groups:
                part = by_sentence[group.first : group.first + len(group.k)]
                found.append(
                    attend(part, group.k, group.v, scale, group.bias).transpose(1, 2).reshape(-1, heads * size)
                )
        else:
            by_row = q.view(-1, heads, 1, size)
            sentence = rows // beams
            ends = torch.tensor([group.first + len(group.k) for group in self.groups], device=rows.device)
            counts = torch.searchsorted(sentence, ends).diff(prepend=ends.new_zeros(1)).tolist()
            parts = zip(self.groups, by_row.split(counts), sentence.split(counts), strict=True)
            for group, part, of in parts:
                if len(part):
                    local = of - group.first
                    bias = None if group.bias is None else group.bias.index_select(0, local)
                    keys, values = group.k.index_select(0, local), group.v.index_select(0, local)
                    found.append(attend(part, keys, values, scale, bias).view(-1, heads * size))
        return found[0] if len(found) == 1 else torch.cat(found)

    def take(self, sentences: Tensor) -> None:
        """Forget all sentences but these (indices, ascending)."""
        first, kept_groups = 0, []
        for group in self.groups:
            inside = (sentences >= group.first) & (sentences < group.first + len(group.k))
            kept = sentences[inside] - group.first
            if len(kept):
                group.take(kept, first)
                first += len(kept)
                kept_groups.append(group)
        self.groups, self.ready = kept_groups, self.ready[sentences]
        self.all_ready = bool(self.ready.all())


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
        self.beams, self.length = beams, 0
        self.own = [OwnKeys(rows, heads, size, like) for _ in range(n_blocks)]
        self.source = [SourceKeys(groups, lengths, heads, size, like) for _ in range(n_blocks)]
        self.states = like.new_empty(rows, CAPACITY, like.shape[1]) if lazy else None
        """[R, capacity, d] for each token the state it left with."""

    def make_room(self) -> None:
        """For one more position."""
        for own in self.own:
            own.make_room(self.length + 1)
        if self.states is not None and self.length + 1 > self.states.shape[1]:
            self.states = torch.cat([self.states, torch.empty_like(self.states)], dim=1)

    def keep_state(self, rows: Tensor, states: Tensor) -> None:
        """The current token of these rows leaves with these states ([R', d])."""
        assert self.states is not None
        self.states[rows, self.length] = states

    def missing(self, block: int, rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Which (row, position) have no keys and values in a block that these rows (None: all) now come to."""
        if self.states is None or block == 0:  # every token goes through the first block
            return None
        written = self.own[block].written
        who = torch.arange(len(written), device=written.device) if rows is None else rows
        counts = self.length - written[who]
        total = int(counts.sum())
        if total == 0:
            return None
        row = who.repeat_interleave(counts)
        within = torch.arange(total, device=row.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return row, within + written[row]

    @property
    def n_rows(self) -> int:
        return len(self.own[0].written)

    @property
    def sources_ready(self) -> bool:
        """Whether every block has the keys and values of every source."""
        return all(keys.all_ready for keys in self.source)

    def take(self, rows: Tensor) -> None:
        """After a step: let these rows (indices) be all there are."""
        for own in self.own:
            own.take(rows, int(own.written.max()))
        if self.states is not None:
            self.states[: len(rows), : self.length] = self.states[:, : self.length].index_select(0, rows)
            self.states = self.states[: len(rows)]

    def take_sources(self, sentences: Tensor) -> None:
        """Forget the sources of all sentences but these (indices, ascending)."""
        for keys in self.source:
            keys.take(sentences)
