"""The table of the demo: the full model, its dials and other engines; what each scores, and how fast it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import torch

from stretto.bench.baselines import OnnxRuntime, hugging_face, padded_flops
from stretto.bench.model import SEQUENCES, full_method, packed_contender
from stretto.bench.timing import Contender, interleaved, ratio
from stretto.budget.sweep import sweep
from stretto.data import Dataset
from stretto.data.batches import batches
from stretto.methods import Method
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint
from stretto.state import Inputs

CLOCKED = (1, 32)  # batch sizes
FORMATS = {"cost": ".2f", "depth": ".2f", **{f"× {who}, batch {b}": ".2f" for who in ("full", "HF") for b in CLOCKED}}
HF, FULL = "huggingface", "full"


@dataclass(frozen=True)
class Line:
    """A row of the table, before it is timed."""

    name: str
    point: OperatingPoint
    contender: Callable[[Sequence[Inputs], int], Contender]
    """From batches of this size to what is timed on them."""
    note: str = ""


def packed(name: str, model: AdaptiveModel, method: Method, point: OperatingPoint, note: str = "") -> Line:
    return Line(
        name, point, lambda pool, size: packed_contender(name, model, method, point.dial, pool, size), note=note
    )


def lines_of(
    model: AdaptiveModel,
    quick: AdaptiveModel,
    points: Sequence[OperatingPoint],
    dials: Sequence[float],
    test: Dataset,
    work: Path,
) -> Iterator[Line]:
    """The full model; each dial, chosen on the dev texts and measured on the test texts (`points`); ours in int8
    (`quick`, at its own dial); the full model in ONNX Runtime, in int8, if that is installed."""
    measured, name = {point.dial: point for point in points}, model.method.dial.name
    off = model.method.dial.off
    full = OperatingPoint(off, measured[off].score, 1.0, float(model.backbone.n_layers), measured[off].metrics)
    kept = "default (full model)" if model.dial == off else ""
    yield packed(FULL, model, full_method(model), full, kept)
    for dial in dials:
        note = f"default ({model.standing()})" if dial == model.dial else ""
        yield packed(f"{name} {dial:g}", model, model.method, measured[dial], note)
    (point,) = sweep(quick, test, [quick.dial], progress=False)
    yield packed(f"{name} {quick.dial:g}, int8", quick, quick.method, point, quick.standing())
    if util.find_spec("onnxruntime") is not None:
        runtime = OnnxRuntime(model.encoder, work, torch.get_num_threads())
        metrics = runtime.scores(model, test, "int8")
        onnx = OperatingPoint(off, metrics[model.task.main_metric], 1.0, float(model.backbone.n_layers), metrics)
        yield Line("full in ONNX Runtime, int8", onnx, lambda pool, size: other_engine(runtime, model, pool))


def other_engine(runtime: OnnxRuntime, model: AdaptiveModel, pool: Sequence[Inputs]) -> Contender:
    steps = runtime.steps(pool, "int8")
    return Contender("full in ONNX Runtime, int8", "int8", steps, padded_flops(pool, model.backbone), library="onnx")


def table(
    model: AdaptiveModel, lines: Sequence[Line], texts: Sequence[tuple[str, ...]], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """All of them timed together, in interleaved rounds, on one sample of the texts."""
    chosen = random.Random(seed).sample(list(texts), min(SEQUENCES, len(texts)))
    features = model.encode(chosen).features
    gains: dict[tuple[str, str, int], float] = {}
    for size in CLOCKED:
        pool = list(batches(features, model.tokenizer.pad_token_id, size))
        baseline = Contender(HF, "float32", hugging_face(model.encoder, pool), padded_flops(pool, model.backbone))
        contenders = [baseline, *(line.contender(pool, size) for line in lines)]
        timed = {each.contender.name: each for each in interleaved(contenders, rounds, random.Random(f"{seed}/{size}"))}
        for line in lines:
            for against, shown in ((FULL, "full"), (HF, "HF")):
                gains[line.name, shown, size] = ratio(timed[against], timed[line.name])
    return [
        {
            "model": line.name,
            model.task.main_metric: line.point.score,
            "cost": line.point.cost,
            "depth": line.point.depth,
            **{f"× {who}, batch {size}": gains[line.name, who, size] for who in ("full", "HF") for size in CLOCKED},
            "": line.note,
        }
        for line in lines
    ]
