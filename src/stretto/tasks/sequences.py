"""Shared by tasks that give each input one answer: texts or pairs in, a label or a number out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.data.tokenise import Encoded, Origin, encode, origins
from stretto.errors import StrettoError
from stretto.tasks.base import Logits, Prediction, Task, check_finite, not_finite

if TYPE_CHECKING:
    from stretto.data import Dataset

#: What metrics take: logits [N, C] and labels [N], from torch, numpy or plain lists.
ArrayLike = Tensor | NDArray[Any] | Sequence[Any]

#: The number of texts per input in words, and how to pass that many.
FORMS = {1: "single texts", 2: "pairs of texts"}
ADVICE = {
    1: "Name the one column with --text (in Python: pass strings).",
    2: "Name both columns with --text and --text-b (in Python: pass tuples of two strings).",
}


@dataclass(frozen=True)
class LabelPrediction(Prediction):
    """The answer to one text or pair."""

    label: str | float
    """The label's name; for regression the value."""
    score: float | None = None
    """Probability of the label; None for regression."""
    probabilities: dict[str, float] | None = None
    """Probability of every label; None for regression."""

    @property
    def summary(self) -> str:
        label = self.label if isinstance(self.label, str) else f"{self.label:.4g}"
        return label if self.score is None else f"{label} ({self.score:.3f})"


class SequenceTask(Task):
    """Logits are [B, C], labels [B].

    `n_texts` of the training data: 1 for texts, 2 for pairs, None if unknown (a plain Hugging Face model)."""

    answers: ClassVar[Literal["sequence", "token", "text"]] = "sequence"

    def __init__(self, label_names: Sequence[str], n_texts: int | None = None) -> None:
        if n_texts not in (None, *FORMS):
            raise StrettoError(f"Expected 1 (texts) or 2 (pairs) as n_texts, got {n_texts!r:.60}. Leave it out.")
        super().__init__(label_names)
        self.n_texts = n_texts

    def settings(self) -> dict[str, Any]:
        return {} if self.n_texts is None else {"n_texts": self.n_texts}

    def learn_from(self, data: Dataset) -> None:
        if self.n_texts is None and data.texts:
            self.n_texts = len(data.texts[0])

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
        came = next((len(parts) for parts in texts if len(parts) != self.n_texts), None)
        if came is not None and self.n_texts is not None:
            raise StrettoError(
                f"Expected {FORMS[self.n_texts]}, as in the training of the model, got "
                f"{FORMS.get(came, f'{came} texts')}. {ADVICE[self.n_texts]}"
            )
        return replace(encode(tokenizer, texts, max_length, words=words), labels=labels)

    def origins(self, tokenizer: Any, texts: tuple[str, ...], max_length: int) -> list[Origin] | None:
        return origins(tokenizer, texts, max_length)

    def decode(self, logits: Logits, encoded: Encoded | None = None) -> list[LabelPrediction]:
        values = stacked(logits)
        odd = (~values.isfinite().all(dim=1)).nonzero()
        if len(odd):
            check_finite(values[odd[0, 0]], int(odd[0, 0]))
        return self.answer(values)

    def scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Any]) -> dict[str, float]:
        return self.metrics(stacked(logits), labels)

    def example_scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Any]) -> Tensor | None:
        return self.correct(stacked(logits), torch.as_tensor(labels)).double() if self.right_or_wrong else None

    @abstractmethod
    def answer(self, logits: Tensor) -> list[LabelPrediction]:
        """[B, C] to B answers."""

    @abstractmethod
    def metrics(self, logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
        """[N, C] and [N] to named scores, `main_metric` among them."""

    @abstractmethod
    def same_answer(self, logits: Tensor, before: Tensor, tolerance: float) -> Tensor: ...

    def classes(self, labels: Tensor, bins: int) -> tuple[Tensor, int]:
        return labels, self.num_labels


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
        raise StrettoError(not_finite(values[odd][~np.isfinite(values[odd])][0], odd))
    return values, answers
