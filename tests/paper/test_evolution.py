"""The operators of the evolutionary search: hand-computed numbers, and what must hold for any numbers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.budget.evolution import (
    LEAST,
    Lengths,
    area,
    constant_ratio,
    cross,
    mutate,
    offspring,
    pareto_frontier,
    rounded,
    start_population,
)
from stretto.methods.length_adaptive import constant_ratio_lengths, nominal_cost


@dataclass(frozen=True)
class P:
    cost: float
    score: float


class Dice(random.Random):
    """Always mutates where `hits` says so, and always draws the given part of the range."""

    def __init__(self, hits: list[bool], part: float) -> None:
        super().__init__()
        self.hits, self.part, self.ranges = iter(hits), part, []

    def random(self) -> float:
        return 0.0 if next(self.hits) else 1.0

    def uniform(self, a: float, b: float) -> float:
        self.ranges.append((a, b))
        return a + self.part * (b - a)


ANY = st.lists(st.floats(LEAST, 1), min_size=1, max_size=12).map(lambda x: rounded(sorted(x, reverse=True)))
POINTS = st.lists(st.builds(P, st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=30)


def falls(lengths: Lengths) -> bool:
    return all(before >= after for before, after in itertools.pairwise((1.0, *lengths)))


# ---- by hand -----------------------------------------------------------------------------------------------


def test_mutation_draws_between_the_next_old_and_the_previous_new_length() -> None:
    dice = Dice([True, False, True], 0.5)
    # layer 1: U(0.6, 1) -> 0.8; layer 2 stays 0.6; layer 3: U(0.1, 0.6) -> 0.35
    assert mutate((0.9, 0.6, 0.2), 0.5, 0.1, dice) == (0.8, 0.6, 0.35)
    assert dice.ranges == [(0.6, 1.0), (0.1, 0.6)]
    dice = Dice([True, True, True], 0.0)
    # layer 2's upper bound is layer 1's new length, its lower one layer 3's old length
    assert mutate((0.9, 0.6, 0.2), 0.5, 0.1, dice) == (0.6, 0.2, 0.1)
    assert dice.ranges == [(0.6, 1.0), (0.2, 0.6), (0.1, 0.2)]


def test_crossover_is_the_mean() -> None:
    assert cross((1.0, 0.5, 0.2), (0.8, 0.4, 0.4)) == (0.9, 0.45, 0.3)


def test_the_frontier_by_hand() -> None:
    points = [P(0.5, 0.8), P(0.4, 0.8), P(1.0, 0.9), P(0.6, 0.7), P(0.4, 0.8), P(0.2, 0.5), P(0.9, 0.9)]
    assert pareto_frontier(points) == [P(0.9, 0.9), P(0.4, 0.8), P(0.2, 0.5)]
    assert pareto_frontier(points)[1] is points[1]  # of equals the first


def test_the_area_by_hand() -> None:
    # budgets 0.2…0.5 afford 0.6, 0.5…1 afford 0.9: (0.3 · 0.6 + 0.5 · 0.9) / 0.8
    assert area([P(0.2, 0.6), P(0.5, 0.9)], low=0.2) == pytest.approx(0.63 / 0.8)
    # below the first point nothing is afforded; a point cheaper than `low` counts from `low` on
    assert area([P(0.5, 0.8)], low=0.0) == pytest.approx(0.4)
    assert area([P(0.1, 0.6), P(0.5, 0.9)], low=0.3) == pytest.approx((0.2 * 0.6 + 0.5 * 0.9) / 0.7)
    assert area([P(1.0, 0.9)], low=1.0) == 0.9


def test_the_start_is_evenly_spread_in_cost() -> None:
    start = start_population(9, 0.8, 12)
    assert start[0] == (1.0,) * 12
    assert start[-1] == constant_ratio(0.8, 12) == rounded(constant_ratio_lengths(0.8, 12).tolist())
    costs = [float(nominal_cost(constant_ratio_lengths(lengths[0], 12))) for lengths in start]
    steps = [before - after for before, after in itertools.pairwise(costs)]
    assert max(steps) == pytest.approx(min(steps), abs=0.01)


def test_offspring_are_new_and_the_attempts_end() -> None:
    dice = random.Random(0)
    parents = [(1.0, 0.5), (0.8, 0.2)]
    options = {"probability": 0.5, "floor": 0.1, "attempts": 5, "dice": dice}
    children = offspring(parents, set(parents), mutations=6, crossovers=6, **options)  # type: ignore[arg-type]
    assert len(children) == len(set(children)) == 7  # of two parents there is one crossover
    assert not set(children) & set(parents)
    alone = [(LEAST, LEAST)]
    stuck = {"probability": 1e-12, "floor": LEAST, "attempts": 5, "dice": dice}
    assert offspring(alone, set(alone), mutations=4, crossovers=4, **stuck) == []  # type: ignore[arg-type]


# ---- for any numbers ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(ANY, st.floats(0.01, 1), st.floats(LEAST, 0.2), st.integers())
def test_mutants_never_rise_and_stay_within_bounds(lengths: Lengths, p: float, floor: float, seed: int) -> None:
    child = mutate(lengths, p, floor, random.Random(seed))
    assert falls(child)
    assert min(child) >= min(min(lengths), rounded([floor])[0])
    assert len(child) == len(lengths)


@settings(deadline=None)
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(*[st.lists(st.floats(LEAST, 1), min_size=n, max_size=n)] * 2)))
def test_crossovers_never_rise_and_lie_between(parents: tuple[list[float], list[float]]) -> None:
    one, other = (rounded(sorted(parent, reverse=True)) for parent in parents)
    child = cross(one, other)
    assert falls(child)
    assert all(min(a, b) <= c <= max(a, b) for a, b, c in zip(one, other, child, strict=True))


@settings(deadline=None)
@given(POINTS, POINTS)
def test_frontiers(points: list[P], more: list[P]) -> None:
    frontier = pareto_frontier(points)
    for a, b in itertools.pairwise(frontier):
        assert a.cost > b.cost and a.score > b.score
    for point in points:  # everything is matched or beaten by a member
        assert any(best.cost <= point.cost and best.score >= point.score for best in frontier)
    assert pareto_frontier(frontier) == frontier
    low = min(point.cost for point in points)
    assert area(frontier, low) == area(points, low)
    assert area([*points, *more], low) >= area(points, low) - 1e-12
    assert area(points, low) <= max(point.score for point in points) + 1e-12
