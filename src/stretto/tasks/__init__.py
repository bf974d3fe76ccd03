"""Tasks: what the logits mean. One file per task; adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stretto.errors import Registry, StrettoError
from stretto.tasks.base import Logits, Prediction, Task
from stretto.tasks.classification import Classification
from stretto.tasks.regression import Regression
from stretto.tasks.sequences import LabelPrediction, SequenceTask
from stretto.tasks.span import Candidate, Span, SpanPrediction
from stretto.tasks.tokens import Entity, TagPrediction, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = [
    "TASKS", "Candidate", "Classification", "Entity", "LabelPrediction", "Logits", "Prediction", "Regression",
    "SequenceTask", "Span", "SpanPrediction", "TagPrediction", "Task", "Tokens", "task_from_config",
]  # fmt: skip

TASKS: Registry[type[Task]] = Registry("task", {t.name: t for t in (Classification, Regression, Tokens, Span)})


def task_from_config(config: PreTrainedConfig, saved: Mapping[str, Any] | None = None) -> Task:
    """The task that a model tells of: what stretto wrote down (`saved`), else what its transformers config says.

    The config says it by the architecture (…ForTokenClassification, …ForQuestionAnswering), and for a
    sequence-classification or bare model: regression if it says so or has a single label."""
    labels = {int(i): name for i, name in (config.id2label or {}).items()}
    names = [labels[i] for i in sorted(labels)]
    if saved:
        settings = dict(saved)
        return TASKS[settings.pop("name")].make(names, **settings)
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForTokenClassification"):
        return Tokens(names)
    if architecture.endswith("ForQuestionAnswering"):
        return Span()
    kind = config.problem_type or "single_label_classification"
    if len(names) == 1 and kind != "multi_label_classification":
        return Regression()
    if kind == "single_label_classification":
        return Classification(names)
    raise StrettoError(
        f"Expected a model that gives each input one of several labels or one number, got {kind} with "
        f"{len(names)} outputs. Use a model for {' or '.join(TASKS)}."
    )
