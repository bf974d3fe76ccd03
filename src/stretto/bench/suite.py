"""Suites: what is compared on what, in a YAML file (`benchmarks/suites/*.yaml`).

A suite names data sets and rows. A row is a method with its settings, trained once per set and seed; it starts from the
encoder or from the model of another row. docs/benchmarks.md describes every field.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from stretto.bench.record import Record
from stretto.errors import StrettoError

FULL_ROW = "full"
#: Whose answers and times are compared with ours: the full model's weights in another engine.
BASELINES = ("huggingface", "huggingface_sorted", "onnx", "onnx_int8")
DEFAULT_SEED = 42


@dataclass(frozen=True)
class Recipe(Record):
    """A row: how its model is made and where it is measured."""

    method: str = ""
    """Default: the name of the row, up to a '-'."""
    start: str | None = FULL_ROW
    """The row whose model it starts from; null: the encoder."""
    skip: list[str] = field(default_factory=lambda: ["backbone"])
    """Stages that are done already where it starts."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of the method's Config."""
    weights_of: str | None = None
    """The row whose trained model it uses as it is, with other settings."""
    search: dict[str, Any] | None = None
    """Settings of the search for lengths (of a model that writes texts: for thresholds), after training."""
    dials: list[float] | None = None
    """Where it is measured; default: the method's own sweep."""
    reported: list[float] = field(default_factory=list)
    """Dials that its paper reports: measured, timed, and shown with the layers per token."""
    layers: int | None = None
    """Take the first layers of the encoder only."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Where the model starts from nothing: sizes that differ from those of the suite."""
    seeds: list[int] | None = None
    """Default: all of the suite."""
    models: list[str] | None = None
    """Encoders it is for; default: all."""
    rationales: dict[str, Any] | None = None
    """`data`, `dial` and `sets`: compare what the models of these sets look at with words that people marked."""


@dataclass(frozen=True)
class SetSpec(Record):
    """A data set: files `<name>.jsonl.gz` of the data folder."""

    train: str
    epochs: float
    """Of fine-tuning."""
    dev: str | None = None
    """Default: a tenth of train."""
    test: str | None = None
    """Default: another tenth of train, the same for every seed."""
    task: str = "classification"
    limit: int | None = None
    """Most training examples, a random sample."""
    test_limit: int | None = None
    """Most test examples, a random sample."""
    chosen_on: int | None = None
    """Examples to choose dials on, from the part of train that `limit` leaves unused; default: the dev data."""
    held_out: float = 0.1
    """Part of train that becomes the test data, where there is no file for it."""
    max_length: int | None = None
    bf16: bool = False
    """Train under bfloat16 autocast where the processor computes in it; everything is measured in float32."""
    attention_dropout: float | None = None
    """While training; default: the encoder's own."""
    batch: int = 32
    """Examples of a training step."""
    accumulate: int = 1
    """Parts a training batch is computed in: long texts need the memory."""
    rows: list[str] | None = None
    """Default: all rows of the suite that are for the task."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """row -> settings that differ on this set."""
    dials: dict[str, list[float]] = field(default_factory=dict)
    """row -> where it is measured on this set."""
    seeds: list[int] | None = None
    model: str | None = None
    """The encoder, if it is not that of the suite."""
    timed: int = 64
    """Test inputs that are timed, in batches by themselves; in a stream eight times as many."""
    rounds: int = 5


@dataclass(frozen=True)
class Suite(Record):
    name: str
    about: str
    model: str
    """The encoder: a folder of the models folder, or a hub name. `scratch:marian` starts from nothing."""
    sets: dict[str, SetSpec]
    recipes: dict[str, Recipe]
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of a model that starts from nothing."""
    seeds: list[int] = field(default_factory=lambda: [DEFAULT_SEED])
    choose: str = "loss"
    """How dials are chosen to be timed: 'loss' (on the dev data) or 'cost' (at most 0.75, 0.5, 0.35)."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32])
    baselines: list[str] = field(default_factory=list)
    int8: bool = False
    """Whether rows are measured and timed in int8 too."""

    @classmethod
    def load(cls, path: Path) -> Suite:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            problem = " ".join(str(error).split())
            raise StrettoError(f"Expected a suite in '{path}', got: {problem}. Name a YAML file.") from error
        suite = cls.read(content, path.name)
        recipes = {
            name: replace(
                recipe,
                method=recipe.method or name.partition("-")[0],
                start=None if name == FULL_ROW else recipe.start,
                skip=[] if name == FULL_ROW or recipe.start is None else recipe.skip,
            )
            for name, recipe in suite.recipes.items()
        }
        suite = replace(suite, recipes=recipes)
        suite.check(path.name)
        return suite

    def check(self, where: str) -> None:
        """Refuse names that lead nowhere now, not after hours."""
        from stretto.methods import METHODS
        from stretto.tasks import TASKS

        for name, recipe in self.recipes.items():
            _ = METHODS[recipe.method]
            for other in (recipe.start, recipe.weights_of):
                self._known(other, f"{where}, recipes, {name}")
        for name, spec in self.sets.items():
            _ = TASKS[spec.task]
            for row in [*(spec.rows or []), *spec.settings, *spec.dials]:
                self._known(row, f"{where}, sets, {name}")
        for baseline in self.baselines:
            if baseline not in BASELINES:
                raise StrettoError(
                    f"{where}: expected baselines among {', '.join(BASELINES)}, got {baseline}. Correct the file."
                )
        if self.choose not in ("loss", "cost"):
            raise StrettoError(f"{where}: expected choose to be loss or cost, got {self.choose}. Correct the file.")

    def _known(self, row: str | None, where: str) -> None:
        if row is not None and row not in self.recipes:
            raise StrettoError(
                f"{where}: expected one of the recipes {', '.join(self.recipes)}; got {row}. Correct the file."
            )

    def recipe(self, row: str, spec: SetSpec) -> Recipe:
        """A row as it is on a set: with its settings and dials there, and its epochs if it starts from the encoder."""
        found = self.recipes[row]
        settings = {**found.settings, **spec.settings.get(row, {})}
        if found.start is None:
            settings = {"num_train_epochs": spec.epochs, **settings}
        return replace(found, settings=settings, dials=spec.dials.get(row, found.dials))

    def rows_on(self, spec: SetSpec, seed: int, model: str) -> list[str]:
        """The rows of a set in an order in which each can be made."""
        from stretto.methods import METHODS
        from stretto.tasks import TASKS

        names = [
            name
            for name, recipe in self.recipes.items()
            if (spec.rows is None or name in spec.rows or name == FULL_ROW)
            and METHODS[recipe.method].needs.met_by(TASKS[spec.task])
            and (recipe.seeds is None or seed in recipe.seeds)
            and (recipe.models is None or model in recipe.models)
        ]
        ordered: list[str] = []

        def place(name: str) -> None:
            recipe = self.recipes[name]
            for other in (recipe.start, recipe.weights_of):
                if other is not None and other in names and other not in ordered:
                    place(other)
            if name not in ordered:
                ordered.append(name)

        for name in names:
            place(name)
        return ordered
