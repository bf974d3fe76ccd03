"""From texts to padded tensors: tokenise, truncate, collate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.data.words import word_keys
from stretto.errors import StrettoError
from stretto.state import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: input_ids, attention_mask and perhaps token_type_ids of one input, unpadded; anything else is a note on its tokens.
Feature = dict[str, list[Any]]

#: Texts per call of the tokenizer: enough for its threads, but not all at once, because each token takes
#: some 100 bytes until the result of the call is freed.
CHUNK = 1024

#: The label of a token that has none: padding, special tokens, all but the first piece of a word.
IGNORED = -100

#: Instead of a word's number: a special token, and the token of a word that is not in the vocabulary.
NO_WORD, UNKNOWN_WORD = -1, -2

#: Backbones that count positions from pad_token_id + 1 rather than from 0.
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})


@dataclass(frozen=True)
class Encoded:
    """Tokenised inputs: one feature for each, or several if the task splits long inputs into windows."""

    texts: Sequence[tuple[str, ...]]
    """The inputs, unchanged."""
    features: list[Feature]
    truncated: int
    """How many inputs were longer than allowed and were truncated."""
    example_of: list[int]
    """For each feature the index of its input."""
    labels: Sequence[Any] | None = None
    """For each feature what the task's loss reads; a list has one entry per token."""
    places: Sequence[Any] = ()
    """For each feature where its tokens come from, in a form that the task defines."""

    @staticmethod
    def join(parts: Sequence[Encoded]) -> Encoded:
        """Join several without labels into one, their inputs one after another."""
        before = accumulate((len(part.texts) for part in parts), initial=0)
        return Encoded(
            [text for part in parts for text in part.texts],
            [feature for part in parts for feature in part.features],
            sum(part.truncated for part in parts),
            [start + number for part, start in zip(parts, before, strict=False) for number in part.example_of],
            places=[place for part in parts for place in part.places],
        )


def max_length_of(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """The longest input, in tokens, that both the tokenizer and the backbone's positions allow."""
    limits = []
    if tokenizer.model_max_length < 10**9:  # "no limit" is written as 10**30
        limits.append(int(tokenizer.model_max_length))
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions > 0:  # some relative-position models have -1
        is_offset = config.model_type in OFFSET_POSITIONS
        if is_offset and config.pad_token_id is None:
            raise StrettoError(
                f"Expected a pad_token_id in config.json, from which {config.model_type} counts positions, got none. "
                "Copy config.json again."
            )
        limits.append(positions - (config.pad_token_id + 1 if is_offset else 0))
    if not limits:
        raise StrettoError(
            f"Expected a tokenizer or a config that limits the length, got neither ({config.model_type}). "
            "Pass --max-length."
        )
    return min(limits)


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[tuple[str, ...]], max_length: int, *, words: bool = False
) -> Encoded:
    """Tokenise single texts or pairs; a pair too long loses tokens of its longer text ("longest_first").

    With `words` the features also have the word of each token (see `words_of`).

    The tokenizer runs without truncation, and long inputs are truncated here: its own truncation also builds every
    combination of the overflow, which for pairs grows with the square of the length (30 s for 200 pairs of
    3000 words, against 0.4 s).
    """
    arity = len(texts[0]) if texts else 1
    if odd := next((t for t in texts if len(t) != arity), None):
        raise StrettoError(f"Expected {arity} text(s) per input, got one of {len(odd)}. Encode pairs separately.")
    specials = tokenizer.num_special_tokens_to_add(pair=arity == 2)
    if max_length <= specials:
        raise StrettoError(
            f"Expected a max_length above the {specials} special tokens of an input, got {max_length}. "
            "Raise --max-length."
        )
    if words:
        check_fast(tokenizer)
    features: list[Feature] = []
    truncated = 0
    for start in range(0, len(texts), CHUNK):
        columns = [list(column) for column in zip(*texts[start : start + CHUNK], strict=True)]
        batch = tokenizer(*columns, verbose=False)  # no warning about long inputs: they are truncated below
        for i in range(len(columns[0])):
            feature = {name: batch[name][i] for name in batch}
            if words:
                feature["word"] = words_of(batch.encodings[i], tokenizer.unk_token_id)
            if len(feature["input_ids"]) > max_length:
                truncated += 1
                if batch.encodings is None:  # a tokenizer written in Python, whose own truncation is fast enough
                    one = [[column[i]] for column in columns]  # a batch of one: bare, a second text "" is ignored
                    cut = tokenizer(*one, truncation="longest_first", max_length=max_length)
                    feature = {name: cut[name][0] for name in cut}
                else:
                    sides = batch.encodings[i].sequence_ids  # per token: 0, 1, or None for special tokens
                    keep = _kept(sides, max_length, tokenizer.truncation_side)
                    feature = {name: [values[k] for k in keep] for name, values in feature.items()}
            features.append(feature)
    return Encoded(texts, features, truncated, list(range(len(texts))))


def mask_id_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The mask token; if there is none, the token of unknown words."""
    return tokenizer.unk_token_id if tokenizer.mask_token_id is None else tokenizer.mask_token_id


def check_fast(tokenizer: Any) -> None:
    if not tokenizer.is_fast:
        raise StrettoError(
            f"Expected a fast tokenizer, which knows where its tokens come from, got {type(tokenizer).__name__}, "
            "written in Python. Save the model with its fast tokenizer (tokenizer.json)."
        )


def words_of(encoding: Any, unknown: int | None) -> list[int]:
    """For each token the number of its word in its text, as the tokenizer splits; NO_WORD or UNKNOWN_WORD if none.

    Equal neighbouring numbers are one word: special tokens separate the texts of a pair."""
    return [
        NO_WORD if word is None else UNKNOWN_WORD if token == unknown else word
        for word, token in zip(encoding.word_ids, encoding.ids, strict=True)
    ]


def _kept(sides: list[int | None], max_length: int, truncation_side: str) -> list[int]:
    """Indices of the tokens that stay: all special ones, and of each text as many as `longest_first` keeps."""
    first = [i for i, side in enumerate(sides) if side == 0]
    second = [i for i, side in enumerate(sides) if side == 1]
    room = max_length - (len(sides) - len(first) - len(second))
    short = min(len(first), len(second), room // 2)  # the shorter text keeps up to half the room
    lengths = (short, room - short) if len(first) <= len(second) else (room - short, short)
    dropped: set[int] = set()
    for tokens, length in zip((first, second), lengths, strict=True):
        dropped.update(tokens[length:] if truncation_side == "right" else tokens[: len(tokens) - length])
    return [i for i in range(len(sides)) if i not in dropped]


@dataclass(frozen=True)
class Origin:
    """Where a token comes from."""

    side: int | None
    """Which text: 0 or 1; None for special tokens."""
    word: int | None
    """Which word of it, as the tokenizer splits."""
    start: int
    end: int
    """Its characters."""


def origins(tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], max_length: int) -> list[Origin] | None:
    """For the tokens that `encode` makes of one input: where they come from. None for a tokenizer written in Python."""
    encodings = tokenizer(*[[text] for text in texts], verbose=False).encodings
    if encodings is None:
        return None
    (encoding,) = encodings
    sides = encoding.sequence_ids
    keep = list(range(len(sides)))
    if len(sides) > max_length:
        keep = _kept(sides, max_length, tokenizer.truncation_side)
    return [Origin(sides[k], encoding.word_ids[k], *encoding.offsets[k]) for k in keep]


class EncodedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Features with their labels and numbers, as `transformers.Trainer` and a DataLoader want them."""

    def __init__(
        self,
        features: Sequence[Feature],
        labels: Sequence[Any] | None = None,
        notes: Mapping[str, list[Tensor] | Tensor] | None = None,
        *,
        teacher: Sequence[Tensor] | None = None,
        n_labelled: int | None = None,
    ) -> None:
        if labels is not None and len(labels) != len(features):
            raise StrettoError(
                f"Expected a label for each of {len(features)} inputs, got {len(labels)}. Pass one label per input."
            )
        self.features = features
        self.labels = labels
        self.notes = notes or {}
        """A method's notes: by name a tensor [n tokens] for each input, or one [inputs, k] of whole inputs."""
        self.teacher = teacher
        """Logits of the full model for each input: [C], or [n tokens, C]."""
        self.n_labelled = n_labelled
        """How many inputs, from the first on, have labels that are known; None: all."""

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {**self.features[index], "example_id": index}
        for name, values in self.notes.items():  # lists are of tokens, tuples of whole inputs
            noted = values[index].tolist()
            item[name] = tuple(noted) if isinstance(values, Tensor) else noted
        if self.labels is not None:
            item["labels"] = self.labels[index]
        if self.teacher is not None:
            rows = self.teacher[index].tolist()
            item["teacher"] = list(map(tuple, rows)) if self.teacher[index].dim() == 2 else tuple(rows)
        if self.n_labelled is not None:
            item["known"] = int(index < self.n_labelled)
        return item

    def with_notes(self, notes: Mapping[str, list[Tensor] | Tensor]) -> EncodedDataset:
        return EncodedDataset(
            self.features, self.labels, {**self.notes, **notes}, teacher=self.teacher, n_labelled=self.n_labelled
        )


def collate(pad_token_id: int) -> Callable[[Sequence[dict[str, Any]]], dict[str, Tensor]]:
    """A function from items of `EncodedDataset` to one batch, padded on the right to its longest input."""
    return partial(_collate, pad_token_id)  # not a closure: a DataLoader's workers must be able to pickle it


def _collate(pad_token_id: int, items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = {}
    for name, value in items[0].items():
        if isinstance(value, list):  # [batch, longest]; right texts have a length of their own
            longest = max(len(item[name]) for item in items)
            fill: Any = {"input_ids": pad_token_id, "labels": IGNORED}.get(name, 0)
            if isinstance(value[0], tuple):  # [batch, longest, k]
                fill = (0.0,) * len(value[0])
            batch[name] = torch.tensor([item[name] + [fill] * (longest - len(item[name])) for item in items])
        else:
            batch[name] = as_tensor([item[name] for item in items])
    return batch


def as_tensor(values: Sequence[Any]) -> Tensor:
    """[n] of numbers, [n, k] of tuples of k numbers: float32 of floats, int64 of whole numbers."""
    one = values[0][0] if isinstance(values[0], tuple) else values[0]
    return torch.tensor(values, dtype=torch.float32 if isinstance(one, float) else torch.long)


def as_inputs(batch: dict[str, Tensor]) -> Inputs:
    """A collated batch without its labels. Columns that are not the tokenizer's become notes on the tokens."""
    given = ("input_ids", "attention_mask", "token_type_ids")
    notes = {name: value for name, value in batch.items() if name not in given}
    if "word" in notes:
        notes["word"] = torch.where(batch["attention_mask"].bool(), notes["word"], NO_WORD)
        notes["word_key"] = word_keys(batch["input_ids"], notes["word"])
    return Inputs(batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"), notes=notes)
