"""Choosing among operating points: the dial of a model, and the checkpoint of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from stretto.methods.base import Dial
from stretto.saving.points import OperatingPoint

#: How many points of dev score the default dial may lose against the full model.
DEFAULT_LOSS = 0.5
#: The fewest examples that can show a difference of `DEFAULT_LOSS`: with fewer, one example is more than that.
FEWEST = round(100 / DEFAULT_LOSS)
#: How much dev score a checkpoint chosen for its low cost may lose.
SAVING_LOSS = 0.01
#: Costs that a table of dials shows.
COSTS = (0.75, 0.5, 0.35)


class Priced(Protocol):
    """Anything that has a cost."""

    @property
    def cost(self) -> float: ...


AnyPriced = TypeVar("AnyPriced", bound=Priced)


def at_dial(points: Sequence[OperatingPoint], dial: float) -> OperatingPoint | None:
    """The point that was measured at this dial, or None."""
    return next((point for point in points if point.dial == dial), None)


def within_cost(points: Sequence[AnyPriced], cost: float) -> AnyPriced | None:
    """The most expensive point that costs at most this, or None. Looks at costs only, never at scores."""
    affordable = [point for point in points if point.cost <= cost]
    return max(affordable, key=lambda point: point.cost, default=None)


def within_loss(points: Sequence[OperatingPoint], loss: float = DEFAULT_LOSS) -> OperatingPoint:
    """The cheapest point at most `loss` points (of 100) below the first, which is the full model."""
    good = [point for point in points if 100 * quality(point) >= 100 * quality(points[0]) - loss]
    return min(good, key=lambda point: point.cost, default=points[0])


def quality(point: OperatingPoint) -> float:
    """The score; if there were no labels, how many answers are the full model's, which bounds what is lost."""
    return point.metrics.get("agreement", math.nan) if math.isnan(point.score) else point.score


def default_point(
    points: Sequence[OperatingPoint], dial: Dial, guaranteed: OperatingPoint | None = None
) -> OperatingPoint:
    """The default of a model just trained or searched, by the first of three rules that applies:

    1. a guarantee was given: the point that has it;
    2. too few examples: the model stays as it was trained, the full model in most cases;
    3. an estimate: the cheapest point at most `DEFAULT_LOSS` below the full model. Where off was not trained, points
       are compared with what was."""
    if guaranteed is not None:
        return guaranteed
    first = 0 if dial.trained is None else dial.sweep.index(dial.trained)
    return points[first] if too_few(points) else within_loss(points[first:])


def too_few(points: Sequence[OperatingPoint]) -> bool:
    """Whether the points were measured on too few examples to show `DEFAULT_LOSS` (0: unknown)."""
    return 0 < points[0].n < FEWEST


def how_chosen(points: Sequence[OperatingPoint], chosen: OperatingPoint, dial: Dial) -> str:
    """Why the default dial is what it is, in words: the rule of `default_point` that applied."""
    n, start = points[0].n, "the full model" if dial.trained is None else "what was trained"
    if chosen.certificate is not None:
        return f"the cheapest that is guaranteed to lose at most {100 * chosen.certificate.risk:g} %"
    if too_few(points):
        return (
            f"{start}: too few examples ({n}) to show a loss of half a point (one is {100 / n:.1f} points), "
            f"{FEWEST} are enough"
        )
    return f"the cheapest at most half a point below {start}"


def dials_to_show(points: Sequence[OperatingPoint], default: float, costs: Sequence[float] = COSTS) -> list[float]:
    """The default dial and those that meet some costs; the most expensive first."""
    affordable = [within_cost(points, cost) for cost in costs]
    chosen = {default, *(point.dial for point in affordable if point is not None)}
    cost = {point.dial: point.cost for point in points}
    return sorted(chosen, key=lambda dial: cost.get(dial, 1.0), reverse=True)


def saving(score: float, cost: float, start_score: float) -> float:
    """The rank of a checkpoint, higher is better: among scores at most `SAVING_LOSS` below the start the cheapest,
    else the best score."""
    loss = start_score - score
    return 1 - cost if loss <= SAVING_LOSS else -loss
