"""What every task offers: a loss, answers, metrics, and its lines in a transformers config.

B is the number of sequences in a batch, N in a whole dataset, C the number of labels (1 for regression).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto.errors import StrettoError

#: What metrics take: logits [N, C] and labels [N], from torch, numpy or plain lists.
ArrayLike = Tensor | NDArray[Any] | Sequence[Any]


@dataclass(frozen=True)
class Answer:
    """What the user gets for one input."""

    label: str | float  # the label's name; for regression the value
    score: float | None  # the probability of `label`; None for regression
    probabilities: dict[str, float] | None  # of every label; None for regression


class Task(ABC):
    """The meaning of a head's logits [B, C]."""

    name: ClassVar[str]
    main_metric: ClassVar[str]  # the one that training and calibration look at; higher is better
    problem_type: ClassVar[str]  # what transformers calls it

    def __init__(self, label_names: Sequence[str]) -> None:
        self.label_names = list(label_names)

    @property
    def num_labels(self) -> int:
        return max(1, len(self.label_names))  # a number has no names, and one logit

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B, C] and [B] to the loss of each example, [B]."""

    @abstractmethod
    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """How far the student's logits are from the teacher's, for each example: [B]. Labels say what is to be read."""

    @abstractmethod
    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B] the logit of the right answer: its gradient shows what the answer hangs on (`stretto.saliency`)."""

    @abstractmethod
    def decode(self, logits: Tensor) -> list[Answer]:
        """[B, C] to B answers."""

    @abstractmethod
    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B, C] and [B] to bool [B]: is the answer right? (For tasks whose answers are right or wrong.)"""

    @abstractmethod
    def metrics(self, logits: ArrayLike, labels: ArrayLike) -> dict[str, float]:
        """[N, C] and [N] to named scores, `main_metric` among them."""

    def hf_config(self) -> dict[str, Any]:
        """This task's fields in a transformers config, so that plain `AutoModelFor…` loads the model."""
        names = self.label_names or ["LABEL_0"]  # transformers wants a name for every logit
        return {
            "num_labels": self.num_labels,
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": self.problem_type,
        }


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """[…, C] logits -> […] KL(teacher ‖ student) = Σ p_t (log p_t - log p_s)."""
    log_t, log_s = teacher.log_softmax(dim=-1), student.log_softmax(dim=-1)
    return (log_t.exp() * (log_t - log_s)).sum(dim=-1)


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
