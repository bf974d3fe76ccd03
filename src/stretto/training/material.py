"""What the stages learn from: the training examples, texts without labels, and what the full model says to both.

The full model is the one that is there when the first stage begins that is `taught`. Its answers are computed once and
kept on disk, so that a resumed run, and the stages after it, learn from the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from stretto.budget.sweep import sweep
from stretto.data import Dataset
from stretto.data.tokenise import Encoded, EncodedDataset, Feature
from stretto.methods.base import Stage
from stretto.model import AdaptiveModel
from stretto.saving.files import write_json, write_tensors
from stretto.training.processes import is_main_process, wait_for_all

ANSWERS, SCORE = "teacher.safetensors", "full_score.json"
BATCH = 64


class Material:
    """The training data of a run, stage by stage."""

    def __init__(
        self, model: AdaptiveModel, train: Encoded, unlabelled: Dataset | None, work: Path, progress: bool
    ) -> None:
        self.model, self.train, self.progress = model, train, progress
        self.texts = None if unlabelled is None else model.encode(unlabelled.texts)
        self.path, self.score_path = work / ANSWERS, work / SCORE

    def examples(self, stage: Stage) -> EncodedDataset:
        """What a stage learns from."""
        assert self.train.labels is not None
        labels, more = list(self.train.labels), self.texts
        if not stage.needs_labels:  # any will do
            features = [*self.train.features, *(more.features if more else [])]
            return EncodedDataset(features, labels + labels[:1] * (len(features) - len(labels)))
        if not stage.taught or (more is None and not stage.teacher):
            return EncodedDataset(self.train.features, labels)
        said = self.answers(self.train)
        if more is None:
            return EncodedDataset(self.train.features, labels, teacher=said)
        guessed = self.answers(more)
        task = self.model.task
        answered = self.model.encode(more.texts, task.as_labels(task.decode(guessed, more)))
        assert answered.labels is not None
        return EncodedDataset(
            [*self.train.features, *more.features], [*labels, *answered.labels],
            teacher=[*said, *guessed], n_labelled=len(labels),
        )  # fmt: skip

    def answers(self, encoded: Encoded) -> list[Tensor]:
        """The full model's logits for each feature, [C] or [n tokens, C]."""
        name = "train" if encoded is self.train else "unlabelled"
        stored = load_file(self.path) if self.path.exists() else self.ask()
        lengths = [1 if self.of_sequences else len(feature["input_ids"]) for feature in encoded.features]
        parts = stored[name].split(lengths)
        return [part[0] for part in parts] if self.of_sequences else list(parts)

    @property
    def of_sequences(self) -> bool:
        return self.model.task.answers == "sequence"

    def full_score(self, data: Dataset, encoded: Encoded) -> float:
        """The full model's dev score."""
        if not self.score_path.exists():
            (point,) = sweep(self.model.eval(), data, [self.model.method.dial.off], progress=False, encoded=encoded)
            wait_for_all()
            if is_main_process():
                self.score_path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.score_path, point.score)
            wait_for_all()
        return float(json.loads(self.score_path.read_text(encoding="utf-8")))

    def remove(self) -> None:
        """What was kept, when the run is over."""
        for path in (self.path, self.score_path):
            path.unlink(missing_ok=True)

    def ask(self) -> dict[str, Tensor]:
        """Let the full model answer all there is, and keep it."""
        self.model.eval()
        parts = {"train": self.train, **({} if self.texts is None else {"unlabelled": self.texts})}
        said = {name: torch.cat(self.run(part.features)) for name, part in parts.items()}
        if is_main_process():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(self.path, said)
        return said

    def run(self, features: Sequence[Feature]) -> list[Tensor]:
        """[n, C] or [n tokens, C] of one feature after the other."""
        shown = "asking the full model" if self.progress else ""
        logits, _ = self.model.run_features(features, self.model.method.dial.off, BATCH, shown)
        return [part.cpu() for part in ([logits] if isinstance(logits, Tensor) else logits)]
