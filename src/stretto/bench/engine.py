"""`stretto bench engine`: how much of the saved FLOPs becomes saved time in the packed engine.

For every model shape, length mix and batch size one pool of batches goes through all contenders in interleaved rounds:

    huggingface         Hugging Face on padded batches (fp32)
    huggingface_sorted  the same, the pool cut into batches by length (fp32)
    onnx                ONNX Runtime on padded batches
    gemm                the full run's matrix products and nothing else: no engine on these kernels can be faster
    full                the packed engine, nothing dropped
    drop_2x …           the packed engine, tokens dropped so that FLOPs fall by this factor
    exit                the packed engine, every other sequence leaves after a third of the layers

Decisions are scripted (`script.py`): this measures the engine, not a method. All contenders get tokenised tensors. A
contender on a length mix is a row of the results, with a timing for each batch size and dtype. The results are written
after every combination; a run with the same file resumes.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from stretto.backbones import backbone_for
from stretto.bench.baselines import GemmLimit, OnnxRuntime, hugging_face, padded_flops
from stretto.bench.pool import MIXES, SHAPES, Pool, random_model
from stretto.bench.results import FULL, HF, HF_SORTED, ONNX, Clock, Results, Row, now
from stretto.bench.script import ScriptedDrop, ScriptedExit, drop_schedule
from stretto.bench.timing import Contender, Timed, interleaved, ratio
from stretto.deploy.onnx import require_onnx
from stretto.engine.cost import flops
from stretto.engine.decider import Decider, Silent
from stretto.engine.linear import DTYPES
from stretto.engine.packed import PackedEngine
from stretto.errors import StrettoError
from stretto.methods.exits import ExitHeads
from stretto.saving.same_run import check_same
from stretto.saving.versions import cpu_name, known_versions

SUITE = "engine"
DROP_FACTORS = (2, 4, 10)
GEMM = "gemm"
SHARED = (HF, HF_SORTED)  # measured once, in fp32; baselines of both dtypes
BASELINES = (FULL, *SHARED, ONNX, GEMM)
MAIN_MIX = "ag_news"  # measured in all rounds; the others in a third of them


def bench_engine(
    output: Path | None,
    *,
    shapes: Sequence[str] = ("bert-base", "minilm-l6"),
    mixes: Sequence[str] = ("sst", "ag_news", "imdb"),
    batches: Sequence[int] = (1, 8, 32),
    dtypes: Sequence[str] = DTYPES,
    rounds: int = 9,
    seed: int = 0,
    threads: int = 2,
    onnx: bool = True,
    progress: bool = True,
) -> Results:
    """Measure every combination that `output` does not hold yet; return all results, as written to `output`."""
    check(shapes, mixes, batches, dtypes, rounds)
    if onnx:
        require_onnx()
    results = Results.start(SUITE, output)
    check_same_run(results, seed, threads, lambda row: rounds_for(row.set, rounds))
    todo = [
        (shape, mix, batch, missing)
        for shape, mix, batch in itertools.product(shapes, mixes, batches)
        if (missing := [dtype for dtype in dtypes if not is_there(results, shape, mix, batch, dtype)])
    ]
    total = sum(rounds_for(mix, rounds) for _, mix, _, _ in todo)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tqdm(total=total, unit="round", disable=not progress) as bar:
            for shape, jobs in itertools.groupby(todo, key=lambda job: job[0]):
                with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
                    bench = ShapeBench(shape, seed, threads, Path(folder) if onnx else None)
                    for _, mix, batch, missing in jobs:
                        bar.set_description(f"{shape} {mix} batch {batch}")
                        for row in bench.measure(mix, batch, missing, rounds_for(mix, rounds), bar.update):
                            add(results, row)
                        results.write()
    finally:
        torch.set_num_threads(threads_before)
    return results


def is_there(results: Results, shape: str, mix: str, batch: int, dtype: str) -> bool:
    rows = [row for row in results.rows if (row.model, row.set, row.name) == (shape, mix, FULL)]
    return any((clock.batch, clock.dtype) == (batch, dtype) for row in rows for clock in row.clock)


def add(results: Results, row: Row) -> None:
    """A new row, or new timings of one that is there."""
    for index, other in enumerate(results.rows):
        if other.key == row.key:
            results.rows[index] = dataclasses.replace(other, clock=[*other.clock, *row.clock])
            return
    results.rows.append(row)


def check_same_run(results: Results, seed: int, threads: int, rounds_of: Callable[[Row], int]) -> None:
    """Refuse to mix figures of other settings, versions or machines in one file."""
    for row in results.rows:
        wanted = {
            "seed": seed, "rounds": rounds_of(row), "threads": threads, "cpu": cpu_name(),
            "versions": known_versions(),
        }  # fmt: skip
        for clock in row.clock:
            found = {
                "seed": row.seed,
                "versions": row.versions,
                **{n: getattr(clock, n) for n in ("rounds", "threads", "cpu")},
            }
            check_same(found, wanted, what="the measurements", place=results.path or Path())


def check(
    shapes: Sequence[str], mixes: Sequence[str], batches: Sequence[int], dtypes: Sequence[str], rounds: int
) -> None:
    """Refuse a wrong name before anything is measured."""
    for shape in shapes:
        _ = SHAPES[shape]
    for mix in mixes:
        _ = MIXES[mix]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise StrettoError(f"Expected dtypes among {', '.join(DTYPES)}; got '{dtype}'. Choose some of them.")
    if rounds < 1 or any(batch < 1 for batch in batches):
        raise StrettoError(
            f"Expected rounds and batch sizes of at least 1, got rounds {rounds} and batches {list(batches)}. "
            "Choose larger ones."
        )


def rounds_for(mix: str, rounds: int) -> int:
    return rounds if mix == MAIN_MIX else max(rounds // 3, 1)


class ShapeBench:
    """One model shape: what is built once for all its measurements."""

    def __init__(self, shape: str, seed: int, threads: int, onnx_folder: Path | None) -> None:
        self.shape, self.seed, self.threads = shape, seed, threads
        self.model = random_model(shape, seed)
        self.backbone = backbone_for(self.model)
        self.onnx = None if onnx_folder is None else OnnxRuntime(self.model, onnx_folder, threads)
        self.exits = ExitHeads(self.backbone.d, self.backbone.n_layers - 1, self.backbone.n_labels, "mean", 0.0).eval()
        self.engines: dict[str, PackedEngine] = {}
        self.limits: dict[str, GemmLimit] = {}

    def measure(
        self, mix: str, batch: int, dtypes: Sequence[str], rounds: int, after_round: Callable[[], object]
    ) -> list[Row]:
        """One row per contender, with a timing for each dtype; all of them are measured together."""
        pool = Pool.of(mix, batch, self.model.config.vocab_size, self.seed)
        contenders = list(self.baselines(pool, with_sorted=batch > 1))  # a batch of one has no padding
        for dtype in dtypes:
            contenders += self.contenders(pool, dtype)
        timed = interleaved(contenders, rounds, random.Random(f"{self.seed}/{mix}/{batch}"), after_round)
        facts = {
            "batch": batch, "rounds": rounds, "threads": self.threads, "cpu": cpu_name(), "date": now(),
            "sequences": len(pool.lengths), "tokens": int(pool.lengths.sum()),
            "padded_tokens": sum(inputs.input_ids.numel() for inputs in pool.mixed),
        }  # fmt: skip
        found: dict[str, list[Clock]] = {}
        for dtype in dtypes:
            for name, clock in clocks(timed, dtype, facts).items():
                found.setdefault(name, []).append(clock)
        return [
            Row(
                set=mix, model=self.shape, name=name, method=name, seed=self.seed, command="stretto bench engine",
                versions=known_versions(), clock=entries,
            )
            for name, entries in found.items()
        ]  # fmt: skip

    def baselines(self, pool: Pool, with_sorted: bool) -> Iterator[Contender]:
        for name, batches in ((HF, pool.mixed), (HF_SORTED, pool.sorted)):
            if name == HF or with_sorted:
                work = padded_flops(batches, self.backbone)
                yield Contender(name, "float32", hugging_face(self.model, batches), work)

    def contenders(self, pool: Pool, dtype: str) -> Iterator[Contender]:
        if self.onnx is not None:
            work = padded_flops(pool.mixed, self.backbone)
            yield Contender(ONNX, dtype, self.onnx.steps(pool.mixed, dtype), work, library="onnx")
        engine = self.engine(dtype)
        everything = [engine.run(inputs, Silent(), 0.0).trace for inputs in pool.mixed]
        limit = self.limits[dtype]
        yield warm(Contender(GEMM, dtype, limit.steps(everything), limit.flops(everything)))
        yield self.packed(FULL, engine, pool, [Silent() for _ in pool.mixed])
        for factor in DROP_FACTORS:
            script = ScriptedDrop(drop_schedule(factor, pool.lengths, self.backbone))
            yield self.packed(f"drop_{factor}x", engine, pool, [script for _ in pool.mixed])
        firsts = itertools.accumulate((len(inputs.input_ids) for inputs in pool.mixed[:-1]), initial=0)
        layer = max(self.backbone.n_layers // 3, 1)
        yield self.packed("exit", engine, pool, [ScriptedExit(layer, self.exits, first) for first in firsts])

    def engine(self, dtype: str) -> PackedEngine:
        if dtype not in self.engines:
            self.engines[dtype] = PackedEngine(self.backbone, dtype)
            self.limits[dtype] = GemmLimit(self.engines[dtype])
        return self.engines[dtype]

    def packed(self, name: str, engine: PackedEngine, pool: Pool, deciders: Sequence[Decider]) -> Contender:
        """The packed engine with one decider per batch. Counting its FLOPs runs, and so warms up, every batch."""
        steps = [
            partial(engine.run, inputs, decider, 0.0) for inputs, decider in zip(pool.mixed, deciders, strict=True)
        ]
        work = sum(float(flops(step().trace, self.backbone).sum()) for step in steps)
        return Contender(name, engine.dtype, steps, work)


def warm(contender: Contender) -> Contender:
    contender.seconds()
    return contender


def clocks(timed: Sequence[Timed], dtype: str, facts: dict[str, Any]) -> dict[str, Clock]:
    """A timing of each contender of this dtype and of each shared baseline, against the baselines of this dtype."""
    own = {t.contender.name: t for t in timed if t.contender.dtype == dtype or t.contender.name in SHARED}
    texts = facts["sequences"]
    return {
        name: Clock(
            **facts,
            dtype=dtype,
            gflop=round(this.contender.flops / 1e9, 4),
            flops_ratio=round(own[FULL].contender.flops / this.contender.flops, 4),
            ratios={other: ratio(own[other], this) for other in BASELINES if other in own},
            ms_per_text=1000 * this.median / texts,
            fastest_ms=1000 * min(this.times) / texts,
            slowest_ms=1000 * max(this.times) / texts,
        )
        for name, this in own.items()
    }
