"""Methods, logits and batches for tests of equations on numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny import tiny_backbone
from torch import Tensor

from stretto.engine.reference import ReferenceEngine
from stretto.methods import METHODS, Shape, Targets, TrainingBatch
from stretto.state import Inputs, Output, Trace
from stretto.tasks import Classification

SHAPE = Shape(d=4, n_layers=3, n_labels=2)
TASK = Classification(["no", "yes"])


def build(name: str, shape: Shape = SHAPE, **settings: Any) -> Any:
    return METHODS[name](METHODS[name].Config(**settings), shape, TASK)


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def training_batch(run: Callable[..., Tensor], labels: list[int]) -> TrainingBatch:
    """A batch whose runs give the logits that `run` says."""
    tokens = torch.ones(len(labels), 5, dtype=torch.long)
    trace = Trace(*(torch.zeros(len(labels), *shape, dtype=torch.long) for shape in ((), (3,), (3,), (3,), (), (3,))))
    engine = ReferenceEngine(tiny_backbone("bert"))
    return TrainingBatch(
        Inputs(tokens, tokens),
        Targets(torch.tensor(labels)),
        lambda *a, **n: Output(run(*a, **n), trace),
        0,
        0.0,
        engine,
    )
