"""Whole words: a key for each, sums by word over any number of texts, and tables of the results.

A word is what the tokenizer splits off as one, after its normalisation (a lower-casing tokenizer has no capitals).
It is identified by its pieces. Its key is a 64-bit hash of their ids, so that batches carry numbers instead of strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: Odd, so that powers of it never vanish modulo 2^64.
MULTIPLIER = -7046029254386353131
#: Pieces of a word that are remembered, to write it out.
MOST_PIECES = 12
#: Pending numbers of a `Tally` before it adds them up.
PENDING = 2**21


def word_starts(word: Tensor) -> Tensor:
    """[B, T] words' numbers (see `tokenise.words_of`) -> [B, T] bool: where a word starts."""
    before = torch.full_like(word, -1)
    before[:, 1:] = word[:, :-1]
    return (word != before) | (word < 0)


def word_keys(input_ids: Tensor, word: Tensor) -> Tensor:
    """[B, T], [B, T] -> [B, T]: for each token the key of its whole word; 0 where there is none.

    Σ_k (id_k + 1) M^k modulo 2^64 over the pieces k = 0, 1, … of the word."""
    starts = word_starts(word).flatten()
    segment = starts.cumsum(0) - 1  # [B T] which word of the batch
    place = torch.arange(len(starts), device=starts.device)
    within = place - place[starts][segment]
    powers = torch.ones(int(within.max()) + 1, dtype=torch.long, device=word.device)
    powers[1:] = MULTIPLIER
    terms = (input_ids.flatten() + 1) * powers.cumprod(0)[within]
    sums = torch.zeros(int(segment[-1]) + 1, dtype=torch.long, device=word.device).index_add(0, segment, terms)
    return torch.where(word < 0, 0, sums[segment].view_as(word))


@dataclass(frozen=True)
class Words:
    """The n words of a batch, in order."""

    keys: Tensor
    """[n]"""
    sequence: Tensor
    """[n] which sequence of the batch."""
    column: Tensor
    """[n] the column of its first piece."""
    pieces: Tensor
    """[n, MOST_PIECES] ids of its pieces; -1 where there are no more."""


def words_in(input_ids: Tensor, attention_mask: Tensor, word: Tensor, keys: Tensor) -> Words:
    """The words of a padded batch; all arguments are [B, T]."""
    first = word_starts(word) & (word >= 0) & attention_mask.bool()
    sequence, column = first.nonzero(as_tuple=True)
    columns = column.unsqueeze(1) + torch.arange(MOST_PIECES, device=column.device)
    inside = columns < word.shape[1]
    columns = columns.clamp(max=word.shape[1] - 1)
    same = word[sequence.unsqueeze(1), columns] == word[sequence, column].unsqueeze(1)
    same = (same & inside).int().cumprod(dim=1).bool()  # a second text may have a word with the same number
    pieces = torch.where(same, input_ids[sequence.unsqueeze(1), columns], -1)
    return Words(keys[sequence, column], sequence, column, pieces)


class Tally:
    """Sums of `width` numbers by word. Memory grows with the vocabulary, not with the corpus."""

    def __init__(self, width: int) -> None:
        self.keys = torch.empty(0, dtype=torch.long)
        self.pieces = torch.empty(0, MOST_PIECES, dtype=torch.int32)
        self.sums = torch.empty(0, width, dtype=torch.float64)
        self.pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self.waiting = 0

    def add(self, keys: Tensor, pieces: Tensor, amounts: Tensor) -> None:
        """[n], [n, MOST_PIECES], [n, width]: a word may occur many times."""
        self.pending.append((keys.cpu(), pieces.int().cpu(), amounts.double().cpu()))
        self.waiting += amounts.numel()
        if self.waiting > PENDING:
            self.settle()

    def settle(self) -> None:
        """Add up the pending numbers. Afterwards `keys` are sorted and unique."""
        given = [(self.keys, self.pieces, self.sums), *self.pending]
        keys, pieces, amounts = (torch.cat(parts) for parts in zip(*given, strict=True))
        self.keys, place = keys.unique(return_inverse=True)
        self.pieces = pieces.new_empty(len(self.keys), MOST_PIECES).index_copy(0, place, pieces)
        self.sums = amounts.new_zeros(len(self.keys), amounts.shape[1]).index_add(0, place, amounts)
        self.pending, self.waiting = [], 0


class WordTable(nn.Module):
    """V words with `width` numbers each, saved with the model. Looked up by key."""

    keys: Tensor
    """[V] ascending."""
    pieces: Tensor
    """[V, most] ids of the pieces; -1 where there are no more."""
    counts: Tensor
    """[V] how often each occurred."""
    values: Tensor
    """[V, width]"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.empty(0, dtype=torch.long))
        self.register_buffer("pieces", torch.empty(0, 0, dtype=torch.int32))
        self.register_buffer("counts", torch.empty(0, dtype=torch.long))
        self.register_buffer("values", torch.empty(0, width))

    def __len__(self) -> int:
        return len(self.keys)

    def fill(self, keys: Tensor, pieces: Tensor, counts: Tensor, values: Tensor) -> None:
        """[V] ascending, [V, any], [V], [V, width]"""
        device = self.keys.device
        used = max(int((pieces >= 0).sum(dim=1).max()) if len(pieces) else 0, 1)
        self.keys, self.pieces = keys.to(device), pieces[:, :used].int().contiguous().to(device)
        self.counts, self.values = counts.long().to(device), values.float().contiguous().to(device)

    def find(self, keys: Tensor) -> Tensor:
        """[…] keys -> […] rows of the table; -1 for what is not in it."""
        place = torch.searchsorted(self.keys, keys).clamp(max=len(self) - 1)
        return torch.where(self.keys[place] == keys, place, -1)

    def words(self, tokenizer: Any, rows: Tensor) -> list[str]:
        """The words in these rows ([n]), written out; words with very many pieces end in '…'."""
        written = []
        for pieces in self.pieces[rows].tolist():
            known = [piece for piece in pieces if piece >= 0]
            text = tokenizer.decode(known).strip()
            written.append(text + "…" * (len(known) == MOST_PIECES))
        return written

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self._buffers:  # a table has as many rows as it was saved with
            if (saved := state_dict.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(saved, device=self.keys.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
