"""The operators of the evolutionary search: pure functions of configurations and measured points.

A configuration says for each layer which fraction of the input's tokens it keeps; fractions never rise from layer to
layer. They are rounded to thousandths, so that a repeated configuration is recognised.

Kim, Cho: *Length-Adaptive Transformer*, ACL 2021, section 3.2.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from stretto.methods.length_adaptive import constant_ratio_lengths, nominal_cost

#: [L] fractions, from the first layer to the last.
Lengths = tuple[float, ...]
DIGITS = 3
LEAST = 10**-DIGITS


class Measured(Protocol):
    @property
    def score(self) -> float: ...
    @property
    def cost(self) -> float: ...


Point = TypeVar("Point", bound=Measured)


def start_population(count: int, ratio: float, n_layers: int) -> list[Lengths]:
    """`count` constant-ratio configurations, from full to `ratio`, evenly spread in (nominal) FLOPs."""
    cheapest = _nominal(ratio, n_layers)
    targets = [1 - (1 - cheapest) * step / (count - 1) for step in range(count)]
    ratios = [1.0, *(_ratio_for(target, ratio, n_layers) for target in targets[1:-1]), ratio]
    return list(dict.fromkeys(constant_ratio(each, n_layers) for each in ratios))


def constant_ratio(ratio: float, n_layers: int) -> Lengths:
    """Every layer keeps `ratio` of what it gets."""
    return rounded(constant_ratio_lengths(ratio, n_layers).tolist())


def _ratio_for(cost: float, low: float, n_layers: int) -> float:
    """The constant ratio of this nominal cost, by bisection: cost rises with the ratio."""
    high = 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _nominal(middle, n_layers) < cost else (low, middle)
    return (low + high) / 2


def _nominal(ratio: float, n_layers: int) -> float:
    return float(nominal_cost(constant_ratio_lengths(ratio, n_layers)))


def rounded(lengths: Iterable[float]) -> Lengths:
    """To thousandths, and never to 0. Rounding keeps the order of lengths."""
    return tuple(max(round(length, DIGITS), LEAST) for length in lengths)


def mutate(lengths: Lengths, probability: float, floor: float, dice: random.Random) -> Lengths:
    """Sweep from the first layer to the last; resample each with `probability`, uniformly between the next layer's
    old length (for the last one `floor`) and the previous layer's new one."""
    mutated: list[float] = []
    for old, below in zip(lengths, (*lengths[1:], min(floor, lengths[-1])), strict=True):
        above = mutated[-1] if mutated else 1.0
        mutated.append(dice.uniform(below, above) if dice.random() < probability else old)
    return rounded(mutated)


def cross(one: Lengths, other: Lengths) -> Lengths:
    """The mean, layer by layer."""
    return rounded((a + b) / 2 for a, b in zip(one, other, strict=True))


def pareto_frontier(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats, from expensive to cheap: cost and score fall strictly. Of equals the first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.cost, -point.score)):
        if not best or point.score > best[-1].score:
            best.append(point)
    return best[::-1]


def area(points: Iterable[Measured], low: float) -> float:
    """The area under the frontier: the best score that a budget affords, averaged over budgets from `low` to 1.

    A budget below all points scores 0. A frontier that gains points never loses area."""
    frontier = pareto_frontier(points)[::-1]
    if low >= 1:
        return frontier[-1].score
    until = [point.cost for point in frontier[1:]] + [1.0]
    widths = [max(0.0, end - max(point.cost, low)) for point, end in zip(frontier, until, strict=True)]
    return sum(width * point.score for width, point in zip(widths, frontier, strict=True)) / (1 - low)


def offspring(
    parents: Sequence[Lengths],
    seen: set[Lengths],
    *,
    mutations: int,
    crossovers: int,
    probability: float,
    floor: float,
    attempts: int,
    dice: random.Random,
) -> list[Lengths]:
    """New configurations, none of them in `seen`; fewer than asked for if `attempts` per child do not find any."""
    children: dict[Lengths, None] = {}

    def breed(wanted: int, make: Sequence[Lengths], crossing: bool) -> None:
        born = 0
        for _ in range(attempts * wanted):
            if born == wanted:
                return
            child = cross(*dice.sample(make, 2)) if crossing else mutate(dice.choice(make), probability, floor, dice)
            if child not in seen and child not in children:
                children[child] = None
                born += 1

    breed(mutations, parents, crossing=False)
    if len(parents) > 1:
        breed(crossovers, parents, crossing=True)
    return list(children)
