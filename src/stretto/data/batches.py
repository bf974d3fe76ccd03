"""Padded batches of features, one by one or several joined in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

from tqdm.auto import tqdm

from stretto.data.tokenise import Feature, as_inputs, collate
from stretto.state import Inputs

T = TypeVar("T")

#: The most batches, and tokens with their padding, that go through the layers together. They are joined as sequences
#: leave or lose tokens. More would take more memory and gain little.
WINDOW, WINDOW_TOKENS = 16, 2**16


def as_they_come(items: Iterable[T], most: int, ready: Callable[[], bool]) -> Iterator[list[T]]:
    """Groups of items in their order: at most `most`, and no more than are available without waiting (`ready`)."""
    source, end = iter(items), object()
    while (first := next(source, end)) is not end:
        group = [cast(T, first)]
        while len(group) < most and ready() and (item := next(source, end)) is not end:
            group.append(cast(T, item))
        yield group


def batches(features: Sequence[Feature], pad_token_id: int, batch_size: int, progress: str = "") -> Iterator[Inputs]:
    """Padded batches in the given order, with a progress bar if it has a name."""
    pad = collate(pad_token_id)
    starts = range(0, len(features), batch_size)
    for start in tqdm(starts, desc=progress, disable=not progress, leave=False):
        yield as_inputs(pad(list(features[start : start + batch_size])))


def windows(features: Sequence[Feature], pad_token_id: int, batch_size: int, progress: str = "") -> Iterator[Inputs]:
    """Several batches in one, in the given order: at least one, and as many as `WINDOW` and `WINDOW_TOKENS` allow."""
    pad, start = collate(pad_token_id), 0
    with tqdm(total=len(features), unit=" inputs", desc=progress, disable=not progress, leave=False) as bar:
        while start < len(features):
            end, longest = start, 0
            while end < min(start + WINDOW * batch_size, len(features)):
                batch = features[end : end + batch_size]
                longest = max(longest, *(len(feature["input_ids"]) for feature in batch))
                if end > start and (end + len(batch) - start) * longest > WINDOW_TOKENS:
                    break
                end += len(batch)
            yield as_inputs(pad(list(features[start:end])))
            bar.update(end - start)
            start = end
