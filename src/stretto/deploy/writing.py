"""Texts that are written token by token: what stands in the place of `Stepping` in the engine loop of such a model.

Sentences come in together, are written together, and are handed out together; the next ones come in after that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.engine.parts import Part
from stretto.engine.written import Text, TextTrace
from stretto.model import AdaptiveModel
from stretto.state import Inputs

#: The part of the tokens that a loop takes at once which sentences may have: each is followed by a text of its own.
SHARE = 1 / 4


@dataclass(frozen=True)
class WrittenText:
    """As `Finished`, with a text in the place of logits."""

    id: int
    logits: Text
    trace: TextTrace


class Writing:
    parts: Mapping[int, Sequence[Part]] = {}
    """Nobody waits between two layers."""

    def __init__(self, model: AdaptiveModel) -> None:
        self.model = model
        self._waiting: tuple[Inputs, Tensor] | None = None
        self._ids = range(0)

    def add(self, inputs: Inputs, dial: Tensor) -> range:
        """Let these sentences in, when all before have left; their numbers, in order."""
        assert self._waiting is None
        self._waiting = (inputs, dial)
        self._ids = range(self._ids.stop, self._ids.stop + len(inputs.input_ids))
        return self._ids

    def step(self) -> list[WrittenText]:
        """Write what has come in."""
        if self._waiting is None:
            return []
        inputs, dials = self._waiting
        self._waiting = None
        written = self.model.run(inputs, dials)
        texts = self.model.read_texts(written.texts)
        return [
            WrittenText(id, text, written.trace.one(row))
            for row, (id, text) in enumerate(zip(self._ids, texts, strict=True))
        ]

    def forget(self, ids: Collection[int]) -> None:
        """Write nothing if nobody waits for it; a part of the sentences is written all the same."""
        if set(self._ids) <= set(ids):
            self._waiting = None
