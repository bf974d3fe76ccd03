"""Questions with contexts of any length: overlapping windows, and the position of each token in the context.

A window is [CLS] question [SEP] a part of the context [SEP]. Consecutive windows share `stride` tokens of the context,
so that an answer at the end of one window is complete in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stretto.data.columns import Gold
from stretto.data.tokenise import CHUNK, IGNORED, Feature, words_of
from stretto.errors import StrettoError

#: Labels of tokens that may be read, as bits; question, [SEP] and padding are IGNORED.
NEITHER, START, END = 0, 1, 2


class Place(NamedTuple):
    """The part of the context that a window shows."""

    first: int
    """Position of its first token in the window."""
    offsets: list[tuple[int, int]]
    """Characters of each of its tokens in the context, from and up to."""


@dataclass(frozen=True)
class Window:
    example: int
    feature: Feature
    place: Place


def cut_windows(
    tokenizer: Any, pairs: Sequence[tuple[str, ...]], max_length: int, stride: int, *, words: bool = False
) -> Iterator[Window]:
    """The windows of each (question, context), in order; at least one for each. `words` as in `Task.encode`."""
    for start in range(0, len(pairs), CHUNK):
        chunk = pairs[start : start + CHUNK]
        questions, contexts = ([pair[side] for pair in chunk] for side in (0, 1))
        batch = tokenizer(questions, contexts, return_offsets_mapping=True, verbose=False)
        offsets = batch.pop("offset_mapping")
        for i, question in enumerate(questions):
            columns = {name: batch[name][i] for name in batch}
            if words:
                columns["word"] = words_of(batch.encodings[i], tokenizer.unk_token_id)
            inside = [k for k, side in enumerate(batch.sequence_ids(i)) if side == 1]
            length = len(columns["input_ids"])
            head = inside[0] if inside else length  # tokens before the context, then the context, then the tail
            tail = inside[-1] + 1 if inside else length
            room = max_length - (length - len(inside))
            if room < 1:
                raise StrettoError(
                    f"Expected a question that leaves room for its context in {max_length} tokens, got one of "
                    f"{length - len(inside)} with special tokens: '{question:.60}'. "
                    "Shorten it, or train with a longer --max-length."
                )
            for part in spans(len(inside), room, min(stride, room // 2)):
                here = slice(head + part.start, head + part.stop)
                feature = {name: v[:head] + v[here] + v[tail:] for name, v in columns.items()}
                yield Window(start + i, feature, Place(head, offsets[i][here]))


def spans(n: int, room: int, overlap: int) -> Iterator[slice]:
    """Cut `n` tokens into parts of at most `room`, each sharing `overlap` with the one before."""
    begin = 0
    while begin + room < n:
        yield slice(begin, begin + room)
        begin += room - overlap
    yield slice(begin, n)


def label_window(length: int, place: Place, answer: Gold | None) -> list[int]:
    """For each token of a window whether it may be read, and whether the answer starts or ends there.

    If the window does not show the whole answer, or there is none, the label is at position 0."""
    labels = [IGNORED] * length
    labels[0] = NEITHER
    labels[place.first : place.first + len(place.offsets)] = [NEITHER] * len(place.offsets)
    first, last = (0, 0) if answer is None else token_span(place, answer)
    labels[first] |= START
    labels[last] |= END
    return labels


def token_span(place: Place, answer: Gold) -> tuple[int, int]:
    """Positions of the first and the last token of an answer; (0, 0) if the window does not show all of it."""
    begin = answer.start + len(answer.text) - len(answer.text.lstrip())  # no token covers outer spaces
    end = answer.start + len(answer.text.rstrip())
    touched = [k for k, (a, b) in enumerate(place.offsets) if a < end and b > begin]
    if not touched or place.offsets[touched[0]][0] > begin or place.offsets[touched[-1]][1] < end:
        return 0, 0
    return place.first + touched[0], place.first + touched[-1]
