"""A task is one file and one line: this one is here, and nothing else knows of it.

Several labels for each text (comedy, drama, …), each on or off by itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from commands import run
from tiny import WORDS, tiny_encoder, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification

from stretto import AdaptiveModel, StrettoError
from stretto.data import Form
from stretto.data.labels import Labels, Numbered
from stretto.data.records import Record
from stretto.methods import METHODS
from stretto.methods.base import tasks_of
from stretto.tasks import TASKS, LabelPrediction, SequenceTask, task_from_config


class Several(Labels):
    """ "comedy+drama" -> (1, 0, 1): for each label whether it is there."""

    @classmethod
    def numbered(cls, records: Sequence[Record], names: Sequence[str] | None) -> Numbered:
        given = [str(record.label).split("+") for record in records]
        known = sorted({name for each in given for name in each}) if names is None else list(names)
        return [tuple(int(name in each) for name in known) for each in given], known


class MultiLabel(SequenceTask):
    """Logits [B, C] and labels [B, C] of 0 and 1: every label by itself."""

    name: ClassVar[str] = "multilabel"
    form: ClassVar[Form] = Form(labels=Several)
    right_or_wrong: ClassVar[bool] = True
    problem_type: ClassVar[str | None] = "multi_label_classification"
    main_metric = "exact"

    @classmethod
    def fits(cls, problem_type: str | None, label_names: Sequence[str]) -> bool:
        return problem_type == cls.problem_type

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)

    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return self.loss(student, teacher.sigmoid()) - self.loss(teacher, teacher.sigmoid())

    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits * labels).sum(dim=-1)

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ((logits > 0) == labels.bool()).all(dim=-1)

    def same_answer(self, logits: Tensor, before: Tensor, tolerance: float) -> Tensor:
        return ((logits > 0) == (before > 0)).all(dim=-1)

    def answer(self, logits: Tensor) -> list[LabelPrediction]:
        answers = []
        for row in logits.sigmoid().tolist():
            chosen = "+".join(name for name, p in zip(self.label_names, row, strict=True) if p > 0.5)
            answers.append(LabelPrediction(chosen, None, dict(zip(self.label_names, row, strict=True))))
        return answers

    def metrics(self, logits: Any, labels: Any) -> dict[str, float]:
        right = self.correct(torch.as_tensor(logits), torch.as_tensor(np.asarray(labels)))
        return {"exact": float(right.double().mean())}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    TASKS.add(MultiLabel.name, MultiLabel)
    yield
    del TASKS.entries[MultiLabel.name]


def write_films(path: Path, n: int, seed: int) -> Path:
    """What the words "good" and "city" say is to be found."""
    dice, plain = random.Random(seed), [word for word in WORDS if word not in ("good", "city")]
    rows = []
    for index in range(n):
        labels = [["fine"], ["urban"], ["fine", "urban"]][index % 3]
        words = dice.choices(plain, k=dice.randint(2, 6)) + [{"fine": "good", "urban": "city"}[x] for x in labels]
        dice.shuffle(words)
        rows.append({"text": " ".join(words), "label": "+".join(labels)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tiny_encoder("bert", 2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_task_of_ones_own_is_trained_evaluated_and_answered_from_the_command_line(
    encoder: Path, tmp_path: Path
) -> None:
    train, test = write_films(tmp_path / "train.jsonl", 150, seed=0), write_films(tmp_path / "test.jsonl", 60, seed=1)
    run("train", train, "--task", "multilabel", "--method", "lte", "--model", encoder, "--output", tmp_path / "model",
        "--learning-rate", "2e-3", "--joint-epochs", "12", "--joint-exit-learning-rate", "5e-3",
        "--per-device-train-batch-size", "16")  # fmt: skip
    points = json.loads(run("evaluate", tmp_path / "model", test, "--json").stdout)
    assert points["main_metric"] == "exact" and points["points"][0]["score"] > 0.9
    assert points["points"][-1]["cost"] < 0.5 < points["points"][-1]["score"]
    answers = run("predict", tmp_path / "model", test, "--probabilities").stdout.splitlines()
    first = json.loads(answers[2])
    assert first["label"] == "fine+urban" and set(first["probabilities"]) == {"fine", "urban"}

    model = AdaptiveModel.from_pretrained(tmp_path / "model")  # knows its task
    assert isinstance(model.task, MultiLabel) and model.task.label_names == ["fine", "urban"]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert plain.config.problem_type == "multi_label_classification"
    assert isinstance(task_from_config(plain.config), MultiLabel)
    assert model.predict("a good city", model.method.dial.off).label == "fine+urban"


def test_methods_ask_what_a_task_is_capable_of() -> None:
    can = {name for name, method in METHODS.items() if method.needs.met_by(MultiLabel)}
    assert {"lte", "pabee", "halting", "length_adaptive", "full"} <= can
    assert can.isdisjoint({"deebert", "branchynet", "shallow_deep"})  # they read a distribution over labels
    assert "multilabel" in tasks_of(METHODS["lte"])
    assert "multilabel" in run("methods", "lte").stdout


@pytest.mark.parametrize("method", ["deebert"])
def test_a_method_that_cannot_says_who_can(method: str, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"deebert can do \(classification\), got multilabel\. Methods .*: full, "):
        AdaptiveModel.from_pretrained(encoder, method, task=MultiLabel(["a", "b"]))
