"""One number for each input, such as the similarity of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from stretto.errors import StrettoError
from stretto.tasks import metrics
from stretto.tasks.sequences import ArrayLike, LabelPrediction, SequenceTask, as_arrays


class Regression(SequenceTask):
    """Logits [B, 1] are the predicted values themselves; labels are floats [B]."""

    name: ClassVar[str] = "regression"
    main_metric = "pearson"
    problem_type: ClassVar[str | None] = "regression"

    def __init__(self, label_names: Sequence[str] = (), n_texts: int | None = None) -> None:
        if label_names:
            raise StrettoError(
                f"Expected no label names for regression, got {list(label_names)}. "
                "Leave them out, or use the classification task."
            )
        super().__init__(label_names, n_texts)

    outputs = "a number"

    @classmethod
    def make(cls, label_names: Sequence[str], **settings: Any) -> Regression:
        return cls(**settings)  # transformers names every logit; a number has no name

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits[:, 0] - labels.to(logits.dtype)).square()  # [B]

    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return (student[:, 0] - teacher[:, 0]).square()

    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits[:, 0]  # the one number there is

    def answers(self, logits: Tensor) -> list[LabelPrediction]:
        return [LabelPrediction(value) for value in logits[:, 0].tolist()]

    def metrics(self, logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
        values, truth = as_arrays(logits, labels)
        predicted = values[:, 0]
        return {
            "pearson": metrics.pearson(truth, predicted),
            "spearman": metrics.spearman(truth, predicted),
            "mse": metrics.mse(truth, predicted),
        }
