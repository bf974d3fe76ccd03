"""What the tasks share that give each input one answer: texts or pairs in, a label or a number out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.data.tokenise import Encoded, encode
from stretto.errors import StrettoError
from stretto.tasks.base import Logits, Prediction, Task

#: What metrics take: logits [N, C] and labels [N], from torch, numpy or plain lists.
ArrayLike = Tensor | NDArray[Any] | Sequence[Any]


@dataclass(frozen=True)
class LabelPrediction(Prediction):
    """The answer to one text or pair."""

    label: str | float
    """The label's name; for regression the value."""
    score: float | None = None
    """Probability of the label; None for regression."""
    probabilities: dict[str, float] | None = None
    """Of every label; None for regression."""

    @property
    def told(self) -> str:
        label = self.label if isinstance(self.label, str) else f"{self.label:.4g}"
        return label if self.score is None else f"{label} ({self.score:.3f})"


class SequenceTask(Task):
    """Logits are [B, C], labels [B]."""

    def parts_of(self, text: Any) -> tuple[str, ...]:
        parts = (text,) if isinstance(text, str) else tuple(text) if isinstance(text, (tuple, list)) else ()
        if len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
            raise StrettoError(
                f"Expected a string or a pair of strings, got {text!r:.80}. Convert each input to text first."
            )
        return parts

    def encode(
        self, tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int, labels: Sequence[Any] | None = None,
        *, words: bool = False,
    ) -> Encoded:  # fmt: skip
        return replace(encode(tokenizer, texts, max_length, words=words), labels=labels)

    def decode(self, logits: Logits, encoded: Encoded | None = None) -> list[LabelPrediction]:
        return self.answers(stacked(logits))

    def scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Any]) -> dict[str, float]:
        return self.metrics(stacked(logits), labels)

    @abstractmethod
    def answers(self, logits: Tensor) -> list[LabelPrediction]:
        """[B, C] to B answers."""

    @abstractmethod
    def metrics(self, logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
        """[N, C] and [N] to named scores, `main_metric` among them."""


def stacked(logits: Logits) -> Tensor:
    """[n, C]"""
    return logits if isinstance(logits, Tensor) else torch.stack(list(logits))


def as_arrays(logits: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Logits [N, C] in float64 and labels [N], checked to belong together."""
    values = np.asarray(logits.detach().cpu().double() if isinstance(logits, Tensor) else logits, np.float64)
    answers = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if values.ndim != 2 or answers.shape != values.shape[:1] or len(values) == 0:
        raise StrettoError(
            f"Expected logits [N, C] and labels [N] with N above 0, got the shapes {values.shape} and "
            f"{answers.shape}. Pass the logits and labels of the same examples."
        )
    if not np.isfinite(values).all():
        odd = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
        raise StrettoError(
            f"Expected finite logits, got {values[odd].tolist()} for example {odd}. "
            "Training has diverged: lower the learning rate."
        )
    return values, answers
