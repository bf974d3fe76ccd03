"""A frozen backbone runs once: its pooled states are the examples its exits learn from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.budget.sweep import batches
from stretto.data.tokenise import EncodedDataset, as_tensor
from stretto.engine.replay import record
from stretto.model import AdaptiveModel

#: A frozen backbone's pooled states are kept in memory up to this size; beyond it they are computed at each step.
RECORDING_LIMIT_BYTES = 4e9


class Recorded(torch.utils.data.Dataset[dict[str, Any]]):
    """The frozen backbone's states as training examples."""

    def __init__(self, pooled: Tensor, first: Tensor, labels: Tensor) -> None:
        self.pooled, self.first, self.labels = pooled, first, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pooled": self.pooled[index], "first": self.first[index], "labels": self.labels[index]}


def recording_fits(model: AdaptiveModel, examples: dict[str, EncodedDataset]) -> bool:
    per_example = 4 * model.backbone.d * model.backbone.n_layers
    return per_example * sum(map(len, examples.values())) <= RECORDING_LIMIT_BYTES


def record_examples(model: AdaptiveModel, data: EncodedDataset, progress: bool) -> Recorded:
    """Run the frozen backbone once over all examples."""
    assert model.method.exits is not None
    model.eval()
    pad = model.tokenizer.pad_token_id
    recording = record(model.packed, model.method.exits, batches(data.features, pad, 64, "reading" if progress else ""))
    assert data.labels is not None
    return Recorded(recording.pooled.cpu(), recording.first.cpu(), as_tensor(data.labels))
