"""`stretto bench guarantee`: do guarantees hold, and what do they cost?

What every text loses and costs at every dial is recorded once. The texts stand for the source that a model meets: the
risk of a dial is what it loses on all of them. Then, many times:

- Calibration texts are drawn from that source, independently (with replacement), and a dial is chosen on them. The
  guarantee is broken if the risk of the dial is above what was allowed. With 95 % confidence that may happen in 5 % of
  the draws. If it happens more often than chance explains (at a level of 5 %), the guarantee is not valid.
- The texts are split at random in two. A dial is chosen on one part, and one looks at what it loses on the other. That
  is what a user can check. It is exceeded more often than the risk is, because the test part has its own error.

Three choosers are compared:

    guaranteed     as `stretto calibrate` does it: tests in a fixed order
    uncorrected    wrong on purpose: the cheapest dial that loses no more than allowed on the calibration texts
    oracle         the cheapest dial whose risk is no more than allowed (not known in practice)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.budget.calibrate import Guarantee, Material, check_dial
from stretto.budget.risk import Risk, in_order
from stretto.errors import StrettoError

SPLITS = 200
#: Level of the test whether too many splits broke the guarantee.
LEVEL = 0.05
#: Shares of the draws whose risk is written down.
QUANTILES = tuple(step / 20 for step in range(21))

Floats = NDArray[np.float64]
#: From the losses [dials, m] and costs [dials] of the calibration part to the place of a dial.
Chooser = Callable[[Floats, Floats], int]


@dataclass(frozen=True)
class Recorded:
    """What each of n texts loses and costs at each dial, the full model first."""

    losses: Floats
    """[dials, n]"""
    flops: Floats
    """[dials, n]"""
    full: Floats
    """[n] FLOPs of the full model."""

    def costs(self, texts: NDArray[np.int64]) -> Floats:
        """[dials] on some of the texts."""
        costs: Floats = self.flops[:, texts].sum(axis=1) / self.full[texts].sum()
        return costs


def record(material: Material, goals: Sequence[Guarantee]) -> list[Recorded]:
    """One for each goal, from one reading of the texts."""
    check_dial(material)
    readings = material.read(material.dials)
    first = next(readings)
    losses = [[goal.losses(material, first.answers, first.answers)] for goal in goals]
    flops = [first.cost.flops]
    for reading in readings:
        flops.append(reading.cost.flops)
        for goal, found in zip(goals, losses, strict=True):
            found.append(goal.losses(material, first.answers, reading.answers))
    spent = np.stack([each.double().numpy() for each in flops])
    return [Recorded(np.array(found), spent, first.cost.full.double().numpy()) for found in losses]


def guaranteed(risk: Risk) -> Chooser:
    """As `Guarantee.find`: the cheapest dial before the first failure; the full model if no other passes."""
    p_value = lru_cache(maxsize=None)(risk.p_value)

    def choose(losses: Floats, costs: Floats) -> int:
        tests = list(in_order(risk, enumerate(losses), p_value))
        return min(risk.safe([test.p_value for test in tests]), key=lambda place: costs[place], default=0)

    return choose


def uncorrected(risk: Risk) -> Chooser:
    """The cheapest dial that looks good enough: no confidence, no order."""

    def choose(losses: Floats, costs: Floats) -> int:
        good = np.flatnonzero(losses.mean(axis=1) <= risk.allowed)  # never empty: the full model loses nothing
        return int(good[np.argmin(costs[good])])

    return choose


def study(found: Recorded, risk: Risk, *, splits: int = SPLITS, part: float = 0.5, seed: int = 0) -> dict[str, Any]:
    """What the choosers' dials lose and cost, over random draws and splits (`part`: of the texts, for calibration)."""
    n = found.losses.shape[1]
    count, least = round(n * part), risk.examples_needed()
    if least is None or not least <= count < n:
        raise StrettoError(
            f"Expected at least {least} texts to calibrate on and some to test on, got {count} of {n}. "
            "Add texts, or allow more."
        )
    choosers = {"guaranteed": guaranteed(risk), "uncorrected": uncorrected(risk)}
    risks, costs = found.losses.mean(axis=1), found.costs(np.arange(n))  # [dials]
    chosen: dict[str, list[int]] = {name: [] for name in choosers}
    tested: dict[str, list[float]] = {name: [] for name in choosers}
    dice = np.random.default_rng(seed)
    for _ in range(splits):
        drawn, order = dice.integers(n, size=count), dice.permutation(n)
        calibration, test = order[:count], order[count:]
        for name, choose in choosers.items():
            chosen[name].append(choose(found.losses[:, drawn], found.costs(drawn)))
            place = choose(found.losses[:, calibration], found.costs(calibration))
            tested[name].append(float(found.losses[place, test].mean()))
    return {
        "allowed": risk.allowed, "confidence": risk.confidence, "splits": splits, "calibration": count,
        "test": n - count, "most_violations": most_violations(splits, risk.confidence),
        "oracle": {"cost": float(costs[uncorrected(risk)(found.losses, costs)])},
        **{
            name: {
                "violations": int((risks[places] > risk.allowed).sum()),
                "violations_on_test": sum(value > risk.allowed for value in tested[name]),
                "full_model": places.count(0),
                "cost": float(costs[places].mean()),
                "risk": float(risks[places].mean()),
                "quantiles": np.quantile(risks[places], QUANTILES).round(6).tolist(),
            }
            for name, places in chosen.items()
        },
    }  # fmt: skip


def most_violations(splits: int, confidence: float) -> int:
    """As many as a valid guarantee may have by chance; more are seen in less than `LEVEL` of the studies."""
    from scipy.stats import binom

    return int(binom.ppf(1 - LEVEL, splits, 1 - confidence))
