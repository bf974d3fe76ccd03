"""The evolutionary search for lengths: which fraction of its tokens each layer of a Length-Adaptive model keeps.

    start:  constant-ratio configurations, evenly spread in FLOPs        -> `evolution.start_population`
    repeat: the Pareto frontier (divergence or score, and cost) has children:
            n_m mutants and n_c crossovers                               -> `evolution.mutate`, `evolution.cross`
            all are measured; the new frontier is kept                   -> `evolution.pareto_frontier`

Every candidate is run on the packed engine: divergence from the full model, score and cost are measured, not estimated.

Kim, Cho: *Length-Adaptive Transformer: Train Once with Length Drop, Use Anytime with Search*, ACL 2021, section 3.2.

Differs from the paper: the best configuration at a cost is the one closest to the full model (`objective="score"`: the
one with the best score, as published), so labels are not needed; configurations are fractions of the input's length;
none is measured twice; the search stops early when the area under the frontier has grown by less than `LEAST_GROWTH`
over the last `patience` iterations.

A killed search can be resumed: each measurement is stored next to the model, and all random choices follow from the
seed and the number of the iteration. The result is that of an uninterrupted search.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from stretto.budget.choose import default_point
from stretto.budget.evolution import Lengths, area, constant_ratio, offspring, pareto_frontier, start_population
from stretto.budget.per_input import fit_per_input
from stretto.budget.sweep import sweep
from stretto.budget.teacher import Objective, Teacher, check_comparable, check_labels, objective_for, sought
from stretto.data import Dataset, by_length, sample
from stretto.data.tokenise import Encoded
from stretto.errors import StrettoError, counted
from stretto.methods.length_adaptive import FixedLengths, LengthAdaptive
from stretto.saving.digests import dataset_digest, weights_digest
from stretto.saving.folder import check_place
from stretto.saving.journal import Journal
from stretto.saving.place import locked
from stretto.saving.points import OperatingPoint
from stretto.saving.same_run import digest

if TYPE_CHECKING:
    from stretto.model import AdaptiveModel

#: The search stops when `patience` iterations together add less than this to the area (a mean score in [0, 1], or minus
#: a mean divergence).
LEAST_GROWTH = 1e-4
#: Tries per child to find a configuration that is new.
ATTEMPTS = 20


@dataclass(frozen=True)
class SearchSettings:
    iterations: int = 30
    """G: most iterations."""
    mutations: int = 30
    """n_m: mutants per iteration."""
    crossovers: int = 30
    """n_c: crossovers per iteration."""
    probability: float = 0.5
    """p_m: probability with which a mutant's layer changes."""
    population: int = 20
    """Constant-ratio configurations to start from."""
    patience: int = 5
    """Iterations with (almost) no growth of the area after which the search stops."""
    limit: int | None = None
    """Measure candidates on a random sample of this many examples; the result is measured on all."""
    seed: int = 42
    """Seed of everything random."""
    objective: Objective | None = None
    """What is best at a cost: the least mean 'divergence' from the full model's answers, or the best 'score'. Default:
    divergence; for a model that writes texts score, as texts have no divergence."""

    def __post_init__(self) -> None:
        fits = (
            min(self.iterations, self.patience) >= 1
            and min(self.mutations, self.crossovers) >= 0
            and self.population >= 2
            and 0 < self.probability <= 1
            and (self.limit is None or self.limit >= 1)
        )
        if not fits:
            raise StrettoError(
                "Expected at least 1 iteration, 1 of patience, a population of 2, no negative counts, a probability "
                f"in (0, 1] and a limit of 1 or more, got {self}. Correct the settings."
            )


@dataclass(frozen=True)
class Candidate:
    """A configuration with its measured point, whose dial is its cost."""

    lengths: Lengths
    point: OperatingPoint
    score: float
    """What the search maximises (`teacher.sought`)."""

    @property
    def cost(self) -> float:
        return self.point.cost


@dataclass(frozen=True)
class Iteration:
    """The state of the search after an iteration; number 0 is the start."""

    number: int
    tried: int
    """Configurations measured so far."""
    frontier: list[Candidate]
    """From expensive to cheap."""
    area: float
    """See `evolution.area`, of what is sought; budgets from that of the smallest constant-ratio configuration to the
    full model's."""


@dataclass(frozen=True)
class SearchResult:
    iterations: list[Iteration]
    points: list[OperatingPoint]
    """The full model and the configurations found, measured on all examples."""
    examples: int
    """Examples that candidates were measured on."""
    finished: bool
    """False if the time limit was reached; the same search resumes then."""


def search(
    model: AdaptiveModel,
    data: Dataset,
    output: str | Path,
    settings: SearchSettings | None = None,
    *,
    batch_size: int = 32,
    max_seconds: float | None = None,
    per_input: bool = False,
    progress: bool = True,
) -> SearchResult:
    """Search, set the configurations found, and save the model to `output`, its own folder or another. Labels are only
    needed for the objective 'score', the only one for a model that writes texts.

    `per_input` then fits a predictor that chooses a configuration for each text. `OUTPUT.search` keeps the measurements
    until the search is finished."""
    settings = settings or SearchSettings()
    method = searchable(model)
    objective = objective_for(model, settings.objective)
    settings = dataclasses.replace(settings, objective=objective)
    check_labels(data, objective)
    if per_input:
        check_comparable(model)
    check_place(Path(output))
    until = float("inf") if max_seconds is None else time.monotonic() + max_seconds
    examples = data if settings.limit is None else sample(data, settings.limit, settings.seed)
    prepared = Prepared.of(model, examples, batch_size, objective)
    ratio = 1 - method.config.length_drop
    n_layers = model.backbone.n_layers
    iterations: list[Iteration] = []
    most = settings.population + settings.iterations * (settings.mutations + settings.crossovers)
    with (
        locked(output),
        Journal(Path(f"{output}.search"), plan_of(model, examples, settings, batch_size)) as journal,
        tqdm(total=most, unit=" configurations", disable=not progress, leave=False) as bar,
    ):

        def evaluate(lengths: Lengths) -> Candidate:
            found = journal.get(lengths)
            point = measure_lengths(model, prepared, lengths) if found is None else OperatingPoint.from_json(found)
            if found is None:
                journal.add(lengths, point.to_json())
            bar.update()
            return Candidate(lengths, point, sought(point, objective))

        start = start_population(settings.population, ratio, n_layers)
        floor = constant_ratio(ratio, n_layers)[-1]
        for iteration in evolve(evaluate, start, floor, settings, lambda: time.monotonic() >= until):
            iterations.append(iteration)
            bar.set_description(f"iteration {iteration.number}, area {iteration.area:.4f}")
        finished = time.monotonic() < until
        found = iterations[-1].frontier
        full = evaluate(start[0])
        if len(examples) < len(data):
            everything = Prepared.of(model, data, batch_size, objective)
            full, *found = [
                Candidate(each.lengths, point, sought(point, objective))
                for each in tqdm([full, *found], desc="measuring", disable=not progress, leave=False)
                for point in [measure_lengths(model, everything, each.lengths)]
            ]
        points = adopt(model, full, found)
        if per_input:
            points = fit_per_input(model, data, batch_size=batch_size, progress=progress)
        result = SearchResult(iterations, points, len(examples), finished)
        model.provenance = {
            **model.provenance,
            **provenance(result, len(data), settings),
            "plan": digest(journal.plan),
        }
        model.save_pretrained(output)
        if finished:
            journal.remove()
    return result


def searchable(model: AdaptiveModel) -> LengthAdaptive:
    if not isinstance(model.method, LengthAdaptive):
        raise StrettoError(
            f"Expected a model of the method length_adaptive, got one of {model.method.name}. "
            "Train with --method length_adaptive: only such a model works at any length."
        )
    return model.method


def evolve(
    evaluate: Callable[[Lengths], Candidate],
    start: list[Lengths],
    floor: float,
    settings: SearchSettings,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Iteration]:
    """The search itself. `start` is always measured completely; `stop` may end an iteration early."""
    seen = set(start)
    frontier = [evaluate(lengths) for lengths in start]
    tried, low = len(start), min(candidate.cost for candidate in frontier)
    frontier = pareto_frontier(frontier)
    areas = [area(frontier, low)]
    yield Iteration(0, tried, frontier, areas[-1])
    for number in range(1, settings.iterations + 1):
        children = offspring(
            [candidate.lengths for candidate in frontier], seen, mutations=settings.mutations,
            crossovers=settings.crossovers, probability=settings.probability, floor=floor, attempts=ATTEMPTS,
            dice=random.Random(f"{settings.seed}/{number}"),
        )  # fmt: skip
        # `seen` has what was proposed, not what an earlier run measured: so a resumed search proposes the same
        seen.update(children)
        born = []
        for child in children:
            if stop():
                break
            born.append(evaluate(child))
        if not born:  # no new configuration, or no time left
            return
        tried += len(born)
        frontier = pareto_frontier([*frontier, *born])
        areas.append(area(frontier, low))
        yield Iteration(number, tried, frontier, areas[-1])
        if stop() or (number >= settings.patience and areas[-1] - areas[-1 - settings.patience] < LEAST_GROWTH):
            return


@dataclass(frozen=True)
class Prepared:
    """Data that is tokenised once and measured often."""

    data: Dataset
    encoded: Encoded
    batch_size: int
    teacher: Teacher | None
    """None: its answers are not compared with."""

    @classmethod
    def of(cls, model: AdaptiveModel, data: Dataset, batch_size: int, objective: Objective = "divergence") -> Prepared:
        ordered = by_length(data)
        encoded = model.encode(ordered.texts)
        teacher = Teacher(model, encoded, batch_size) if objective == "divergence" else None
        return cls(ordered, encoded, batch_size, teacher)


def measure_lengths(model: AdaptiveModel, ready: Prepared, lengths: Lengths) -> OperatingPoint:
    """Run and measure a configuration; its cost becomes its dial."""
    (point,) = sweep(
        model, ready.data, [model.method.dial.off], batch_size=ready.batch_size, progress=False,
        encoded=ready.encoded, context=FixedLengths(torch.tensor(lengths, dtype=torch.float64)), teacher=ready.teacher,
    )  # fmt: skip
    return dataclasses.replace(point, dial=point.cost)


def adopt(model: AdaptiveModel, full: Candidate, found: list[Candidate]) -> list[OperatingPoint]:
    """Set the configurations found, their points, and a default dial."""
    frontier = [candidate for candidate in pareto_frontier(found) if candidate.cost < 1]
    if not frontier:
        raise StrettoError(
            "Expected texts that can be shortened, got only configurations that cost as much as the full model. "
            "Search on longer texts."
        )
    model.method = searchable(model).changed(
        costs=tuple(candidate.cost for candidate in frontier),
        frontier=tuple(candidate.lengths for candidate in frontier),
        prices=(),
        price_costs=(),
    )
    points = [dataclasses.replace(full.point, dial=model.method.dial.off), *(each.point for each in frontier)]
    model.operating_points = points
    model.dial = default_point(points, model.method.dial).dial
    return points


def plan_of(model: AdaptiveModel, data: Dataset, settings: SearchSettings, batch_size: int) -> dict[str, Any]:
    """What must be equal when a search is resumed. Limits on its length are not part of it."""
    free = ("iterations", "patience")
    return {
        "model": weights_digest(model.encoder),
        "data": dataset_digest(data),
        "settings": {name: value for name, value in dataclasses.asdict(settings).items() if name not in free},
        "length drop": searchable(model).config.length_drop,
        "select": searchable(model).config.select,
        "batch size": batch_size,
        "dtype": model.dtype,
    }


def provenance(result: SearchResult, examples: int, settings: SearchSettings) -> dict[str, Any]:
    """The model card's lines about the search."""
    first, last = result.iterations[0], result.iterations[-1]
    return {
        "search": (
            f"{counted(last.number, 'iteration')}, {counted(last.tried, 'configuration')} on "
            f"{counted(result.examples, 'example')} by {settings.objective}, seed {settings.seed}, "
            f"area {first.area:.4f} → {last.area:.4f}"
        ),
        "operating points": (
            f"measured on the data of the search ({counted(examples, 'example')}); expect slightly less on others"
        ),
    }
