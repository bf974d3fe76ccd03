"""The engine loop of a model that writes texts token by token: this class takes the place of `Stepping`.

A few sentences are admitted together, written together, and answered together. Then the next ones are admitted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.engine.parts import Part
from stretto.engine.written import Text, TextTrace
from stretto.model import AdaptiveModel
from stretto.state import Inputs

#: The fraction of `Limits.live_tokens` for the sentences: the texts that are written need room too.
SHARE = 1 / 4


@dataclass(frozen=True)
class WrittenText:
    """As `Finished`, with a text instead of logits."""

    id: int
    logits: Text
    trace: TextTrace


class Writing:
    parts: Mapping[int, Sequence[Part]] = {}
    """Empty: no sequence waits between two layers."""

    def __init__(self, model: AdaptiveModel) -> None:
        self.model = model
        self._waiting: tuple[Inputs, Tensor] | None = None
        self._ids = range(0)

    def add(self, inputs: Inputs, dial: Tensor) -> range:
        """Admit sentences, after all earlier ones have left; returns their numbers, in order."""
        assert self._waiting is None
        self._waiting = (inputs, dial)
        self._ids = range(self._ids.stop, self._ids.stop + len(inputs.input_ids))
        return self._ids

    def step(self) -> list[WrittenText]:
        """Write the texts of the admitted sentences."""
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
        """Do not write texts whose clients have left. If some of the sentences are wanted, all are written."""
        if set(self._ids) <= set(ids):
            self._waiting = None
