"""Guarantees: which dials are safe, with a given confidence, on data like the calibration data.

Each example has a loss in [0, 1] at each dial. A dial is safe if its expected loss, the risk, is at most what was
allowed. Dials are tested one after the other, from the full model to the cheapest, an order that is fixed before any
data are read, each by a Hoeffding–Bentkus p-value (for losses of 0 and 1: the exact binomial tail). The first test that
fails ends the sequence, so that the probability of calling any unsafe dial safe is at most 1 - confidence, however many
were tested.

Angelopoulos, Bates, Candès, Jordan, Lei: *Learn then Test: Calibrating Predictive Algorithms to Achieve Risk Control*,
2021. The functions are mapie's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import util

import numpy as np

from stretto.errors import StrettoError

#: What to do where there are no functions for guarantees.
INSTALL = "Run `pip install 'stretto[calibrate]'` (mapie), which computes guarantees"
#: Larger numbers of examples are not considered.
MOST = 2**24


@dataclass(frozen=True)
class Risk:
    """The allowed average loss, and the confidence."""

    allowed: float
    """Expected loss per example, in (0, 1)."""
    confidence: float
    binary: bool
    """Whether the loss of an example is 0 or 1, never between."""

    def __post_init__(self) -> None:
        if not 0 < self.allowed < 1 or not 0 < self.confidence < 1:
            raise StrettoError(
                f"Expected an allowed loss and a confidence strictly between 0 and 1, got {self.allowed:g} and "
                f"{self.confidence:g}. Write --max-loss 1 (points of 100) or --agreement 0.98, and --confidence 0.95."
            )

    def p_value(self, loss: float, n: int) -> float:
        """The probability of an average loss this small on `n` examples if the risk were above what is allowed."""
        require_mapie()
        from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

        # n · (k / n) may come out just above k, and would be rounded up to k + 1
        below = np.array([loss * (1 - 1e-12)])
        return float(compute_hoeffding_bentkus_p_value(below, n, self.allowed, binary=self.binary)[0, 0])

    def safe(self, p_values: Sequence[float]) -> list[int]:
        """Which tests of a sequence pass: all before the first that fails."""
        require_mapie()
        from mapie.risk_control import control_fwer

        return [int(i) for i in control_fwer(np.array(p_values), 1 - self.confidence, "fixed_sequence")]

    def examples_needed(self, loss: float = 0.0) -> int | None:
        """How many examples with this average loss pass the test; None if no number does (or more than millions)."""
        if loss >= self.allowed:
            return None
        many = 1
        while self.p_value(loss, many) > 1 - self.confidence:
            many *= 2
            if many > MOST:
                return None
        few = many // 2
        while many - few > 1:  # passes at `many`, fails at `few`
            middle = (few + many) // 2
            few, many = (few, middle) if self.p_value(loss, middle) <= 1 - self.confidence else (middle, many)
        return many


@dataclass(frozen=True)
class Tested:
    """A dial, the average loss at it, and the p-value of its test."""

    dial: float
    loss: float
    p_value: float


def in_order(
    risk: Risk, losses: Iterable[tuple[float, Sequence[float]]], p_value: Callable[[float, int], float] | None = None
) -> Iterator[Tested]:
    """Test dials in their order, and end with the first that fails. Losses of later dials are not asked for.

    Who tests many times may pass a `risk.p_value` that remembers what it has computed."""
    p_value = p_value or risk.p_value
    for dial, each in losses:
        tested = Tested(dial, float(np.mean(each)), p_value(float(np.mean(each)), len(each)))
        yield tested
        if tested.p_value > 1 - risk.confidence:
            return


def have_mapie() -> bool:
    return util.find_spec("mapie") is not None


def require_mapie() -> None:
    if not have_mapie():
        raise StrettoError(f"Expected the package mapie, got none. {INSTALL}, or calibrate to a --cost or a latency.")
