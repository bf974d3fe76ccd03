"""Time of a batch at a dial, on this machine, from texts to answers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
from tqdm.auto import tqdm

from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.saving.points import Latency
from stretto.saving.versions import cpu_name

#: Number of timed batches, and how often each is timed.
BATCHES, ROUNDS = 64, 3


def most_expensive_within(
    model: AdaptiveModel,
    texts: Sequence[tuple[str, ...]],
    dials: Sequence[float],
    milliseconds: float,
    batch: int,
    percentile: float,
    *,
    seed: int = 42,
    progress: bool = False,
) -> tuple[float, Latency]:
    """The first of `dials` (from the most expensive to the cheapest) at which the given percentage of
    batches is answered in time, found by bisection, and how long they took."""
    groups = sampled(texts, batch, seed)
    took: dict[int, Latency] = {}

    def in_time(place: int) -> bool:
        took[place] = measure(model, groups, dials[place], batch, percentile)
        bar.update()
        return took[place].milliseconds <= milliseconds

    with tqdm(total=len(dials).bit_length() + 1, desc="timing", disable=not progress, leave=False) as bar:
        measure(model, groups[:4], dials[0], batch, percentile)  # a first run is slow
        slow, quick = -1, len(dials) - 1
        if not in_time(quick):
            raise StrettoError(
                f"Expected a latency that a dial of {model.method.name} can reach, got {milliseconds:g} ms: at the "
                f"cheapest, {dials[quick]:g}, {percentile:g} % of the batches of {batch} take up to "
                f"{took[quick].milliseconds:.3g} ms here. Allow more, or use smaller batches or --dtype int8."
            )
        while quick - slow > 1:
            middle = (slow + quick) // 2
            slow, quick = (slow, middle) if in_time(middle) else (middle, quick)
    return dials[quick], took[quick]


def sampled(texts: Sequence[tuple[str, ...]], batch: int, seed: int) -> list[list[tuple[str, ...]]]:
    """Random batches; if there are too few texts for one, they are repeated."""
    chosen = random.Random(seed).sample(list(texts), min(len(texts), BATCHES * batch))
    whole = chosen * -(-batch // len(chosen)) if len(chosen) < batch else chosen
    return [whole[start : start + batch] for start in range(0, len(whole) - batch + 1, batch)]


def measure(
    model: AdaptiveModel, groups: Sequence[Sequence[tuple[str, ...]]], dial: float, batch: int, percentile: float
) -> Latency:
    times = []
    for _ in range(ROUNDS):
        for group in groups:
            start = time.perf_counter()
            model.predict(group, dial, batch_size=batch)
            times.append(1000 * (time.perf_counter() - start))
    return Latency(float(np.percentile(times, percentile)), batch, percentile, cpu_name())
