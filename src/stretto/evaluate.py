"""Score, cost and depth of a model along its dial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stretto.data import Dataset
from stretto.encoding import Encoded, collate, encode
from stretto.errors import StrettoError
from stretto.measure import Cost
from stretto.recording import record, replay
from stretto.state import Inputs, Trace

if TYPE_CHECKING:
    from stretto.model import AdaptiveModel

#: How many points of dev score the default dial may give up against the full model.
DEFAULT_LOSS = 0.5


@dataclass(frozen=True)
class OperatingPoint:
    """A dial with what it was measured to give."""

    dial: float
    score: float
    """The task's main metric, in [0, 1] (correlations in [-1, 1])."""
    cost: float
    """Fraction of the full model's FLOPs, deciders included."""
    depth: float
    """Average number of layers run."""
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def batches(features: Sequence[dict], pad_token_id: int, batch_size: int, progress: str = "") -> Iterator[Inputs]:
    """Padded batches in the given order, with a progress bar if it has a name."""
    pad = collate(pad_token_id)
    starts = range(0, len(features), batch_size)
    for start in tqdm(starts, desc=progress, disable=not progress, leave=False):
        padded = pad(list(features[start : start + batch_size]))
        yield Inputs(padded["input_ids"], padded["attention_mask"], padded.get("token_type_ids"))


def sweep(
    model: AdaptiveModel,
    data: Dataset,
    dials: Sequence[float] | None = None,
    *,
    batch_size: int = 32,
    progress: bool = True,
    encoded: Encoded | None = None,
) -> list[OperatingPoint]:
    """Measure each dial (default: the method's own sweep) on labelled data.

    Who sweeps the same data again and again may pass what `encode` made of its texts."""
    if data.labels is None:
        raise StrettoError("Expected labelled data to evaluate on, got none. Name the label column.")
    dials = model.method.dial.sweep if dials is None else dials
    for dial in dials:
        model.method.dial.check(dial)
    encoded = encode(model.tokenizer, data.texts, model.max_length) if encoded is None else encoded
    labels = torch.tensor(data.labels)
    points = []
    for dial, (logits, trace) in zip(dials, _runs(model, encoded.features, dials, batch_size, progress), strict=True):
        metrics = model.task.metrics(logits, labels)
        cost = Cost.of(trace, model.backbone)
        points.append(OperatingPoint(dial, metrics[model.task.main_metric], cost.total, cost.mean_depth, metrics))
    return points


def _runs(
    model: AdaptiveModel, features: list[dict], dials: Sequence[float], batch_size: int, progress: bool
) -> Iterator[tuple[Tensor, Trace]]:
    """Logits [n, C] and trace for each dial: replayed from one pass where the method only exits."""
    engine, method = model.packed, model.method
    pad = model.tokenizer.pad_token_id
    only_exits = method.exits is not None and method.points == {"after"}
    if only_exits and len(dials) > 1:
        assert method.exits is not None
        recording = record(engine, method.exits, batches(features, pad, batch_size, "reading" if progress else ""))
        for dial in dials:
            output = replay(model.backbone, method, recording, dial)
            yield output.logits, output.trace
        return
    for dial in dials:
        name = f"{method.dial.name} {dial:g}" if progress else ""
        outputs = [model.run(batch, dial) for batch in batches(features, pad, batch_size, name)]
        yield torch.cat([o.logits for o in outputs]), Trace.concatenate([o.trace for o in outputs])


def within_budget(points: Sequence[OperatingPoint], budget: float) -> OperatingPoint | None:
    """The dearest point whose cost is at most `budget`, or None. Looks at costs only, never at scores."""
    affordable = [point for point in points if point.cost <= budget]
    return max(affordable, key=lambda point: point.cost, default=None)


def cheapest_within(points: Sequence[OperatingPoint], loss: float = DEFAULT_LOSS) -> OperatingPoint:
    """The cheapest point at most `loss` points (of 100) below the first, which is the full model."""
    good = [point for point in points if 100 * point.score >= 100 * points[0].score - loss]
    return min(good, key=lambda point: point.cost)
