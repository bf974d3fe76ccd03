"""Budgets: from a cost, a latency or a tolerated loss to the operating point that meets it.

A goal finds the point among the dials that the method proposes. `calibrate` gives it a name and adds it to the model;
`model.predict(texts, budget=name)` uses it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from stretto.budget.choose import within_cost
from stretto.budget.latency import most_expensive_within
from stretto.budget.risk import Risk, Tested, in_order
from stretto.budget.sweep import point_of, runs
from stretto.data import Dataset
from stretto.data.tokenise import Encoded
from stretto.engine.cost import Cost
from stretto.errors import StrettoError, counted
from stretto.model import AdaptiveModel
from stretto.saving.digests import dataset_digest
from stretto.saving.points import Certificate, OperatingPoint
from stretto.saving.versions import versions


class TooFewExamples(StrettoError):
    """Nothing but the full model can be guaranteed."""

    def __init__(self, message: str, needed: int | None) -> None:
        super().__init__(message)
        self.needed = needed
        """Examples that might do; None: no number does."""


@dataclass(frozen=True)
class Reading:
    """One dial on the calibration data: its operating point and its answers."""

    point: OperatingPoint
    answers: Sequence[Any]
    cost: Cost
    """Of each example."""


@dataclass(frozen=True)
class Material:
    """A model and the calibration data, tokenised once."""

    model: AdaptiveModel
    data: Dataset
    batch_size: int = 32
    seed: int = 42
    """Of random samples."""
    progress: bool = False

    @cached_property
    def encoded(self) -> Encoded:
        return self.model.encode(self.data.texts)

    @cached_property
    def dials(self) -> list[float]:
        """The full model first, then the method's own dials, from the most expensive to the cheapest."""
        dial = self.model.method.dial
        return [dial.off, *(value for value in dial.sweep if value != dial.off)]

    def read(self, dials: Sequence[float]) -> Iterator[Reading]:
        """Each dial on all data, with scores if there are labels. A dial is run only when the caller asks for it."""
        model, encoded = self.model, self.encoded
        for dial, (logits, trace) in zip(
            dials, runs(model, encoded.features, dials, self.batch_size, self.progress), strict=True
        ):
            answers = model.task.decode(logits, encoded)
            metrics = {} if self.data.labels is None else model.task.scores(logits, encoded, self.data.labels)
            cost = Cost.of(trace, model.backbone)
            point = point_of(model, dial, metrics, cost, len(self.data))
            of = torch.tensor(encoded.example_of)
            yield Reading(point, answers, cost.per_example(of, len(encoded.texts)))


class Goal(ABC):
    """A cost, a latency, or a tolerated loss."""

    needs_labels = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The default name of the budget."""

    @abstractmethod
    def find(self, material: Material) -> OperatingPoint:
        """The cheapest point that meets the goal (for a cost or a latency: the most expensive within it)."""


@dataclass(frozen=True)
class Spend(Goal):
    """An expected fraction of the full model's FLOPs."""

    cost: float

    @property
    def name(self) -> str:
        return f"cost-{self.cost:g}"

    def find(self, material: Material) -> OperatingPoint:
        points = [reading.point for reading in material.read(material.dials)]
        found = within_cost(points, self.cost)
        if found is None:
            least = min(points, key=lambda point: point.cost)
            raise StrettoError(
                f"Expected a cost that a dial of {material.model.method.name} can reach, got {self.cost:g}: the "
                f"cheapest, {least.dial:g}, costs {least.cost:.3f} on these texts. Ask for more."
            )
        return found


@dataclass(frozen=True)
class Wait(Goal):
    """The milliseconds within which a given percentage of batches is answered on this machine, tokenising included."""

    milliseconds: float
    batch: int = 1
    percentile: float = 95.0

    def __post_init__(self) -> None:
        if not self.milliseconds > 0 or self.batch < 1 or not 0 < self.percentile <= 100:
            raise StrettoError(
                f"Expected milliseconds above 0, a batch of 1 or more and a percentile up to 100, got "
                f"{self.milliseconds:g}, {self.batch} and {self.percentile:g}. Correct them."
            )

    @property
    def name(self) -> str:
        return f"latency-{self.milliseconds:g}ms"

    def find(self, material: Material) -> OperatingPoint:
        dial, took = most_expensive_within(
            material.model, material.data.texts, material.dials, self.milliseconds, self.batch, self.percentile,
            seed=material.seed, progress=material.progress,
        )  # fmt: skip
        (reading,) = material.read([dial])
        return dataclasses.replace(reading.point, latency=took)


@dataclass(frozen=True)
class Guarantee(Goal):
    """A bound on the risk, with a confidence. `worst` is the regression error that counts as a loss of 1."""

    confidence: float = 0.95
    worst: float | None = None

    @property
    @abstractmethod
    def allowed(self) -> float:
        """The loss per example that is allowed on average."""

    @abstractmethod
    def loss(self, material: Material) -> str:
        """What is bounded, in words."""

    @abstractmethod
    def losses(self, material: Material, full: Sequence[Any], answers: Sequence[Any]) -> list[float]:
        """The loss of each example, from the answers of the full model and those at a dial."""

    def risk(self, material: Material) -> Risk:
        return Risk(self.allowed, self.confidence, binary=material.model.task.right_or_wrong)

    def find(self, material: Material) -> OperatingPoint:
        check_dial(material)
        risk = self.risk(material)
        points: list[OperatingPoint] = []
        tests = list(in_order(risk, self.losses_by_dial(material, points)))
        safe = risk.safe([test.p_value for test in tests])
        cheapest = min(safe, key=lambda i: points[i].cost, default=0)
        if cheapest == 0:  # the full model, or nothing
            raise self.too_little(risk, tests, points)
        certificate = Certificate(
            self.loss(material), self.allowed, self.confidence, tests[cheapest].loss,
            tuple((test.dial, test.p_value) for test in tests), material.seed, versions("mapie"),
        )  # fmt: skip
        return dataclasses.replace(points[cheapest], certificate=certificate)

    def losses_by_dial(
        self, material: Material, points: list[OperatingPoint]
    ) -> Iterator[tuple[float, Sequence[float]]]:
        """Dial by dial, starting with the full model; the measured points are added to `points`."""
        full: Sequence[Any] = ()
        for reading in material.read(material.dials):
            full = full or reading.answers
            points.append(reading.point)
            yield reading.point.dial, self.losses(material, full, reading.answers)

    def too_little(self, risk: Risk, tests: Sequence[Tested], points: Sequence[OperatingPoint]) -> TooFewExamples:
        """Why only the full model can be guaranteed, and how many examples would be needed."""
        n = points[0].n
        wanted = f"a loss of at most {100 * risk.allowed:g} % with {100 * risk.confidence:g} % confidence"
        if len(tests) == 1:  # the full model itself, which loses nothing
            least = risk.examples_needed()
            return TooFewExamples(
                f"Expected at least {least} examples to guarantee {wanted}, even if nothing is lost, got {n}. "
                "Add examples, or allow more loss.",
                least,
            )
        last, passed = tests[-1], len(tests) - 2  # those between the full model and the last
        if last.p_value <= 1 - risk.confidence:
            cheapest = min(point.cost for point in points[1:])
            return TooFewExamples(
                f"Expected a dial that costs less than the full model, got only dials that guarantee {wanted} but cost "
                f"{cheapest:.3f} or more on these {n} examples. Calibrate on longer texts.",
                None,
            )
        needed = risk.examples_needed(last.loss)
        advice = f"About {needed} examples like these would do, or" if needed else "More would not help:"
        where = f"{counted(passed, 'dial')} passed without saving anything and the next" if passed else "the first"
        return TooFewExamples(
            f"Expected examples that guarantee {wanted} at a dial below the full model, got {n} on which {where}, "
            f"{last.dial:g}, loses {100 * last.loss:.2f} % (p = {last.p_value:.3g}). {advice} allow more loss.",
            needed,
        )


def check_dial(material: Material) -> None:
    """Refuse a model without a dial to find, or one whose full model was not trained: losses against it say little."""
    method, dial = material.model.method, material.model.method.dial
    if len(material.dials) == 1:
        raise StrettoError(f"Expected a method with a dial to find, got {method.name}. Train another, such as deebert.")
    if dial.trained is not None:
        raise StrettoError(
            f"Expected a full model that was trained, to compare other dials with, got one of {method.name}, trained "
            f"at {dial.name} {dial.trained:g} and not at {dial.off:g}. Calibrate to a cost or a latency, or train "
            "another method, such as deebert."
        )


@dataclass(frozen=True)
class MaxLoss(Guarantee):
    """Points (of 100) of the task's score that may be lost against the full model. Only
    correct answers of the full model can be lost. Errors of the full model that a dial corrects are not counted."""

    points: float = 1.0
    needs_labels = True

    @property
    def name(self) -> str:
        return f"loss-{self.points:g}"

    @property
    def allowed(self) -> float:
        return self.points / 100

    def loss(self, material: Material) -> str:
        task = material.model.task
        return "right answers lost" if task.right_or_wrong else f"quality of each answer lost ({task.name})"

    def losses(self, material: Material, full: Sequence[Any], answers: Sequence[Any]) -> list[float]:
        if material.data.labels is None:
            raise StrettoError("Expected labelled data to bound the loss of a score, got none. Name the label column.")
        judge = material.model.task.quality
        before, now = (judge(each, material.data.labels, self.worst) for each in (full, answers))
        return [max(a - b, 0.0) for a, b in zip(before, now, strict=True)]


@dataclass(frozen=True)
class Agreement(Guarantee):
    """The fraction of answers that must equal those of the full model. Needs no labels."""

    agreement: float = 0.98

    @property
    def name(self) -> str:
        return f"agreement-{self.agreement:g}"

    @property
    def allowed(self) -> float:
        return 1 - self.agreement

    def loss(self, material: Material) -> str:
        task = material.model.task
        how = "answers that differ from" if task.right_or_wrong else "distance of each answer from"
        return f"{how} the full model's"

    def losses(self, material: Material, full: Sequence[Any], answers: Sequence[Any]) -> list[float]:
        task = material.model.task
        return [1 - each for each in task.quality(answers, task.as_labels(full), self.worst)]


def calibrate(
    model: AdaptiveModel,
    data: Dataset,
    goal: Goal,
    *,
    name: str = "",
    batch_size: int = 32,
    seed: int = 42,
    progress: bool = False,
) -> OperatingPoint:
    """Find the operating point of a goal on `data` (labelled only if the goal needs it), and give it to the model as a
    budget. A budget of the same name and dtype is replaced; nothing is saved."""
    if not len(data):
        raise StrettoError("Expected texts to calibrate on, got none. Check the file.")
    found = goal.find(Material(model, data, batch_size, seed, progress))
    budget = dataclasses.replace(found, name=name or goal.name, data=dataset_digest(data))
    others = [point for point in model.operating_points if (point.name, point.dtype) != (budget.name, budget.dtype)]
    model.operating_points = [*others, budget]
    return budget
