"""One dial for a combination of two methods: the best pairs of their dials.

A grid of pairs is run on a sample of the dev texts. Each pair is judged by its cost and by how far its answers are from
the full model's: the mean divergence, which needs no labels and is smoother than accuracy on a few hundred texts (or by
its score, if asked, and where texts are written). The frontier has the pairs that no other pair beats in both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tqdm.auto import tqdm

from stretto.budget.choose import default_point
from stretto.budget.evolution import pareto_frontier
from stretto.budget.sweep import sweep
from stretto.budget.teacher import Objective, Teacher, check_labels, objective_for, sought
from stretto.data import Dataset, sample
from stretto.errors import StrettoError
from stretto.methods import Combined
from stretto.methods.base import Dial
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint

#: Dials tried of each part, and texts they are tried on.
FIRST_DIALS, SECOND_DIALS, TEXTS = 6, 8, 300


@dataclass(frozen=True)
class Pair:
    """A pair of dials with its measured cost and quality."""

    dials: tuple[float, float]
    cost: float
    score: float
    """What the search maximises (`teacher.sought`)."""


def spread(dial: Dial, count: int) -> list[float]:
    """Values of the sweep at even steps, off first."""
    steps = min(count, len(dial.sweep))
    if steps == 1:
        return list(dial.sweep)
    return [dial.sweep[round(step * (len(dial.sweep) - 1) / (steps - 1))] for step in range(steps)]


def search_pairs(
    model: AdaptiveModel, data: Dataset, *, objective: Objective | None = None, seed: int = 42, batch_size: int = 32,
    progress: bool = True,
) -> list[OperatingPoint]:  # fmt: skip
    """`set_frontier` on all of these examples, and what was found measured on them; sets the default dial."""
    set_frontier(model, data, objective=objective, texts=len(data), seed=seed, progress=progress)
    encoded = model.encode(data.texts)
    teacher = None if model.task.answers == "text" else Teacher(model, encoded, batch_size)
    points = sweep(model, data, batch_size=batch_size, progress=progress, encoded=encoded, teacher=teacher)
    model.operating_points = points
    model.dial = default_point(points, model.method.dial).dial
    return points


def set_frontier(
    model: AdaptiveModel, data: Dataset, *, objective: Objective | None = None, texts: int = TEXTS, seed: int = 42,
    progress: bool = True,
) -> None:  # fmt: skip
    """Give the model's combination the frontier found on a sample of `texts` of these examples; the default objective
    is that of `objective_for`."""
    method = model.method
    if not isinstance(method, Combined):
        raise StrettoError(
            f"Expected a combination such as length_adaptive+deebert, got {method.name}. Name two methods."
        )
    objective = objective_for(model, objective)
    check_labels(data, objective)
    data = sample(data, texts, seed)
    encoded = model.encode(data.texts)
    teacher = Teacher(model, encoded) if objective == "divergence" else None
    grid = [
        (first, second)
        for first in spread(method.first.dial, FIRST_DIALS)
        for second in spread(method.second.dial, SECOND_DIALS)
    ]
    found: list[Pair] = []
    for first, second in tqdm(grid, desc="combining dials", disable=not progress, leave=False):
        method.set_frontier([0.5], [[first, second]])  # the cheaper of two points
        (point,) = sweep(model, data, [0.5], progress=False, encoded=encoded, teacher=teacher)
        found.append(Pair((first, second), point.cost, sought(point, objective)))
    chosen = [pair for pair in pareto_frontier(found) if pair.cost < 1]
    if not chosen:
        method.set_frontier(method.config.costs, method.config.frontier)  # as it was
        raise StrettoError(
            "Expected texts on which a pair of dials saves something, got only pairs that cost as much as the full "
            "model. Search on longer texts."
        )
    costs, frontier = tuple(pair.cost for pair in chosen), tuple(pair.dials for pair in chosen)
    method.config = dataclasses.replace(method.config, costs=costs, frontier=frontier)
    method.set_frontier(costs, frontier)
