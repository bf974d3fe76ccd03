"""Tasks: what the logits mean. One file per task; adding one is a file and a line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.registry import Registry
from stretto.tasks.base import Answer, Task
from stretto.tasks.classification import Classification
from stretto.tasks.regression import Regression

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["TASKS", "Answer", "Classification", "Regression", "Task", "task_from_config", "task_named"]

TASKS: Registry[type[Task]] = Registry("task", {task.name: task for task in (Classification, Regression)})


def task_named(name: str) -> type[Task]:
    """The task class of that name, or an error that lists the names there are."""
    return TASKS[name]


def task_from_config(config: PreTrainedConfig) -> Task:
    """The task that a transformers config tells of: regression if it says so or has a single label."""
    names = {int(i): name for i, name in (config.id2label or {}).items()}
    kind = config.problem_type or "single_label_classification"
    if len(names) == 1 and kind != "multi_label_classification":
        return Regression()
    if kind == "single_label_classification":
        return Classification([names[i] for i in sorted(names)])
    raise StrettoError(
        f"Expected a model that gives each input one of several labels or one number, got {kind} with "
        f"{len(names)} outputs. Use a model for {' or '.join(TASKS)}."
    )
