"""How many times faster a model is at its dial, on this machine: a short measurement for the end of a training."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.bench.model import bench_model
from stretto.model import AdaptiveModel

#: Texts in a batch, in bulk.
BULK = 32
ROUNDS = 3
#: About how long it may take.
SECONDS = 20.0
#: Texts that are timed one at a time, and in bulk; fewer of long ones.
MOST = (32, 4 * BULK)


@dataclass(frozen=True)
class Faster:
    """How many times faster, one text at a time and in bulk (a stream of batches)."""

    alone: float
    bulk: float


def how_much_faster(model: AdaptiveModel, texts: Sequence[tuple[str, ...]], seed: int = 0) -> tuple[Faster, Faster]:
    """Against the full model on the same engine, and against Hugging Face on padded batches."""
    chosen = random.Random(seed).sample(list(texts), min(MOST[1], len(texts)))
    start = time.perf_counter()
    model.predict(chosen[:4], model.method.dial.off, batch_size=1)
    each = (time.perf_counter() - start) / len(chosen[:4])
    passes = 2 * 4 * (ROUNDS + 1)  # both ways, four contenders, a round to warm up
    affordable = int(SECONDS / (passes * each))
    found = []
    for size, stream, most in ((1, False, MOST[0]), (BULK, True, MOST[1])):
        rows = bench_model(
            model, chosen, [model.dial], (size,), ROUNDS, seed,
            sequences=max(4, min(most, affordable)), stream=stream,
        )  # fmt: skip
        found.append(rows[-1])
    alone, bulk = found
    full, hugging_face = "time_gain", "time_gain_vs_huggingface"
    return Faster(alone[full], bulk[full]), Faster(alone[hugging_face], bulk[hugging_face])
