"""Score, cost and depth of a model along its dial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stretto.budget.teacher import Teacher
from stretto.data import Dataset
from stretto.data.batches import batches
from stretto.data.tokenise import Encoded, Feature
from stretto.engine.cost import Cost
from stretto.engine.replay import record, replay
from stretto.engine.written import TextTrace
from stretto.errors import StrettoError
from stretto.methods import Combined
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint
from stretto.state import Trace
from stretto.tasks import Logits


def sweep(
    model: AdaptiveModel,
    data: Dataset,
    dials: Sequence[float] | None = None,
    *,
    batch_size: int = 32,
    progress: bool = True,
    encoded: Encoded | None = None,
    context: Any = None,
    teacher: Teacher | None = None,
) -> list[OperatingPoint]:
    """Measure each dial (default: the method's own sweep) on labelled data.

    To measure the same data several times, pass the result of `model.encode(data.texts)`. `context` goes with every
    pass (`State.context`). With a `teacher` for the same data, the metrics have the divergence from the full model, and
    the data need no labels: the score is then NaN."""
    if data.labels is None and teacher is None:
        raise StrettoError("Expected labelled data to evaluate on, got none. Name the label column.")
    dials = model.method.dial.sweep if dials is None else dials
    for dial in dials:
        model.method.dial.check(dial)
    encoded = model.encode(data.texts) if encoded is None else encoded
    points = []
    measured = runs(model, encoded.features, dials, batch_size, progress, context)
    for dial, (logits, trace) in zip(dials, measured, strict=True):
        metrics = {} if data.labels is None else model.task.scores(logits, encoded, data.labels)
        metrics |= {} if teacher is None else teacher.metrics(logits)
        cost = Cost.of(trace, model.backbone)
        if isinstance(trace, TextTrace):
            metrics = {**metrics, "mflops_per_token": float(cost.flops.sum() / trace.decoder.steps.sum()) / 1e6}
        points.append(point_of(model, dial, metrics, cost, len(data)))
    return points


def point_of(model: AdaptiveModel, dial: float, metrics: dict[str, float], cost: Cost, n: int) -> OperatingPoint:
    """What `n` examples gave at a dial; no metrics where they have no labels."""
    method = model.method
    parts = method.dials(torch.tensor([dial], dtype=torch.float64))[0].tolist() if isinstance(method, Combined) else ()
    return OperatingPoint(
        dial, metrics.get(model.task.main_metric, float("nan")), cost.total, cost.mean_depth, metrics,
        dials=tuple(parts), n=n, dtype=model.dtype,
    )  # fmt: skip


def runs(
    model: AdaptiveModel,
    features: Sequence[Feature],
    dials: Sequence[float],
    batch_size: int,
    progress: bool,
    context: Any = None,
) -> Iterator[tuple[Logits, Trace | TextTrace]]:
    """Logits and trace for each dial: replayed from one pass where the method only exits."""
    engine, method = model.packed, model.method
    only_exits = method.exits is not None and method.points == {"after"}
    if only_exits and len(dials) > 1 and context is None:
        assert method.exits is not None
        pad = model.tokenizer.pad_token_id
        recording = record(engine, method.exits, batches(features, pad, batch_size, "reading" if progress else ""))
        for dial in dials:
            output = replay(model.backbone, method, recording, dial)
            yield output.logits, output.trace
        return
    for dial in dials:
        shown = f"{method.dial.name} {dial:g}" if progress else ""
        yield model.run_features(features, dial, batch_size, shown, context)
