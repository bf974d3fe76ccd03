"""Score, cost and depth of a model along its dial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stretto.data import Dataset
from stretto.data.tokenise import Encoded, Feature, as_inputs, collate
from stretto.engine.cost import Cost
from stretto.engine.parts import check_batch_size
from stretto.engine.replay import record, replay
from stretto.errors import StrettoError
from stretto.state import Inputs, Trace
from stretto.tasks import Logits

if TYPE_CHECKING:
    from stretto.model import AdaptiveModel

#: The most batches, and tokens with their padding, that go through the layers together: what is left of them is joined
#: where sequences leave or lose tokens. More of them would take more memory, and there is little left to gain.
WINDOW, WINDOW_TOKENS = 16, 2**16
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


def batches(features: Sequence[Feature], pad_token_id: int, batch_size: int, progress: str = "") -> Iterator[Inputs]:
    """Padded batches in the given order, with a progress bar if it has a name."""
    pad = collate(pad_token_id)
    starts = range(0, len(features), batch_size)
    for start in tqdm(starts, desc=progress, disable=not progress, leave=False):
        yield as_inputs(pad(list(features[start : start + batch_size])))


def windows(features: Sequence[Feature], pad_token_id: int, batch_size: int, progress: str = "") -> Iterator[Inputs]:
    """Several batches in one, in the given order: one at least, and as many as `WINDOW` and `WINDOW_TOKENS` allow."""
    check_batch_size(batch_size)
    pad, start = collate(pad_token_id), 0
    with tqdm(total=len(features), unit=" inputs", desc=progress, disable=not progress, leave=False) as bar:
        while start < len(features):
            end, longest = start, 0
            while end < min(start + WINDOW * batch_size, len(features)):
                batch = features[end : end + batch_size]
                longest = max(longest, *(len(feature["input_ids"]) for feature in batch))
                if end > start and (end + len(batch) - start) * longest > WINDOW_TOKENS:
                    break
                end += len(batch)
            yield as_inputs(pad(list(features[start:end])))
            bar.update(end - start)
            start = end


def sweep(
    model: AdaptiveModel,
    data: Dataset,
    dials: Sequence[float] | None = None,
    *,
    batch_size: int = 32,
    progress: bool = True,
    encoded: Encoded | None = None,
    context: Any = None,
) -> list[OperatingPoint]:
    """Measure each dial (default: the method's own sweep) on labelled data.

    Who sweeps the same data again and again may pass what `model.encode(data.texts)` gave. `context` goes with every
    pass (`State.context`)."""
    if data.labels is None:
        raise StrettoError("Expected labelled data to evaluate on, got none. Name the label column.")
    dials = model.method.dial.sweep if dials is None else dials
    for dial in dials:
        model.method.dial.check(dial)
    encoded = model.encode(data.texts) if encoded is None else encoded
    points = []
    runs = _runs(model, encoded.features, dials, batch_size, progress, context)
    for dial, (logits, trace) in zip(dials, runs, strict=True):
        metrics = model.task.scores(logits, encoded, data.labels)
        cost = Cost.of(trace, model.backbone)
        points.append(OperatingPoint(dial, metrics[model.task.main_metric], cost.total, cost.mean_depth, metrics))
    return points


def run_features(
    model: AdaptiveModel,
    features: Sequence[Feature],
    dial: float | Tensor,
    batch_size: int,
    progress: str = "",
    context: Any = None,
) -> tuple[Logits, Trace]:
    """Logits and trace of all features, in order. `dial` may be one per feature ([n])."""
    logits: list[Tensor] = []
    traces: list[Trace] = []
    done = 0
    for inputs in windows(features, model.tokenizer.pad_token_id, batch_size, progress):
        count = len(inputs.input_ids)
        here = dial[done : done + count] if isinstance(dial, Tensor) and dial.dim() else dial
        output = model.run(inputs, here, batch_size=batch_size, context=context)
        done += count
        traces.append(output.trace)
        if output.logits.dim() == 2:
            logits.append(output.logits)
        else:  # [B, T, C]: column = position, so padding is on the right, and is not kept
            lengths = output.trace.lengths.tolist()
            logits += [row[:length].clone() for row, length in zip(output.logits, lengths, strict=True)]
    trace = Trace.concatenate(traces)
    return (logits if model.backbone.token_head is not None else torch.cat(logits)), trace


def _runs(
    model: AdaptiveModel,
    features: Sequence[Feature],
    dials: Sequence[float],
    batch_size: int,
    progress: bool,
    context: Any,
) -> Iterator[tuple[Logits, Trace]]:
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
        yield run_features(model, features, dial, batch_size, shown, context)


def within_budget(points: Sequence[OperatingPoint], budget: float) -> OperatingPoint | None:
    """The dearest point whose cost is at most `budget`, or None. Looks at costs only, never at scores."""
    affordable = [point for point in points if point.cost <= budget]
    return max(affordable, key=lambda point: point.cost, default=None)


def cheapest_within(points: Sequence[OperatingPoint], loss: float = DEFAULT_LOSS) -> OperatingPoint:
    """The cheapest point at most `loss` points (of 100) below the first, which is the full model."""
    good = [point for point in points if 100 * point.score >= 100 * points[0].score - loss]
    return min(good, key=lambda point: point.cost)
