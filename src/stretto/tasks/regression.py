"""One number for each input, such as the similarity of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.data.dataset import Form
from stretto.data.labels import Numbers
from stretto.errors import StrettoError
from stretto.tasks import metrics
from stretto.tasks.sequences import ArrayLike, LabelPrediction, SequenceTask, as_arrays


class Regression(SequenceTask):
    """Logits [B, 1] are the predicted values themselves; labels are floats [B]."""

    name: ClassVar[str] = "regression"
    form: ClassVar[Form] = Form(labels=Numbers)
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

    @classmethod
    def fits(cls, problem_type: str | None, label_names: Sequence[str]) -> bool:
        return problem_type != "multi_label_classification" and len(label_names) == 1

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits[:, 0] - labels.to(logits.dtype)).square()  # [B]

    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return (student[:, 0] - teacher[:, 0]).square()

    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits[:, 0]  # the one number there is

    def answer(self, logits: Tensor) -> list[LabelPrediction]:
        return [LabelPrediction(value) for value in logits[:, 0].tolist()]

    def quality(self, answers: Sequence[Any], labels: Sequence[Any], worst: float | None = None) -> list[float]:
        if worst is None or not worst > 0:
            raise StrettoError(
                f"Expected the error that counts as completely wrong, above 0, got {worst}. Set it, for example "
                "--worst-error 5 for ratings from 0 to 5."
            )
        errors = [abs(answer.label - label) for answer, label in zip(answers, labels, strict=True)]
        return [max(1 - error / worst, 0.0) for error in errors]

    def as_labels(self, answers: Sequence[Any]) -> list[Any]:
        return [answer.label for answer in answers]

    def same_answer(self, logits: Tensor, before: Tensor, tolerance: float) -> Tensor:
        return (logits - before).abs().squeeze(-1) < tolerance

    def wrongness(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.tanh(logits.squeeze(-1) - labels).abs()

    def classes(self, labels: Tensor, bins: int) -> tuple[Tensor, int]:
        edges = bin_edges(labels, bins)
        return torch.bucketize(labels.double(), edges), len(edges) + 1

    def metrics(self, logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
        values, truth = as_arrays(logits, labels)
        predicted = values[:, 0]
        return {
            "pearson": metrics.pearson(truth, predicted),
            "spearman": metrics.spearman(truth, predicted),
            "mse": metrics.mse(truth, predicted),
        }


def bin_edges(labels: Tensor, bins: int) -> Tensor:
    """[n] numbers -> the edges between at most `bins` bins that hold about equally many of them."""
    return torch.quantile(labels.double(), torch.arange(1, bins, dtype=torch.float64) / bins).unique()
