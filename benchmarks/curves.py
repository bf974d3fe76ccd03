"""Score over cost of rows that start from one fine-tuned model, with dials chosen on the dev data.

Shared by drops.py, depths.py and pretraining.py. A dial is chosen for a loss: the cheapest that loses at most 0, 0.5, 1
or 2 points on the dev data. Its score, cost and times are those of the test data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from experiment import Experiment, Set, Timed

from stretto import AdaptiveModel, sweep
from stretto.data import Dataset
from stretto.data.tokenise import Encoded
from stretto.saving.points import OperatingPoint

LOSSES = (0.0, 0.5, 1.0, 2.0)
NOT_METHODS = ("full", "about", "clock", "search", "pretraining")


@dataclass(frozen=True)
class CurveSet(Set):
    bf16: bool = True
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """method, or method-variant -> its settings on this set."""
    dials: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """method -> where it is measured, if not at all dials of its sweep: long texts take their time."""


class Curves(Experiment):
    spec: CurveSet

    def run(self, only: list[str]) -> None:
        full = self.fit("full", self.encoder, (), {"num_train_epochs": self.spec.epochs})
        if "full" not in self.rows:
            points = {part: sweep(full, data, progress=False)[0].to_json() for part, data in self.measured().items()}
            self.write("full", points)
        for key in self.spec.rows:
            if key in self.rows or (only and key.split("-")[0] not in only):
                continue
            model = self.open(key)
            self.prepare(key, model)
            self.write(key, self.row(model))
            print(self.name, key, json.dumps(self.rows[key]["chosen"]), flush=True)

    def open(self, key: str) -> AdaptiveModel:
        """The model of a row: trained now, or loaded."""
        return self.fit(key, str(self.runs / "full"), ("backbone",), self.spec.rows[key])

    def prepare(self, key: str, model: AdaptiveModel) -> None:
        """What a row needs between training and measuring."""

    def measured(self) -> dict[str, Dataset]:
        return {"dev": self.choosing or self.dev, "test": self.test}

    def row(self, model: AdaptiveModel) -> dict[str, Any]:
        dials = self.spec.dials.get(model.method.name)
        found = {
            part: sweep(model, data, dials, progress=False, encoded=self.encoded(model, data))
            for part, data in self.measured().items()
        }
        return {
            **{part: [p.to_json() for p in points] for part, points in found.items()},
            "chosen": self.chosen(found["dev"], found["test"]),
        }

    def chosen(self, dev: list[OperatingPoint], test: list[OperatingPoint]) -> dict[str, Any]:
        """For each loss the point on the test data, None if no dial that saves anything will do."""
        best, found = self.score_of_all_layers(dev), {}
        for loss in LOSSES:
            good = [point for point in dev if point.cost < 1 and 100 * point.score >= 100 * best - loss]
            dial = min(good, key=lambda point: point.cost).dial if good else None
            found[f"{loss:g}"] = next((p.to_json() for p in test if p.dial == dial), None)
        return found

    def score_of_all_layers(self, dev: list[OperatingPoint]) -> float:
        """What a loss on the dev data is counted from: the full model, or the same weights with the dial off where they
        are better. A full model that wants more training must not make a method look good."""
        return max(self.rows["full"]["dev"]["score"], dev[0].score)

    def encoded(self, model: AdaptiveModel, data: Dataset) -> Encoded:
        return model.encode(data.texts)

    def timed(self) -> Iterator[Timed]:
        """Every row at every dial chosen."""
        for key, row in self.rows.items():
            if key not in NOT_METHODS and self.has_time(key):
                model = self.open(key)
                for loss, point in row["chosen"].items():
                    if point is not None:
                        yield Timed(key, loss, model, point["dial"])

    def has_time(self, key: str) -> bool:
        """Whether it makes sense to time a row."""
        return True
