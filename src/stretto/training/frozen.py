"""A frozen backbone runs once: its pooled states are the training examples of the exits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.data.batches import batches
from stretto.data.tokenise import EncodedDataset, as_tensor
from stretto.engine.replay import alone, record
from stretto.methods.base import Method
from stretto.methods.combine import above_drawn
from stretto.model import AdaptiveModel

#: A frozen backbone's pooled states are kept in memory up to this size; beyond it they are computed at each step.
RECORDING_LIMIT_BYTES = 4e9


class Recorded(torch.utils.data.Dataset[dict[str, Any]]):
    """The frozen backbone's states as training examples."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors["labels"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.tensors.items()}


def recording_fits(model: AdaptiveModel, examples: dict[str, EncodedDataset]) -> bool:
    per_example = 4 * model.backbone.d * model.backbone.n_layers
    return per_example * sum(map(len, examples.values())) <= RECORDING_LIMIT_BYTES


def record_examples(model: AdaptiveModel, data: EncodedDataset, beneath: Method | None, progress: bool) -> Recorded:
    """Run the frozen backbone once over all examples. A method `beneath` shortens each at a dial drawn for it."""
    assert model.method.exits is not None
    model.eval()
    pad = model.tokenizer.pad_token_id
    assert data.labels is not None
    above = alone if beneath is None else above_drawn(beneath)
    shown = batches(data.features, pad, 64, "reading" if progress else "")
    recording = record(model.packed, model.method.exits, shown, above)
    tensors = {"pooled": recording.pooled.cpu(), "last": recording.last.cpu(), "labels": as_tensor(data.labels)}
    if data.teacher is not None:
        tensors["teacher"] = torch.stack(list(data.teacher))
    if data.n_labelled is not None:
        tensors["known"] = torch.arange(len(data)) < data.n_labelled
    tensors |= {name: values for name, values in data.notes.items() if isinstance(values, Tensor)}
    return Recorded(tensors)
