"""The one interface of all methods. A method decides; it has no loop, no mask, no packing, no backbone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from stretto.engine.decider import Decider, OwnHead
from stretto.errors import StrettoError
from stretto.methods.exits import ExitHeads
from stretto.state import Decision, Inputs, Output, Point, Stack, State
from stretto.tasks import TASKS, Task

if TYPE_CHECKING:
    from stretto.backbones import Backbone
    from stretto.engine.reference import ReferenceEngine

#: Notes on the training data by name: for each example a tensor with one entry per token; or, with a name that begins
#: with `TEXT_NOTE`, one tensor [examples, k] of notes on whole texts.
Notes = dict[str, list[Tensor] | Tensor]
TEXT_NOTE = "text_"
#: The training examples in order, with their labels; can be iterated several times.
Batches = Iterable[tuple[Inputs, Tensor]]


@dataclass(frozen=True)
class Dial:
    """The number that trades score for cost."""

    name: str
    meaning: str
    off: float
    """At this value the full model runs."""
    sweep: tuple[float, ...]
    """Values worth trying, from most expensive to cheapest. Cost never rises along them if the method is `monotone`.
    Exception: from the first to the second value, if the method has its own head, which reads more rows (`OwnHead`)."""
    upper: float = float("inf")
    lower: float = 0.0
    trained: float | None = None
    """The most expensive value of the sweep that was trained, if not off. The default dial is compared with it, and no
    loss against the full model is guaranteed."""

    def within_trained(self, value: float) -> bool:
        """Whether the value is the most expensive that was trained, or cheaper."""
        return self.trained is None or (value - self.trained) * (self.sweep[-1] - self.off) >= 0

    def check(self, value: float | Tensor) -> None:
        values = torch.as_tensor(value, dtype=torch.float64)
        if bool(((values < self.lower) | (values > self.upper) | ~values.isfinite()).any()):
            ends = f"between {self.lower:g} and {self.upper:g}"
            if math.isinf(self.upper):
                ends = f"of {self.lower:g} or more, and finite"
            raise StrettoError(f"Expected the dial '{self.name}' {ends}, got {value}. It means: {self.meaning}.")


def spaced(off: float, cheapest: float, steps: int = 40) -> tuple[float, ...]:
    """A sweep from `off` to `cheapest`, dense near `off`, where most models are confident."""
    return tuple(round(off + (cheapest - off) * (step / steps) ** 2, 6) for step in range(steps + 1))


@dataclass(frozen=True)
class Shape:
    """What a method needs to know about the model it is built for."""

    d: int
    n_layers: int
    n_labels: int
    mask_id: int | None = None
    """The mask token."""


@dataclass(frozen=True)
class Needs:
    """What a method needs of a task (see the attributes of `Task`)."""

    answers: tuple[str, ...] = ("sequence",)
    """What it can answer: a sequence, every token, or with a text."""
    right_or_wrong: bool = False
    one_of_labels: bool = False

    def met_by(self, task: Task | type[Task]) -> bool:
        return (
            task.answers in self.answers
            and task.right_or_wrong >= self.right_or_wrong
            and task.one_of_labels >= self.one_of_labels
        )

    def __and__(self, other: Needs) -> Needs:
        """What two methods need together."""
        return Needs(
            tuple(each for each in self.answers if each in other.answers),
            self.right_or_wrong or other.right_or_wrong,
            self.one_of_labels or other.one_of_labels,
        )


#: For methods that only change length or depth; the model's own head answers.
ANY_ANSWER = Needs(answers=("sequence", "token", "text"))


@dataclass(frozen=True)
class Stage:
    """One of several training runs in a row: its plan, and what the method does in it."""

    name: str
    epochs: float
    learning_rate: float
    """For the backbone and its head."""
    method_learning_rate: float = 1e-3
    """For the method's own parameters (exits, predictors), which start from random weights."""
    trains_backbone: bool = True
    """False freezes the backbone in eval mode; its pooled states are then computed once and kept."""
    layers: tuple[int, ...] = ()
    """Exits (layers 1..L-1) whose answers this stage's loss reads."""
    final: bool = True
    """Whether it also reads the final head's answer (if not, the layers above the last exit read do not run)."""
    detached: bool = False
    """Whether each layer learns only from the next exit above it: no gradient passes below an exit that is read."""
    best_by: Literal["score", "loss", "saving", "last"] = "score"
    """Which checkpoint is kept: best mean dev score of all answers read, best dev loss, cheapest on dev within
    `SAVING_LOSS` points of the full model's score before the first stage that is `taught`, or simply the last."""
    decides: bool = False
    """Whether the method's decisions act during training: the objective then gets a `TrainingBatch`, not a `Pass`."""
    dials: tuple[float, ...] = ()
    """Dials at which the dev data are scored, if the stage reads no exits; none means off."""
    rates: tuple[tuple[str, float], ...] = ()
    """Learning rates of single parameters of the method, by the beginning of their name. These parameters have no
    weight decay, and their gradients are clipped separately."""
    reach: float = 0.0
    """How far the parameters of `rates` must be able to move within the stage: if there are few steps, their rates are
    raised accordingly."""
    keeps_best: int = 1
    """How many of its best checkpoints are kept until the run ends, for `noted_by`."""
    noted_by: int = 1
    """Notes on tokens (`prepare`) are the mean over so many best checkpoints of an earlier stage."""
    taught: bool = True
    """Whether the full model is trained before the stage starts, so that the stage can also learn from its answers to
    texts without labels (`train(unlabelled=…)`)."""
    teacher: bool = False
    """Whether its objective also needs the full model's answers to the training texts (`Targets.teacher`), computed
    before the first stage that is `taught`."""
    needs_labels: bool = True
    """False: the stage learns from texts alone, with and without labels."""
    method: Method | None = field(default=None, compare=False, repr=False)
    """The part of a combination that learns in this stage; None: the model's method."""
    beneath: Method | None = field(default=None, compare=False, repr=False)
    """The part of a combination that drops or freezes tokens meanwhile, at dials drawn from its sweep."""

    # what is called, and takes no part in comparing plans
    objective: Callable[[Any], Tensor] = field(kw_only=True, compare=False, repr=False)
    """From a `Pass` (of a stage that `decides`: a `TrainingBatch`) to the scalar that the stage minimises."""
    prepare: Callable[..., Notes] | None = field(default=None, compare=False, repr=False)
    """prepare(engine, batches), before the stage, in eval mode: the method's notes on each training token (during
    training `Inputs.notes`), one list entry [n tokens] per example; or on each text (`Targets.notes`). If the method
    exits it also gets `above` (see `engine.replay`), for texts that another part of a combination has shortened."""
    choose: Callable[[Callable[[Decider], float]], None] | None = field(default=None, compare=False, repr=False)
    """Before the stage, after `prepare`: lets the method choose something on the dev texts. It gets a function that
    runs them with a decider and returns their mean divergence from the full model's answers."""
    finish: Callable[..., None] | None = field(default=None, compare=False, repr=False)
    """finish(engine, batches), after the stage, in eval mode: computes something from the trained weights. If the
    method exits it also gets `above`."""
    after_step: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """After each optimizer step: put parameters back into their range."""

    def plan(self) -> dict[str, Any]:
        """What must be equal in a resumed run; the callables follow from the method."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}


@dataclass(frozen=True)
class Targets:
    """The right answers to the B examples of a batch."""

    labels: Tensor
    """As the task's loss reads them; for a text without a label, the full model's answer."""
    teacher: Tensor | None = None
    """[B, C], or [B, T, C] for a task that answers tokens: the logits of the full model, if the stage needs them."""
    labelled: Tensor | None = None
    """[B] bool: whether the label is known; None: all are."""
    notes: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, k] the notes of `Stage.prepare` on each text; dev texts have none."""


@dataclass(frozen=True)
class Pass:
    """What a step of a stage gives its objective. E is the number of exits read, the final head is last."""

    layers: tuple[int, ...]
    """The exits read, as in `Stage.layers`."""
    logits: Tensor
    """[E + 1, B, C] answers, the final head's last (if the stage reads it)."""
    pooled: Tensor
    """[E, B, d] what each exit read."""
    targets: Targets
    step: int = 0
    """Optimizer steps taken in this stage."""

    @property
    def labels(self) -> Tensor:
        return self.targets.labels


@dataclass(frozen=True)
class TrainingBatch:
    """What a step of a stage that decides gives its objective: a batch, and ways to run it."""

    inputs: Inputs
    targets: Targets
    run: Callable[..., Output]
    """run(dial, skip=(), context=None) runs the batch on the reference engine, with gradients, without the layers in
    `skip`; the method gets `context` as `State.context`."""
    step: int
    """Optimizer steps taken in this stage."""
    epoch: float
    """Epochs done in this stage; a fraction within one."""
    engine: ReferenceEngine
    """The engine that `run` uses, for hidden states with nothing decided."""
    last_states: Callable[[], Tensor] | None = None
    """[B, T, d] after the last layer without decisions; in a combination, with the decisions of the first part."""

    @property
    def labels(self) -> Tensor:
        return self.targets.labels


class Method(nn.Module):
    """Base of all methods: a `Decider` with a Config, weights and training. See CONTRIBUTING for adding one."""

    name: ClassVar[str]
    dial: Dial
    Config: ClassVar[type]
    points: frozenset[Point] = frozenset()
    """Where `decide` is called."""
    stacks: frozenset[Stack] = frozenset({"encoder"})
    """In which stacks of an encoder–decoder `decide` is called."""
    needs: ClassVar[Needs] = Needs()
    """What a task must be able to do."""
    verbs: ClassVar[frozenset[str]] = frozenset()
    """What it does: 'drop' or 'freeze' tokens, let texts 'exit', 'gate' layers. Combinations depend on it."""
    uses_exits: ClassVar[bool] = False
    restore: bool = False
    """Whether dropped tokens get their last state back after the last layer."""
    reads_words: bool = False
    """Whether `Inputs.notes` must have the word of each token (`word`, and `word_key`: see `words.py`)."""
    monotone: bool = True
    """Whether cost never rises along the sweep for any sequence; if not, it falls on average."""

    def __init__(self, config: Any, shape: Shape, task: Task) -> None:
        super().__init__()
        if not self.needs.met_by(task):
            raise StrettoError(
                f"Expected a task that {self.name} can do ({', '.join(tasks_of(type(self)))}), got {task.name}. "
                f"Methods that can do it: {', '.join(able(task))}."
            )
        self.config, self.shape, self.task = config, shape, task
        if self.uses_exits:
            exits = ExitHeads(shape.d, shape.n_layers - 1, shape.n_labels, config.pool, config.dropout)
            self._modules["exits"] = exits

    @property
    def exits(self) -> ExitHeads | None:
        """What answers the texts that leave early; None if the method has no exits."""
        return cast(ExitHeads | None, self._modules.get("exits"))

    def attach(self, backbone: Backbone) -> None:
        """When the model is complete, before saved weights are loaded: build parts that depend on the encoder."""

    overruled = False
    """Whether it is part of a combination whose other part answers with its own head."""

    def own_head(self) -> OwnHead | None:
        """A head that answers instead of the model's own if the dial is not off; None if there is none."""
        return None

    def decide(self, state: State) -> Decision | None:
        """What to do with the live rows at this point of this layer; None means nothing."""
        return None

    def found(self) -> dict[str, str]:
        """What was chosen in training, for the model card."""
        return {}

    def stages(self) -> list[Stage]:
        """Training runs in order. Most methods begin with ordinary fine-tuning."""
        return [self.finetuning()]

    def finetuning(self) -> Stage:
        """The stage that trains the backbone; a combination has that of its second part."""
        config = self.config
        return Stage("backbone", config.num_train_epochs, config.learning_rate, taught=False, objective=self.final_loss)

    # ---- objectives that stages share

    def final_loss(self, forward: Pass) -> Tensor:
        """The final head's own loss, as in ordinary fine-tuning."""
        return self.losses(forward)[-1]

    def loss_at(self, dial: float) -> Callable[[TrainingBatch], Tensor]:
        """The objective of a stage that decides: the task's loss at this dial."""

        def objective(batch: TrainingBatch) -> Tensor:
            return self.loss(batch.run(dial).logits, batch.targets).mean()

        return objective

    def losses(self, forward: Pass) -> Tensor:
        """[E + 1] mean loss of every answer."""
        return torch.stack([self.loss(logits, forward.targets).mean() for logits in forward.logits])

    def loss(self, logits: Tensor, targets: Targets) -> Tensor:
        """[B] the task's loss; for a text without a label, the distance of the answer from the full model's."""
        loss = self.task.loss(logits, targets.labels)
        if targets.labelled is None:
            return loss
        assert targets.teacher is not None
        distance = self.task.distillation(logits, targets.teacher, targets.labels)
        return torch.where(targets.labelled, loss, distance)


def able(task: Task) -> list[str]:
    """The methods that can do a task."""
    from stretto.methods import METHODS

    return [name for name in METHODS if METHODS[name].needs.met_by(task)]


def tasks_of(method: type[Method]) -> list[str]:
    """The tasks that a method can do."""
    return [name for name, task in TASKS.items() if method.needs.met_by(task)]
