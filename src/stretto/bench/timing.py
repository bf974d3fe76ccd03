"""Timing contenders against each other in one process: interleaved rounds in random order, medians of ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Step = Callable[[], object]

IDLE_SECONDS = 0.05  # lets the threads of the library before fall asleep


@dataclass(frozen=True)
class Contender:
    """One way to do a pool of batches."""

    name: str
    dtype: str
    steps: Sequence[Step]
    """One call per batch."""
    flops: float
    """Of the whole pool."""
    library: str = "torch"

    def seconds(self) -> float:
        start = time.perf_counter()
        for step in self.steps:
            step()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Timed:
    """A contender and what was measured."""

    contender: Contender
    times: list[float]
    """Seconds for the whole pool, one per round."""

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def ratio(slow: Timed, fast: Timed) -> float:
    """How many times faster: the median over the rounds, because in one round both meet the same machine."""
    return statistics.median(a / b for a, b in zip(slow.times, fast.times, strict=True))


def interleaved(
    contenders: Sequence[Contender],
    rounds: int,
    rng: random.Random,
    after_round: Callable[[], object] = lambda: None,
) -> list[Timed]:
    """Time every contender once per round.

    The order is random, but the contenders of one library follow each other: when the library changes there is an
    idle gap and an untimed batch, because threads that still spin would slow down the next library's first calls."""
    times: list[list[float]] = [[] for _ in contenders]
    before = ""
    for number in range(rounds):
        for index in shuffled(contenders, rng):
            contender = contenders[index]
            if contender.library != before:
                time.sleep(IDLE_SECONDS)
            if number == 0 or contender.library != before:
                contender.steps[0]()
            times[index].append(contender.seconds())
            before = contender.library
        after_round()
    return [Timed(contender, measured) for contender, measured in zip(contenders, times, strict=True)]


def shuffled(contenders: Sequence[Contender], rng: random.Random) -> list[int]:
    """Indices in random order, libraries in random order but each in one piece."""
    libraries = sorted({contender.library for contender in contenders})
    rng.shuffle(libraries)
    order = list(range(len(contenders)))
    rng.shuffle(order)
    return sorted(order, key=lambda index: libraries.index(contenders[index].library))
