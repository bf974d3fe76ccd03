"""Time of the rows of a set, compared with the full model and with other engines.

All of them run in one process, in interleaved rounds, on the same sample of test inputs: in single
batches of each size, and in a stream of the largest, as `stretto predict` does with a file. All get tokenised tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.bench.baselines import GemmLimit, hugging_face, padded_flops
from stretto.bench.model import packed_contender
from stretto.bench.report.drops import is_oracle
from stretto.bench.report.groups import LOSSES, Group
from stretto.bench.results import FULL, HF, HF_SORTED, ONNX, Clock, Row, now
from stretto.bench.rows import Bench
from stretto.bench.suite import FULL_ROW
from stretto.bench.timing import Contender, interleaved, ratio
from stretto.budget.choose import COSTS, within_cost
from stretto.data.batches import batches, windows
from stretto.data.tokenise import Feature
from stretto.methods import METHODS
from stretto.model import AdaptiveModel
from stretto.saving.versions import cpu_name
from stretto.state import Inputs

#: How many times more texts are timed in a stream.
STREAM_FACTOR = 8


@dataclass(frozen=True)
class Job:
    """A row at a dial."""

    row: str
    model: AdaptiveModel
    dial: float
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.row} {self.dial} {self.dtype}"


def timed_rows(bench: Bench, rows: Mapping[str, Row]) -> list[Row]:
    """The rows with their clocks."""
    whole, jobs = reference_job(bench, rows), list(jobs_of(bench, rows))
    names = [FULL_ROW, *rows]
    found: dict[str, list[Clock]] = {name: [] for name in names}
    largest = max(bench.suite.batch_sizes)
    for size, stream in [*((size, False) for size in bench.suite.batch_sizes), (largest, True)]:
        for row, clock in clocks(bench, whole, jobs, size, stream):
            found[row].append(clock)
    return [replace(row, clock=found[name]) for name, row in rows.items() if found[name]]


def reference_job(bench: Bench, rows: Mapping[str, Row]) -> Job:
    """The row that the others are compared with: all layers, all tokens (with gates, if they were pretrained)."""
    if FULL_ROW in rows:
        model = bench.open(FULL_ROW)
        return Job(FULL_ROW, model, model.method.dial.off)
    name = next(iter(rows))
    return Job(name, bench.open(name), 0.0)


def jobs_of(bench: Bench, rows: Mapping[str, Row]) -> Iterator[Job]:
    """Every row at the dials that the suite's tables show."""
    group = Group(dict(rows))
    for name, row in rows.items():
        if row.method not in METHODS or row.layers or is_oracle(row):  # other engines, other encoders, no methods
            continue
        if bench.suite.choose == "cost":
            points = [within_cost(row.on("test"), cost) for cost in COSTS]
        else:
            points = [group.within_loss(row, loss) for loss in LOSSES]
            points += [point for point in row.on("test") if point.layers_per_token is not None]
        dials = {
            "float32": [] if name == FULL_ROW else [point.dial for point in points if point is not None],
            "int8": [point.dial for point in row.on("test", "int8")],
        }
        for dtype, wanted in dials.items():
            if wanted:
                model = bench.open(name, dtype)
                yield from (Job(name, model, dial, dtype) for dial in dict.fromkeys(wanted))


def clocks(bench: Bench, whole: Job, jobs: Sequence[Job], size: int, stream: bool) -> Iterator[tuple[str, Clock]]:
    """Time everything once; a row's name and its clock for each job and baseline."""
    spec = bench.spec
    count = min(spec.timed * (STREAM_FACTOR if stream else 1), len(bench.parts["test"]))
    texts = random.Random(bench.seed).sample(bench.parts["test"].texts, count)
    with_products = size == max(bench.suite.batch_sizes) and not stream
    contenders = list(contenders_of(bench, whole, jobs, texts, size, stream, with_products))
    results = {timed.contender.name: timed for timed in interleaved(contenders, spec.rounds, random.Random(size))}
    full = results[FULL]
    against = [name for name in (FULL, HF, *bench.suite.baselines) if name in results]

    def clock(name: str, dial: float, dtype: str) -> Clock:
        this, products = results[name], results.get(products_of(name))
        flops_ratio = full.contender.flops / this.contender.flops
        tracked = None
        if products is not None and name != FULL:
            limit = results[products_of(FULL)]
            tracked = ratio(limit, products) / (limit.contender.flops / products.contender.flops)
        return Clock(
            batch=size, stream=stream, dtype=dtype, dial=dial, flops_ratio=flops_ratio,
            ratios={other: ratio(results[other], this) for other in dict.fromkeys(against)},
            sequences=count, rounds=spec.rounds, threads=torch.get_num_threads(), products_tracking=tracked,
            cpu=f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}", date=now(),
            ms_per_text=1000 * this.median / count, fastest_ms=1000 * min(this.times) / count,
            slowest_ms=1000 * max(this.times) / count,
        )  # fmt: skip

    yield whole.row, clock(FULL, whole.dial, "float32")
    for name in bench.suite.baselines:
        yield name, clock(name, 0.0, results[name].contender.dtype)
    for job in jobs:
        yield job.row, clock(job.name, job.dial, job.dtype)


def contenders_of(
    bench: Bench, whole: Job, jobs: Sequence[Job], texts: Sequence[Any], size: int, stream: bool, with_products: bool
) -> Iterator[Contender]:
    """Other engines on padded batches, the full model, every job; with the matrix products of what is packed."""
    model = whole.model
    pad = model.tokenizer.pad_token_id
    features = model.encode(texts).features
    mixed = list(batches(features, pad, size))
    yield padded(HF, model, mixed)
    for name in bench.suite.baselines:
        if name == HF_SORTED:
            yield padded(name, model, list(batches(sorted(features, key=length), pad, size)))
        elif name != HF:
            dtype = "float32" if name == ONNX else "int8"
            steps = bench.onnx(model).steps(mixed, dtype)
            yield Contender(name, dtype, steps, padded_flops(mixed, model.backbone), library="onnx")
    for name, job in {FULL: whole, **{job.name: job for job in jobs}}.items():
        taken = windows if stream else batches
        inputs = list(taken(job.model.encode(texts).features, pad, size))
        yield packed_contender(name, job.model, job.model.method, job.dial, inputs, size)
        if with_products and job.dtype == "float32":
            traces = [job.model.packed.run(batch, job.model.method, job.dial).trace for batch in inputs]
            limit = GemmLimit(job.model.packed)
            yield Contender(products_of(name), "float32", limit.steps(traces), limit.flops(traces))


def padded(name: str, model: AdaptiveModel, pool: Sequence[Inputs]) -> Contender:
    return Contender(name, "float32", hugging_face(model.encoder, pool), padded_flops(pool, model.backbone))


def products_of(name: str) -> str:
    """What the matrix products alone of a contender are called."""
    return f"products of {name}"


def length(feature: Feature) -> int:
    return len(feature["input_ids"])
