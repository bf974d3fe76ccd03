"""Masked texts for language modelling: whole words, different ones in every epoch.

The mask depends on (seed, epoch, example) alone, so that a resumed run sees the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from stretto.data.tokenise import CHUNK, IGNORED
from stretto.errors import StrettoError

#: Fraction of the tokens to predict; of their words, the fraction masked and the fraction replaced by random tokens.
HIDDEN, MASKED, RANDOM = 0.15, 0.8, 0.1

#: A word can be predicted only if there is a context.
FEWEST_WORDS = 2


@dataclass(frozen=True)
class Vocabulary:
    """What masking needs to know of a tokenizer."""

    mask_token_id: int
    ordinary: np.ndarray
    """[n] tokens that are not special."""

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        if not tokenizer.is_fast:
            raise StrettoError(
                "Expected a tokenizer that knows which tokens make a word (a 'fast' one), got one written in Python. "
                "Choose another, or train one with --vocab-size."
            )
        if tokenizer.mask_token_id is None or tokenizer.pad_token_id is None:
            raise StrettoError(
                "Expected a tokenizer with a mask token and a padding token, got one without. "
                "Choose another, or train one with --vocab-size."
            )
        special = set(tokenizer.all_special_ids)
        return cls(tokenizer.mask_token_id, np.array([i for i in range(len(tokenizer)) if i not in special]))


@dataclass(frozen=True)
class Window:
    """A text, or a part of a long text that fits the model."""

    ids: np.ndarray
    """[T] tokens, special ones included."""
    words: np.ndarray
    """[T] which word each token belongs to; -1 for special tokens."""


def cut(tokenizer: Any, texts: Sequence[str], max_length: int) -> Iterator[Window]:
    """The windows of all texts, in order; those with too few words are left out."""
    for start in range(0, len(texts), CHUNK):
        batch = tokenizer(
            list(texts[start : start + CHUNK]), truncation=True, max_length=max_length, return_overflowing_tokens=True
        )
        for encoding in batch.encodings:
            words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int32)
            if len(set(words[words >= 0].tolist())) >= FEWEST_WORDS:
                yield Window(np.array(encoding.ids, dtype=np.int32), words)


def hide(window: Window, vocabulary: Vocabulary, dice: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(tokens with some hidden, labels): both [T]; labels are the tokens to predict, IGNORED elsewhere.

    Words are taken in random order until 15 % of the tokens (at least one word) are chosen; a word that would
    exceed that is skipped. Of a word, all tokens are masked (80 %), all are replaced (10 %), or all stay (10 %)."""
    ids, labels = window.ids.copy(), np.full_like(window.ids, IGNORED)
    left = max(1, round(HIDDEN * int((window.words >= 0).sum())))
    for word in dice.permutation(np.unique(window.words[window.words >= 0])):
        tokens = np.flatnonzero(window.words == word)
        is_first = bool((labels == IGNORED).all())
        if len(tokens) > left and not is_first:
            continue
        labels[tokens] = window.ids[tokens]
        fate = dice.random()
        if fate < MASKED:
            ids[tokens] = vocabulary.mask_token_id
        elif fate < MASKED + RANDOM:
            ids[tokens] = dice.choice(vocabulary.ordinary, len(tokens))
        left -= len(tokens)
        if left <= 0:
            break
    return ids, labels


class HiddenWords(torch.utils.data.Dataset[dict[str, Any]]):
    """Windows as training examples, by (epoch, index)."""

    def __init__(self, windows: Sequence[Window], vocabulary: Vocabulary, seed: int) -> None:
        self.windows, self.vocabulary, self.seed = windows, vocabulary, seed

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, key: tuple[int, int] | int) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (0, key)  # the masks of held-out texts never change
        dice = np.random.default_rng((self.seed, epoch, index))
        ids, labels = hide(self.windows[index], self.vocabulary, dice)
        return {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids), "labels": labels.tolist()}


class Order(torch.utils.data.Sampler[tuple[int, int]]):
    """Every window once per epoch, with similar lengths together, as (epoch, index)."""

    def __init__(self, windows: Sequence[Window], batch_size: int, seed: int, epoch: Callable[[], int]) -> None:
        self.lengths = [len(window.ids) for window in windows]
        self.batch_size, self.seed, self.epoch = batch_size, seed, epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.epoch()
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        for index in get_length_grouped_indices(self.lengths, self.batch_size, generator=generator):
            yield epoch, index
