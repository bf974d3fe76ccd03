"""A method's notes on each training token, computed once before a stage and kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm.auto import tqdm

from stretto.data.tokenise import EncodedDataset, as_inputs, collate
from stretto.errors import StrettoError
from stretto.methods.base import TEXT_NOTE, Batches, Notes, Stage
from stretto.methods.combine import above_drawn
from stretto.model import AdaptiveModel
from stretto.saving.files import write_tensors
from stretto.state import Inputs
from stretto.training.processes import is_main_process

BATCH = 32
#: The weights of the best checkpoints of a stage that keeps several.
BEST = "best-{}.safetensors"


def with_notes(
    model: AdaptiveModel, stage: Stage, data: EncodedDataset, folder: Path, progress: bool
) -> EncodedDataset:
    """The training examples with the method's notes on their tokens; loaded if an earlier run wrote them."""
    path = folder / "notes.safetensors"
    if stage.prepare is None:
        return data
    if path.exists():
        notes = unpack(load_file(path), data)
    else:
        model.eval()
        batches = LabelledBatches(data, model.tokenizer.pad_token_id, f"preparing {stage.name}" if progress else "")
        kept = sorted(folder.parent.glob(f"*/{BEST.format('*')}"))[: stage.noted_by]
        notes = mean_notes(model, above_beneath(stage, stage.prepare), batches, kept)
        check_notes(notes, data)
        if notes and is_main_process():
            folder.mkdir(parents=True, exist_ok=True)
            stored = {name: v if isinstance(v, Tensor) else torch.cat(v) for name, v in notes.items()}
            write_tensors(path, stored)
    return data.with_notes(notes) if notes else data


def above_beneath(stage: Stage, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a stage; in a combination it sees what the part beneath has shortened."""
    return hook if stage.beneath is None else partial(hook, above=above_drawn(stage.beneath))


def mean_notes(
    model: AdaptiveModel, prepare: Callable[[Any, Batches], Notes], batches: Batches, kept: Sequence[Path]
) -> Notes:
    """The notes of the model as it is; if checkpoints are `kept`, the mean of theirs."""
    if len(kept) < 2:
        return prepare(model.reference, batches)
    now = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for path in kept:
        model.load_state_dict(load_file(path))
        found.append(prepare(model.reference, batches))
    model.load_state_dict(now)
    return {name: mean_note([notes[name] for notes in found]) for name in found[0]}


def mean_note(found: Sequence[list[Tensor] | Tensor]) -> list[Tensor] | Tensor:
    if isinstance(found[0], Tensor):
        return torch.stack([each for each in found if isinstance(each, Tensor)]).mean(dim=0)
    return [torch.stack(each).mean(dim=0) for each in zip(*found, strict=True)]


@dataclass(frozen=True)
class LabelledBatches:
    """The examples in order, with their labels; can be iterated several times."""

    data: EncodedDataset
    pad_token_id: int
    progress: str
    """What the progress bar is called; '' shows none."""

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        pad = collate(self.pad_token_id)
        starts = range(0, len(self.data), BATCH)
        for start in tqdm(starts, desc=self.progress, disable=not self.progress, leave=False):
            batch = pad([self.data[i] for i in range(start, min(start + BATCH, len(self.data)))])
            labels = batch.pop("labels")
            for name in ("example_id", "teacher", "known"):
                batch.pop(name, None)
            yield as_inputs(batch), labels


def check_notes(notes: Notes, data: EncodedDataset) -> None:
    lengths = [len(feature["input_ids"]) for feature in data.features]
    for name, values in notes.items():
        if len(values) != len(lengths):
            raise StrettoError(
                f"Expected a note '{name}' on each of {len(lengths)} examples, got {len(values)}. "
                "Return one tensor per example from prepare(), in order."
            )
        if isinstance(values, Tensor):
            continue
        for index, (value, length) in enumerate(zip(values, lengths, strict=True)):
            if len(value) != length:
                raise StrettoError(
                    f"Expected a note '{name}' on each of the {length} tokens of example {index}, got {len(value)}. "
                    "Leave out the padding."
                )


def unpack(stored: dict[str, Tensor], data: EncodedDataset) -> Notes:
    """Notes on tokens are stored end to end, in the order of the example ids; notes on texts as they are."""
    lengths = [len(feature["input_ids"]) for feature in data.features]
    return {
        name: values if name.startswith(TEXT_NOTE) else list(values.split(lengths)) for name, values in stored.items()
    }
