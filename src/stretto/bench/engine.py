"""`stretto bench engine`: does the packed engine turn saved FLOPs into saved time?

For every model shape, length mix and batch size one pool of batches goes through all contenders in interleaved rounds:

    hf_padded   Hugging Face on padded batches (fp32)
    hf_sorted   the same, the pool cut into batches by length (fp32)
    onnx        ONNX Runtime on padded batches
    gemm        the full run's matrix products and nothing else: no engine on these kernels can be faster
    full        the packed engine, nothing dropped
    drop_2x …   the packed engine, tokens dropped so that FLOPs fall by this factor
    exit        the packed engine, every other sequence leaves after a third of the layers

Decisions are scripted (`script.py`): what is measured is the engine, not a method. Everybody gets ready tensors; nobody
tokenises. The results are written after every combination, and a run with the same file goes on where the last one
stopped. `report.py` turns them into a table and into verdicts.
"""

from __future__ import annotations

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
from stretto.bench.report import engine_table, engine_targets
from stretto.bench.results import Results, cells, now
from stretto.bench.script import ScriptedDrop, ScriptedExit, drop_schedule
from stretto.bench.timing import Contender, interleaved
from stretto.deploy.onnx import require_onnx
from stretto.engine.cost import flops
from stretto.engine.decider import Decider, Silent
from stretto.engine.linear import DTYPES
from stretto.engine.packed import PackedEngine
from stretto.errors import StrettoError
from stretto.methods.exits import ExitHeads

__all__ = ["bench_engine", "engine_table", "engine_targets"]

DROP_FACTORS = (2, 4, 10)
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
) -> dict[str, Any]:
    """Measure every combination that `output` does not hold yet; return all results, as written to `output`."""
    check(shapes, mixes, batches, dtypes, rounds)
    if onnx:
        require_onnx()
    results = Results.start(output, seed=seed, rounds=rounds, threads=threads, onnx=onnx)
    todo = [
        (shape, mix, batch, missing)
        for shape, mix, batch in itertools.product(shapes, mixes, batches)
        if (missing := [dtype for dtype in dtypes if not results.has(shape, mix, batch, dtype)])
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
                        results.add(bench.measure(mix, batch, missing, rounds_for(mix, rounds), bar.update))
    finally:
        torch.set_num_threads(threads_before)
    return results.content


def check(
    shapes: Sequence[str], mixes: Sequence[str], batches: Sequence[int], dtypes: Sequence[str], rounds: int
) -> None:
    """Refuse a wrong name now rather than after twenty minutes."""
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
        self.shape, self.seed = shape, seed
        self.model = random_model(shape, seed)
        self.backbone = backbone_for(self.model)
        self.onnx = None if onnx_folder is None else OnnxRuntime(self.model, onnx_folder, threads)
        self.exits = ExitHeads(self.backbone.d, self.backbone.n_layers - 1, self.backbone.n_labels, "mean", 0.0).eval()
        self.engines: dict[str, PackedEngine] = {}
        self.limits: dict[str, GemmLimit] = {}

    def measure(
        self, mix: str, batch: int, dtypes: Sequence[str], rounds: int, after_round: Callable[[], object]
    ) -> list[dict[str, Any]]:
        """One group of results per dtype; all their contenders are measured together."""
        pool = Pool.of(mix, batch, self.model.config.vocab_size, self.seed)
        left_out = self.left_out(batch)
        contenders = list(self.baselines(pool, "hf_sorted" not in left_out))
        for dtype in dtypes:
            contenders += self.contenders(pool, dtype, "onnx" not in left_out)
        timed = interleaved(contenders, rounds, random.Random(f"{self.seed}/{mix}/{batch}"), after_round)
        facts = {
            "date": now(),
            "rounds": rounds,
            "batches": len(pool.mixed),
            "tokens": int(pool.lengths.sum()),
            "padded_tokens": sum(inputs.input_ids.numel() for inputs in pool.mixed),
            "left_out": left_out,
        }
        key = {"shape": self.shape, "mix": mix, "batch": batch}
        return [{**key, "dtype": dtype, **facts, "cells": cells(timed, dtype)} for dtype in dtypes]

    def left_out(self, batch: int) -> dict[str, str]:
        """Contenders that are not measured, and why."""
        reasons = {}
        if batch == 1:
            reasons["hf_sorted"] = "a batch of one has no padding"
        if self.onnx is None:
            reasons["onnx"] = "not asked for"
        return reasons

    def baselines(self, pool: Pool, with_sorted: bool) -> Iterator[Contender]:
        for name, batches in (("hf_padded", pool.mixed), ("hf_sorted", pool.sorted)):
            if name == "hf_padded" or with_sorted:
                work = padded_flops(batches, self.backbone)
                yield Contender(name, "float32", hugging_face(self.model, batches), work)

    def contenders(self, pool: Pool, dtype: str, with_onnx: bool) -> Iterator[Contender]:
        if self.onnx is not None and with_onnx:
            work = padded_flops(pool.mixed, self.backbone)
            yield Contender("onnx", dtype, self.onnx.steps(pool.mixed, dtype), work, library="onnx")
        engine = self.engine(dtype)
        everything = [engine.run(inputs, Silent(), 0.0).trace for inputs in pool.mixed]
        limit = self.limits[dtype]
        yield warm(Contender("gemm", dtype, limit.steps(everything), limit.flops(everything)))
        yield self.packed("full", engine, pool, [Silent() for _ in pool.mixed])
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
        return Contender(name, engine.dtype, steps, work, scripted=name != "full")


def warm(contender: Contender) -> Contender:
    contender.seconds()
    return contender
