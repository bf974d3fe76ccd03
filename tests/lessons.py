"""What small models learn in the tests of training, with the settings that let every method learn it quickly."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import TAGS, tiny_model, tiny_questions, tiny_reviews, tiny_tagging

from stretto import AdaptiveModel, train
from stretto.data import Dataset
from stretto.methods import METHODS
from stretto.tasks import Span, Task, Tokens

QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 16}
#: What models learn from: (examples, seed) -> data.
LESSONS: dict[str, Callable[[int, int], Dataset]] = {
    "reviews": tiny_reviews, "tagging": tiny_tagging, "questions": functools.partial(tiny_questions, no_answer=True),
}  # fmt: skip
#: Training and dev examples.
SIZES = {"reviews": (128, 48), "tagging": (96, 32), "questions": (96, 32)}


def settings_of(method: str) -> dict[str, Any]:
    epochs = {"num_train_epochs": 6, "learning_rate": 2e-3}
    if METHODS[method].uses_exits:
        epochs |= {"exit_epochs": 6, "exit_learning_rate": 5e-3}
    known = {field.name for field in dataclasses.fields(METHODS[method].Config)}
    further = {
        "joint_epochs": 6, "joint_exit_learning_rate": 5e-3, "drop_epochs": 3, "drop_learning_rate": 1e-3,
        "adaptive_epochs": 3, "adaptive_learning_rate": 5e-4,
        "gate_epochs": 6, "gate_learning_rate": 5e-4, "depth_penalty": 0.2,
        "search_epochs": 3, "retention_learning_rate": 0.1, "retrain_epochs": 3, "retrain_learning_rate": 1e-3,
        "depth_epochs": 3, "depth_learning_rate": 1e-3, "head_learning_rate": 5e-3,
    }  # fmt: skip
    epochs |= {name: value for name, value in further.items() if name in known}
    if method == "layer_drop":
        epochs |= {"layer_drop": 0.5, "drop_epochs": 12}  # to be pruned to half of the layers
    if method == "adapler":
        epochs |= {"num_train_epochs": 12}  # with fewer, what three stages have learned in the end depends on the seed
    if method == "alberta":
        epochs |= {"predictor_learning_rate": 0.02}  # in so few steps gates would hardly move
    return epochs


def learner(method: str = "deebert", **settings: Any) -> AdaptiveModel:
    return tiny_model(method, **{**settings_of(method), **settings})


def task_of(lesson: str) -> Task | None:
    if lesson == "tagging":
        return Tokens(TAGS)
    return Span.posed_by(LESSONS[lesson](96, 0), stride=4) if lesson == "questions" else None


def taught(model: AdaptiveModel, lesson: str, output: Path, skip: tuple[str, ...] = ()) -> AdaptiveModel:
    data, (n_train, n_dev) = LESSONS[lesson], SIZES[lesson]
    return train(model, data(n_train, 0), data(n_dev, 1), output, skip=skip, **QUICK)
