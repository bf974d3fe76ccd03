"""Fair timing on a noisy machine: all contenders in one process, interleaved, in random order, medians."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

from tqdm.auto import tqdm


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, seed: int = 0, progress: str = ""
) -> dict[str, float]:
    """Median seconds of each contender. Each is called once to warm up, then once per round in random order."""
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in tqdm(range(rounds), desc=progress, disable=not progress, leave=False):
        for name in order.sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}
