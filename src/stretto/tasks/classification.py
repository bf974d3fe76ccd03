"""One of several named labels for each input: a single text, or a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from stretto.errors import StrettoError
from stretto.tasks import metrics
from stretto.tasks.base import kl
from stretto.tasks.sequences import ArrayLike, LabelPrediction, SequenceTask, as_arrays


class Classification(SequenceTask):
    """Logits [B, C] are unnormalised log-probabilities of the C labels; labels are class numbers [B]."""

    name: ClassVar[str] = "classification"
    judged: ClassVar[bool] = True
    main_metric = "accuracy"
    right_or_wrong: ClassVar[bool] = True
    one_of_labels: ClassVar[bool] = True
    problem_type: ClassVar[str | None] = "single_label_classification"

    def __init__(self, label_names: Sequence[str], n_texts: int | None = None) -> None:
        if len(label_names) < 2 or len(set(label_names)) < len(label_names):
            raise StrettoError(
                f"Expected two or more different label names, got {list(label_names)}. "
                "Name every class once; a single value per input is the regression task."
            )
        super().__init__(label_names, n_texts)

    @classmethod
    def fits(cls, problem_type: str | None, label_names: Sequence[str]) -> bool:
        return problem_type in (None, cls.problem_type) and len(label_names) > 1

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels, reduction="none")  # [B]

    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return kl(teacher, student)

    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def answer(self, logits: Tensor) -> list[LabelPrediction]:
        answers = []
        for row in logits.float().softmax(dim=-1).tolist():
            probabilities = dict(zip(self.label_names, row, strict=True))
            best = max(probabilities, key=probabilities.__getitem__)  # the first of equals, as argmax
            answers.append(LabelPrediction(best, probabilities[best], probabilities))
        return answers

    def quality(self, answers: Sequence[Any], labels: Sequence[Any], worst: float | None = None) -> list[float]:
        return [float(made == label) for made, label in zip(self.as_labels(answers), labels, strict=True)]

    def as_labels(self, answers: Sequence[Any]) -> list[Any]:
        number = {name: i for i, name in enumerate(self.label_names)}
        return [number[answer.label] for answer in answers]

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(dim=-1) == labels  # [B]

    def same_answer(self, logits: Tensor, before: Tensor, tolerance: float) -> Tensor:
        return logits.argmax(dim=-1) == before.argmax(dim=-1)

    def metrics(self, logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
        values, truth = as_arrays(logits, labels)
        predicted = values.argmax(axis=1)
        return {
            "accuracy": metrics.accuracy(truth, predicted),
            "macro_f1": metrics.macro_f1(truth, predicted),
            "mcc": metrics.mcc(truth, predicted),
            "ece": metrics.ece(values, truth),
        }
