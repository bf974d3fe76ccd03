"""The one interface of all methods. A method decides; it owns no loop, no mask, no packing, no backbone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.methods.exits import ExitHeads
from stretto.state import Decision, Point, State
from stretto.tasks import Task


@dataclass(frozen=True)
class Dial:
    """The one scalar that trades answers for cost."""

    name: str
    meaning: str
    off: float
    """At this value the full model runs."""
    sweep: tuple[float, ...]
    """Values worth trying, from dearest to cheapest; cost never rises along them."""
    upper: float = float("inf")
    lower: float = 0.0

    def check(self, value: float | Tensor) -> None:
        values = torch.as_tensor(value, dtype=torch.float64)
        if bool(((values < self.lower) | (values > self.upper) | values.isnan()).any()):
            raise StrettoError(
                f"Expected the dial '{self.name}' between {self.lower:g} and {self.upper:g}, got {value}. "
                f"It means: {self.meaning}."
            )


def spaced(off: float, cheapest: float, steps: int = 40) -> tuple[float, ...]:
    """A sweep from `off` to `cheapest`, dense near `off`, where models are sure of themselves."""
    return tuple(round(off + (cheapest - off) * (step / steps) ** 2, 6) for step in range(steps + 1))


@dataclass(frozen=True)
class Shape:
    """What a method needs to know of the model it is built for."""

    d: int
    n_layers: int
    n_labels: int


@dataclass(frozen=True)
class Stage:
    """One training run of several that follow each other."""

    name: str
    epochs: float
    learning_rate: float
    """For the backbone and its head."""
    method_learning_rate: float = 1e-3
    """For the method's own parameters (exits, predictors), which start from nothing."""
    trains_backbone: bool = True
    """False freezes the backbone in eval mode; its pooled states are then computed once and kept."""
    layers: tuple[int, ...] = ()
    """Exits (layers 1..L-1) whose answers this stage's loss reads."""
    final: bool = True
    """Whether it also reads the final head's answer (if not, the layers above the last exit read do not run)."""
    best_by: Literal["score", "loss"] = "score"
    """Dev criterion for the best checkpoint: mean task score of all answers read, or the stage's own loss."""


@dataclass(frozen=True)
class Pass:
    """What a training step gives a method's loss. E is the number of exits read, the final head is last."""

    layers: tuple[int, ...]
    """The exits read, as in `Stage.layers`."""
    logits: Tensor
    """[E + 1, B, C] answers, the final head's last (if the stage reads it)."""
    pooled: Tensor
    """[E, B, d] what each exit read."""
    step: int
    """Optimizer steps taken in this stage."""


class Method(nn.Module):
    """Base of all methods; see CONTRIBUTING for adding one."""

    name: ClassVar[str]
    dial: Dial
    Config: ClassVar[type]
    points: ClassVar[frozenset[Point]] = frozenset()
    """Where `decide` is called."""
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    uses_exits: ClassVar[bool] = False
    restore: ClassVar[bool] = False
    """Whether dropped tokens get their last state back after the last layer."""

    def __init__(self, config: Any, shape: Shape, task: Task) -> None:
        super().__init__()
        if task.name not in self.tasks:
            able = ", ".join(self.tasks)
            raise StrettoError(
                f"Expected a task that {self.name} supports ({able}), got {task.name}. For regression use pabee or lte."
            )
        self.config, self.shape, self.task = config, shape, task
        self.exits: ExitHeads | None = None
        if self.uses_exits:
            self.exits = ExitHeads(shape.d, shape.n_layers - 1, shape.n_labels, config.pool, config.dropout)

    def decide(self, state: State) -> Decision | None:
        """What to do with the live rows at this point of this layer; None means nothing."""
        return None

    def stages(self) -> list[Stage]:
        """Training runs in order. The first one is ordinary fine-tuning, shared by all methods."""
        return [self.finetuning()]

    def finetuning(self) -> Stage:
        return Stage("backbone", self.config.num_train_epochs, self.config.learning_rate)

    def loss(self, stage: Stage, forward: Pass, labels: Tensor) -> Tensor:
        """The scalar a stage minimises; here the final head's own loss, as in ordinary fine-tuning."""
        return self.losses(forward, labels)[-1]

    def losses(self, forward: Pass, labels: Tensor) -> Tensor:
        """[E + 1] mean loss of every answer."""
        return torch.stack([self.task.loss(logits, labels).mean() for logits in forward.logits])
