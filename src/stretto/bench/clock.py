"""Time of the rows of a set, compared with the full model and with other engines.

All of them run in one process, in interleaved rounds, on the same sample of test inputs: in single
batches of each size, and in a stream of the largest, as `stretto predict` does with a file. All get tokenised tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from stretto.bench.baselines import GemmLimit, hugging_face, padded_flops
from stretto.bench.model import packed_contender
from stretto.bench.report.drops import is_oracle
from stretto.bench.report.groups import LOSSES, Group
from stretto.bench.results import FULL, HF, HF_SORTED, ONNX, Clock, Point, Row, now
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


class Wanted(NamedTuple):
    """A row at a dial, to be timed."""

    row: str
    dial: float
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.row} {self.dial} {self.dtype}"


@dataclass(frozen=True)
class Job:
    """What is timed, and the model that runs it."""

    wanted: Wanted
    model: AdaptiveModel


@dataclass(frozen=True)
class TimedSet:
    """The rows of one set, encoder and seed. A pass times all of them at one batch size, in one process; a killed run
    resumes with the passes that are missing."""

    bench: Bench
    rows: Mapping[str, Row]

    @property
    def passes(self) -> list[tuple[int, bool]]:
        """Batch sizes, each batch by itself; last a stream of the largest."""
        sizes = self.bench.suite.batch_sizes
        return [*((size, False) for size in sizes), (max(sizes), True)]

    @property
    def reference(self) -> Wanted:
        """The row that the others are compared with: all layers, all tokens (with gates, if they were pretrained)."""
        if FULL_ROW in self.rows:
            return Wanted(FULL_ROW, self.rows[FULL_ROW].on("test")[0].dial)
        return Wanted(next(iter(self.rows)), 0.0)

    @cached_property
    def wanted(self) -> list[Wanted]:
        """Every row at the dials that the suite's tables show."""
        group, found = Group(dict(self.rows)), []
        for name, row in self.rows.items():
            if row.method not in METHODS or row.layers or is_oracle(row):  # other engines, other encoders, no methods
                continue
            dials = [] if name == FULL_ROW else [point.dial for point in points_to_time(self.bench, group, row)]
            found += [Wanted(name, dial) for dial in dict.fromkeys(dials)]
            found += [Wanted(name, point.dial, "int8") for point in row.on("test", "int8")]
        return found

    @property
    def baselines(self) -> list[str]:
        return [name for name in self.bench.suite.baselines if name in self.rows]

    def is_done(self, size: int, stream: bool) -> bool:
        """Whether everything has been timed at this batch size, with as many threads as now."""
        known = {
            (name, clock.dial, clock.dtype)
            for name, row in self.rows.items()
            for clock in row.clock
            if (clock.batch, clock.stream, clock.threads) == (size, stream, torch.get_num_threads())
        }
        others = {name for name, _, _ in known}
        return {self.reference, *self.wanted} <= known and set(self.baselines) <= others

    @cached_property
    def jobs(self) -> list[Job]:
        """The reference first. A row's model is opened once for all its dials."""
        opened: dict[tuple[str, str], AdaptiveModel] = {}
        for each in (self.reference, *self.wanted):
            if (each.row, each.dtype) not in opened:
                opened[each.row, each.dtype] = self.bench.open(each.row, each.dtype)
        return [Job(each, opened[each.row, each.dtype]) for each in (self.reference, *self.wanted)]

    def time(self, size: int, stream: bool) -> dict[str, list[Clock]]:
        """One pass: the clocks of each row."""
        whole, *jobs = self.jobs
        found: dict[str, list[Clock]] = {name: [] for name in self.rows}
        for row, clock in clocks(self.bench, whole, jobs, self.baselines, size, stream):
            found[row].append(clock)
        return found


def points_to_time(bench: Bench, group: Group, row: Row) -> list[Point]:
    """By the rule of the suite. A row that has no point within a loss is timed by cost, so that it has times too."""
    by_cost = [point for cost in COSTS if (point := within_cost(row.on("test"), cost)) is not None]
    if bench.suite.choose == "cost":
        return by_cost
    by_loss = [point for loss in LOSSES if (point := group.within_loss(row, loss)) is not None]
    return (by_loss or by_cost) + [point for point in row.on("test") if point.layers_per_token is not None]


def with_clocks(row: Row, size: int, stream: bool, found: Sequence[Clock]) -> Row:
    """The row with the clocks of one pass replaced."""
    others = [clock for clock in row.clock if (clock.batch, clock.stream) != (size, stream)]
    return replace(row, clock=[*others, *found])


def clocks(
    bench: Bench, whole: Job, jobs: Sequence[Job], baselines: Sequence[str], size: int, stream: bool
) -> Iterator[tuple[str, Clock]]:
    """Time everything once; a row's name and its clock for each job and baseline."""
    spec = bench.spec
    count = min(spec.timed * (STREAM_FACTOR if stream else 1), len(bench.parts["test"]))
    texts = random.Random(bench.seed).sample(bench.parts["test"].texts, count)
    with_products = size == max(bench.suite.batch_sizes) and not stream
    contenders = list(contenders_of(bench, whole, jobs, baselines, texts, size, stream, with_products))
    results = {timed.contender.name: timed for timed in interleaved(contenders, spec.rounds, random.Random(size))}
    full = results[FULL]
    against = [name for name in (FULL, HF, *baselines) if name in results]

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

    yield whole.wanted.row, clock(FULL, whole.wanted.dial, "float32")
    for name in baselines:
        yield name, clock(name, 0.0, results[name].contender.dtype)
    for job in jobs:
        yield job.wanted.row, clock(job.wanted.name, job.wanted.dial, job.wanted.dtype)


def contenders_of(
    bench: Bench, whole: Job, jobs: Sequence[Job], baselines: Sequence[str], texts: Sequence[Any], size: int,
    stream: bool, with_products: bool,
) -> Iterator[Contender]:  # fmt: skip
    """Other engines on padded batches, the full model, every job; with the matrix products of what is packed."""
    model = whole.model
    pad = model.tokenizer.pad_token_id
    features = model.encode(texts).features
    mixed = list(batches(features, pad, size))
    yield padded(HF, model, mixed)
    for name in baselines:
        if name == HF_SORTED:
            yield padded(name, model, list(batches(sorted(features, key=length), pad, size)))
        elif name != HF:
            dtype = "float32" if name == ONNX else "int8"
            steps = bench.onnx(model).steps(mixed, dtype)
            yield Contender(name, dtype, steps, padded_flops(mixed, model.backbone), library="onnx")
    for name, job in {FULL: whole, **{job.wanted.name: job for job in jobs}}.items():
        taken, dial = windows if stream else batches, job.wanted.dial
        inputs = list(taken(job.model.encode(texts).features, pad, size))
        yield packed_contender(name, job.model, job.model.method, dial, inputs, size)
        if with_products and job.wanted.dtype == "float32":
            traces = [job.model.packed.run(batch, job.model.method, dial).trace for batch in inputs]
            limit = GemmLimit(job.model.packed)
            yield Contender(products_of(name), "float32", limit.steps(traces), limit.flops(traces))


def padded(name: str, model: AdaptiveModel, pool: Sequence[Inputs]) -> Contender:
    return Contender(name, "float32", hugging_face(model.encoder, pool), padded_flops(pool, model.backbone))


def products_of(name: str) -> str:
    """What the matrix products alone of a contender are called."""
    return f"products of {name}"


def length(feature: Feature) -> int:
    return len(feature["input_ids"])
