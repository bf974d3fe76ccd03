"""Choosing among operating points."""

from __future__ import annotations

import dataclasses
import math

import pytest

from stretto import OperatingPoint, StrettoError
from stretto.budget.choose import default_point, dials_to_show, how_chosen, saving, within_cost, within_loss
from stretto.methods.base import Dial
from stretto.saving.points import Certificate, Latency, budget_named


def point(dial: float, score: float, cost: float, **more: object) -> OperatingPoint:
    return OperatingPoint(dial, score, cost, 4.0, {"accuracy": score}, **more)  # type: ignore[arg-type]


POINTS = [
    point(0.0, 0.9, 1.01),
    point(0.1, 0.92, 0.8),
    point(0.2, 0.896, 0.6),
    point(0.3, 0.895, 0.4),
    point(0.4, 0.894, 0.2),
]


def test_by_cost_alone() -> None:
    assert within_cost(POINTS, 0.7) == POINTS[2]
    assert within_cost(POINTS, 0.6) == POINTS[2]
    assert within_cost(POINTS, 0.1) is None


def test_by_loss_against_the_first() -> None:
    assert within_loss(POINTS) == POINTS[3]  # half a point, and no rounding error beyond it
    assert within_loss(POINTS, 0.0) == POINTS[1]
    assert within_loss(POINTS, 1.0) == POINTS[4]
    unmeasured = point(0.5, math.nan, 0.1)
    assert within_loss([*POINTS, unmeasured], 100) == POINTS[4]


def test_the_default_is_compared_with_what_was_trained() -> None:
    dial = Dial("entropy", "", 0.0, tuple(p.dial for p in POINTS))
    assert default_point(POINTS, dial) == POINTS[3]
    trained = Dial("entropy", "", 0.0, tuple(p.dial for p in POINTS), trained=0.1)
    assert default_point(POINTS, trained) == POINTS[1]


@pytest.mark.parametrize(("n", "chosen"), [(0, 3), (30, 0), (199, 0), (200, 3), (5000, 3)])
def test_few_examples_choose_no_dial(n: int, chosen: int) -> None:
    """One of 199 examples is more than half a point."""
    points = [dataclasses.replace(each, n=n) for each in POINTS]
    dial = Dial("entropy", "", 0.0, tuple(p.dial for p in POINTS))
    assert default_point(points, dial) == points[chosen]
    reason = "the cheapest at most half a point" if chosen else f"the full model: too few examples ({n}) to show a loss"
    assert reason in how_chosen(points, points[chosen], dial)
    assert chosen or "200 are enough" in how_chosen(points, points[chosen], dial)


def test_few_examples_keep_what_was_trained() -> None:
    points = [dataclasses.replace(each, n=30) for each in POINTS]
    dial = Dial("entropy", "", 0.0, tuple(p.dial for p in POINTS), trained=0.1)
    assert default_point(points, dial) == points[1]
    assert how_chosen(points, points[1], dial).startswith("what was trained: too few examples (30)")
    assert how_chosen(POINTS, POINTS[1], dial) == "the cheapest at most half a point below what was trained"


def test_a_guarantee_comes_first() -> None:
    points = [dataclasses.replace(each, n=30) for each in POINTS]
    certificate = Certificate("right answers lost", 0.01, 0.95, 0.002, ((0.0, 1e-9),), 42, {})
    guaranteed = dataclasses.replace(points[1], certificate=certificate)
    dial = Dial("entropy", "", 0.0, tuple(p.dial for p in POINTS))
    assert default_point(points, dial, guaranteed) is guaranteed
    assert how_chosen(points, guaranteed, dial) == "the cheapest that is guaranteed to lose at most 1 %"


def test_dials_worth_showing() -> None:
    assert dials_to_show(POINTS, 0.1) == [0.1, 0.2, 0.3, 0.4]  # costs .75, .5, .35, the most expensive first
    assert dials_to_show([], 0.3) == [0.3]


def test_a_checkpoint_is_kept_for_its_saving_only_while_it_loses_little() -> None:
    """Cheap but bad is worse than expensive and good; among good ones the cheapest; among bad ones the best."""
    good, better = saving(0.895, 0.5, 0.9), saving(0.891, 0.4, 0.9)
    bad, worse = saving(0.85, 0.1, 0.9), saving(0.8, 0.05, 0.9)
    assert worse < bad < good < better
    assert bad == pytest.approx(-0.05) and good == pytest.approx(0.5)


def test_budgets_by_name_and_dtype() -> None:
    fast, fast8 = point(0.3, 0.9, 0.4, name="fast"), point(0.2, 0.9, 0.5, name="fast", dtype="int8")
    points = [*POINTS, fast, fast8]
    assert budget_named(points, "fast", "float32") is fast
    assert budget_named(points, "fast", "int8") is fast8
    with pytest.raises(StrettoError, match=r"a budget 'fast' for int8, got one for float32\. Use it with that dtype"):
        budget_named([*POINTS, fast], "fast", "int8")
    with pytest.raises(StrettoError, match=r"\('fast'\), got 'slow'\. `stretto calibrate` adds budgets"):
        budget_named(points, "slow", "float32")
    with pytest.raises(StrettoError, match=r"\(no budgets at all\), got ''"):
        budget_named(POINTS, "", "float32")


def test_points_survive_json() -> None:
    tests = ((0.0, 1e-9), (0.1, 0.03))
    certificate = Certificate("right answers lost", 0.01, 0.95, 0.002, tests, 42, {"torch": "2", "x": None})
    full = point(
        0.1, math.nan, 0.5, name="fast", n=300, data="ab", dials=(0.1, 0.2), latency=Latency(20, 8, 95, "some"),
        certificate=certificate,
    )  # fmt: skip
    for each in (POINTS[0], full):
        assert OperatingPoint.from_json(each.to_json()) == each
    assert set(POINTS[0].to_json()) == {"dial", "score", "cost", "depth", "metrics"}
    assert full.to_json()["score"] is None
