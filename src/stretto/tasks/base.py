"""What every task offers: features from inputs, a loss, answers, scores, and its lines in a transformers config.

B is the number of sequences in a batch, T its columns, C the number of labels (1 for regression). Logits are [B, C],
or [B, T, C] of a task that answers every token (column = position).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from stretto.data.columns import whole_text
from stretto.data.dataset import Form
from stretto.data.tokenise import Encoded, Origin
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.data import Dataset

#: Logits of a whole dataset: [n, C], or of a task that answers every token one [T, C] per feature, without padding.
#: A task that is answered by texts has texts (`stretto.engine.written.Text`) instead.
Logits = Tensor | Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An answer with its depth and cost. The answer itself is in the fields that a task adds."""

    depth: int = 0
    """Layers run; for a long input the maximum over its windows."""
    cost: float = 0.0
    """Fraction of the full model's FLOPs for this input."""

    @property
    def summary(self) -> str:
        """The answer in a few words."""
        raise NotImplementedError


class Task(ABC):
    """What a model has to answer, and the meaning of a head's logits.

    The class attributes declare what a task can do. All other code reads them, never the name of a task."""

    name: ClassVar[str]
    form: ClassVar[Form] = Form()
    """The columns of its data, and how labels become numbers."""
    answers: ClassVar[Literal["sequence", "token", "text"]]
    """What gets an answer: the whole sequence, every token of it, or the answer is a text."""
    right_or_wrong: ClassVar[bool] = False
    """Whether the answer to an input is either right or wrong (`correct`)."""
    one_of_labels: ClassVar[bool] = False
    """Whether an answer is one of the labels, and logits are their unnormalised log-probabilities."""
    judged: ClassVar[bool] = False
    """Whether `quality` judges answers with nothing but their labels, so that any model can be given a guarantee."""
    given_words: ClassVar[bool] = False
    """Whether inputs are lists of words."""
    flat: ClassVar[bool] = True
    """Whether an answer fits into a line of a csv file."""

    architecture: ClassVar[str | tuple[str, ...]] = "ForSequenceClassification"
    """Suffix of the names of its Hugging Face models."""
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """The class that loads such a model in plain transformers."""
    problem_type: ClassVar[str | None] = None
    """What transformers calls it."""
    pipeline_tag: ClassVar[str] = "text-classification"
    """What the hub calls it."""
    example: ClassVar[str] = '"some text"'
    """What `predict` takes, as Python."""
    main_metric: str
    """The score that training and calibration use; higher is better."""

    def __init__(self, label_names: Sequence[str]) -> None:
        self.label_names = list(label_names)

    @classmethod
    def fits(cls, problem_type: str | None, label_names: Sequence[str]) -> bool:
        """Whether a plain Hugging Face model of this `architecture`, with these fields, was made for the task."""
        return True

    @property
    def num_labels(self) -> int:
        return max(1, len(self.label_names))  # a number has no names, and one logit

    @classmethod
    def make(cls, label_names: Sequence[str], **settings: Any) -> Task:
        """The task of a saved model, from its label names and `settings`."""
        return cls(label_names, **settings)

    @classmethod
    def posed_by(cls, data: Dataset, **settings: Any) -> Task:
        """The task for these training data."""
        return cls.make(data.label_names or [], **settings)

    @property
    def outputs(self) -> str:
        """What the answers are, in words."""
        return ", ".join(self.label_names)

    def settings(self) -> dict[str, Any]:
        """What a saved model stores about the task besides its labels."""
        return {}

    def learn_from(self, data: Dataset) -> None:  # noqa: B027  # most tasks have one form of input
        """Store the form of the training data, so that other inputs are refused."""

    # ---- from inputs to features and back

    def check_input(self, text: Any) -> tuple[str, ...]:
        """The parts of one input, which must be of the task's form and of whole characters."""
        return tuple(whole_text(part, "Expected Unicode text") for part in self.parts_of(text))

    @abstractmethod
    def parts_of(self, text: Any) -> tuple[str, ...]:
        """One input as the tuple of its parts: a text or two, the words, or question and context."""

    @abstractmethod
    def encode(
        self, tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int, labels: Sequence[Any] | None = None,
        *, words: bool = False,
    ) -> Encoded:  # fmt: skip
        """Tokenise inputs. With `labels` (as in a `Dataset`, one per input) the features carry what the loss reads,
        with `words` the word of each token (`stretto.data.tokenise.words_of`)."""

    def origins(self, tokenizer: Any, texts: tuple[str, ...], max_length: int) -> list[Origin] | None:
        """For each token that `encode` makes of one input: where it comes from; None if unknown."""
        return None

    @abstractmethod
    def decode(self, logits: Logits, encoded: Encoded) -> Sequence[Prediction]:
        """An answer to each input (not: each feature)."""

    @abstractmethod
    def scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Any]) -> dict[str, float]:
        """Named scores over whole data, `main_metric` among them. `labels` as in a `Dataset`, one per input."""

    def signatures(self) -> dict[str, str]:
        """By score: what must be reported with it so that others can reproduce it; empty if a score has no options."""
        return {}

    def example_scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Any]) -> Tensor | None:
        """[n] the score of each input, in [0, 1], whose mean is `main_metric`; None if that is not a mean of scores."""
        return None

    # ---- answers judged one by one, for guarantees

    def quality(self, answers: Sequence[Any], labels: Sequence[Any], worst: float | None = None) -> list[float]:
        """How good each answer is, from 0 to 1, where 1 equals the label. Only 0 and 1 if `right_or_wrong`.

        A number that is wrong by `worst` or more has quality 0; other tasks ignore `worst`."""
        raise self.incapable("whose answers can be judged one by one")

    def as_labels(self, answers: Sequence[Any]) -> list[Any]:
        """Answers (as `decode` gives them) in the form of labels (as in a `Dataset`), to compare with or learn from."""
        raise self.incapable("whose answers can be judged one by one")

    # ---- in training

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each feature of a batch: [B]."""

    @abstractmethod
    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        """Distance of the student's logits from the teacher's, for each feature: [B]. Labels mark what is read."""

    @abstractmethod
    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B] the logit of the right answer: its gradient shows what the answer depends on (`methods.saliency`)."""

    # ---- what only some tasks can do

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[…, B, C] and [B] to bool […, B]: is the answer right? (For tasks whose answers are right or wrong.)"""
        raise self.incapable("whose answers are right or wrong")

    def wrongness(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[…, B, C], [B] to […, B] in [0, 1]: how wrong each answer is; here 1 where it is not right."""
        return 1 - self.correct(logits, labels).to(logits.dtype)

    def same_answer(self, logits: Tensor, before: Tensor, tolerance: float) -> Tensor:
        """[B, C], [B, C] to bool [B]: are both answers the same? Numbers may differ by less than `tolerance`."""
        raise self.incapable("that answers whole sequences")

    def classes(self, labels: Tensor, bins: int) -> tuple[Tensor, int]:
        """All training labels [n] to classes [n], for counting words by class, and the number of classes. Numbers are
        sorted into about `bins` bins of equal size."""
        raise self.incapable("that answers whole sequences")

    def incapable(self, expected: str) -> StrettoError:
        return StrettoError(f"Expected a task {expected}, got {self.name}. Use a classification model.")

    # ---- in transformers

    def hf_config(self) -> dict[str, Any]:
        """The task's fields in a transformers config, so that plain `AutoModelFor…` loads the model."""
        # transformers wants a name for every logit
        names = self.label_names or [f"LABEL_{number}" for number in range(self.num_labels)]
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


def check_finite(logits: Tensor, place: int) -> None:
    """Refuse the logits of a model that has diverged or is damaged: [C] or [T, C] of one example."""
    if not bool(logits.isfinite().all()):
        odd = logits.flatten()[~logits.flatten().isfinite()][0].item()
        raise StrettoError(not_finite(odd, place))


def not_finite(value: float, place: int) -> str:
    return (
        f"Expected finite logits, got {value} for example {place}. The weights are damaged or training has diverged: "
        "copy the model again, or train with a lower learning rate."
    )
