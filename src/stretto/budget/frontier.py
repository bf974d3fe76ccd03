"""One dial for a combination of two methods: the best pairs of their dials.

A grid of pairs is run on a sample of the dev texts. Each pair is judged by its cost and by how far its answers are from
the full model's: the mean divergence, which needs no labels and is smoother than accuracy on a few hundred texts. The
frontier has the pairs that no other pair beats in both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from stretto.budget.evolution import pareto_frontier
from stretto.data.tokenise import Encoded, collate
from stretto.engine.cost import Cost
from stretto.errors import StrettoError
from stretto.methods import Combined
from stretto.methods.base import Dial
from stretto.model import AdaptiveModel

#: Dials tried of each part, and texts they are tried on.
FIRST_DIALS, SECOND_DIALS, TEXTS = 6, 8, 300


@dataclass(frozen=True)
class Pair:
    """A pair of dials with its measured cost and quality."""

    dials: tuple[float, float]
    cost: float
    score: float
    """Minus the mean divergence from the full model's answers."""


def spread(dial: Dial, count: int) -> list[float]:
    """Values of the sweep at even steps, off first."""
    steps = min(count, len(dial.sweep))
    if steps == 1:
        return list(dial.sweep)
    return [dial.sweep[round(step * (len(dial.sweep) - 1) / (steps - 1))] for step in range(steps)]


def set_frontier(model: AdaptiveModel, dev: Encoded, *, texts: int = TEXTS, progress: bool = True) -> None:
    """Give the model's combination the frontier found on the first `texts` features of the dev data."""
    method = model.method
    if not isinstance(method, Combined):
        raise StrettoError(
            f"Expected a combination such as length_adaptive+deebert, got {method.name}. Name two methods."
        )
    features = dev.features[:texts]
    labels = collate(model.tokenizer.pad_token_id)(
        [{"input_ids": f["input_ids"], "labels": y} for f, y in zip(features, dev.labels or [], strict=False)]
    )["labels"]
    grid = [
        (first, second)
        for first in spread(method.first.dial, FIRST_DIALS)
        for second in spread(method.second.dial, SECOND_DIALS)
    ]
    found: list[Pair] = []
    teacher = None
    for first, second in tqdm(grid, desc="combining dials", disable=not progress, leave=False):
        method.set_frontier([0.5], [[first, second]])  # the cheaper of two points
        logits, trace = model.run_features(features, 0.5, batch_size=32)
        answers = torch.nn.utils.rnn.pad_sequence(list(logits), batch_first=True)
        teacher = answers if teacher is None else teacher  # the first pair is (off, off)
        divergence = model.task.distillation(answers, teacher, labels).mean()
        found.append(Pair((first, second), Cost.of(trace, model.backbone).total, -float(divergence)))
    chosen = [pair for pair in pareto_frontier(found) if pair.cost < 1]
    costs, frontier = tuple(pair.cost for pair in chosen), tuple(pair.dials for pair in chosen)
    method.config = dataclasses.replace(method.config, costs=costs, frontier=frontier)
    method.set_frontier(costs, frontier)
