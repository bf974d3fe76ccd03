"""The plan of a training: model, data and settings, stored so that a resumed run can be compared with it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from stretto.budget.default import parts_of
from stretto.data import Dataset
from stretto.data.tokenise import Encoded
from stretto.errors import StrettoError
from stretto.methods.base import Stage
from stretto.model import AdaptiveModel
from stretto.saving.digests import dataset_digest
from stretto.saving.same_run import digest, hold_to
from stretto.training.processes import is_main_process

#: Where a work folder keeps its plan.
PLAN = "plan.json"
#: What we set differently from `TrainingArguments`; anything the caller names wins.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "warmup_steps": 0.06,
    "weight_decay": 0.01,
    "optim": "adamw_torch_fused",
    "train_sampling_strategy": "group_by_length",
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_strategy": "epoch",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "report_to": "none",
    "seed": 42,
}


#: The fewest optimizer steps of a stage whose epochs were not named.
FEWEST_STEPS = 100


def enough_epochs(config: Any, named: Container[str], examples: int, arguments: dict[str, Any]) -> Any:
    """A method's Config whose stages learn for `FEWEST_STEPS` steps at least: a few hundred examples need more epochs.

    Epochs that the caller `named`, and those of stages that are off (0), stay; so do all if `max_steps` is named."""
    if arguments.get("max_steps", -1) > 0:
        return config
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = arguments["per_device_train_batch_size"] * arguments.get("gradient_accumulation_steps", 1) * processes
    fewest = math.ceil(FEWEST_STEPS / math.ceil(examples / batch))
    ours = [field.name for field in dataclasses.fields(config) if field.name.endswith("epochs")]
    raised = [name for name in ours if name not in named and 0 < getattr(config, name) < fewest]
    return dataclasses.replace(config, **dict.fromkeys(raised, float(fewest)))


def with_defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """The caller's arguments and our defaults. Without dev scores there is no best checkpoint to load."""
    unscored = {"load_best_model_at_end": False} if arguments.get("eval_strategy") == "no" else {}
    return {**DEFAULTS, **unscored, **arguments}


class Plan:
    """The plan of a training: model, data and settings, stored so that a resumed run can be compared with it."""

    def __init__(
        self,
        model: AdaptiveModel,
        stages: list[Stage],
        train_data: Dataset,
        dev_data: Dataset,
        unlabelled: Dataset | None,
        arguments: dict[str, Any],
        *,
        guarantee: bool,
    ) -> None:
        if train_data.labels is None or dev_data.labels is None:
            raise StrettoError("Expected labelled training and dev data, got unlabelled. Name the label column.")
        check_names(arguments)
        self.arguments = with_defaults(arguments)
        self.model, self.stages = model, stages
        seed = self.arguments["seed"]
        self.choosing, self.fresh = parts_of(model, dev_data, seed) if guarantee else (dev_data, None)
        parts = {"train": train_data, "dev": dev_data}
        if unlabelled is not None:
            parts["unlabelled"] = unlabelled
        self.sizes = {**{name: len(data) for name, data in parts.items()}, "choosing": len(self.choosing)}
        self.digests = {name: dataset_digest(data) for name, data in parts.items()}
        self.truncated = 0
        self.digest = ""  # when checked

    def encode(self, data: Dataset) -> Encoded:
        encoded = self.model.encode(data.texts, data.labels)
        self.truncated += encoded.truncated
        return encoded

    def written(self) -> dict[str, Any]:
        return {
            "method": self.model.method.name,
            "config": dataclasses.asdict(self.model.method.config),
            "stages": [stage.plan() for stage in self.stages],
            "arguments": self.arguments,
            "encoder": self.model.encoder.config.to_dict(),
            "attention_dropout": self.model.backbone.specs[0].attention.dropout.p,
            "max_length": self.model.max_length,
            "examples": self.sizes,
            "digests": self.digests,
            "labels": self.model.task.label_names,
            "task": {"name": self.model.task.name, **self.model.task.settings()},
        }

    def provenance(self) -> dict[str, Any]:
        """The model card's lines about the training."""
        return {
            "stages": " → ".join(f"{stage.name} ({stage.epochs:g} epochs)" for stage in self.stages) or "none",
            "training examples": self.sizes["train"],
            "dev examples": self.sizes["dev"],
            **({"texts without labels": self.sizes["unlabelled"]} if "unlabelled" in self.sizes else {}),
            "texts truncated": self.truncated,
            "seed": self.arguments["seed"],
            "operating points": "measured on the dev examples",
            "checkpoints": f"chosen on {self.sizes['choosing']} of them",
            "plan": self.digest,
        }

    def check(self, work: Path) -> None:
        """Refuse to resume the training of another plan."""
        written = self.written()
        self.digest = digest(written)
        hold_to(work / PLAN, written, what="the unfinished training", place=work, write=is_main_process())


def check_names(arguments: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(TrainingArguments)} - {"output_dir"}
    unknown = sorted(set(arguments) - known)
    if unknown:
        raise StrettoError(
            f"Expected names of transformers.TrainingArguments, got {', '.join(unknown)}. "
            "See the Hugging Face documentation for the list."
        )
