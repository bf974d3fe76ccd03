"""Tasks: what a model has to answer, and what its logits mean. One file per task; adding one is a file and a line here.

Importing this package is light, so that the command line can list the tasks: a task is loaded when it is first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.errors import LazyRegistry, StrettoError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from stretto.tasks.base import Logits, Prediction, Task
    from stretto.tasks.classification import Classification
    from stretto.tasks.regression import Regression
    from stretto.tasks.seq2seq import Seq2Seq, TextPrediction
    from stretto.tasks.sequences import LabelPrediction, SequenceTask
    from stretto.tasks.span import Candidate, Span, SpanPrediction
    from stretto.tasks.tokens import Entity, TagPrediction, Tokens

DEFAULT_TASK = "classification"
TASKS: LazyRegistry[type[Task]] = LazyRegistry("task", {
    "classification": "stretto.tasks.classification.Classification",
    "regression": "stretto.tasks.regression.Regression",
    "tokens": "stretto.tasks.tokens.Tokens",
    "span": "stretto.tasks.span.Span",
    "seq2seq": "stretto.tasks.seq2seq.Seq2Seq",
})  # fmt: skip

_HOMES = {
    "base": ("Logits", "Prediction", "Task"),
    "classification": ("Classification",),
    "regression": ("Regression",),
    "seq2seq": ("Seq2Seq", "TextPrediction"),
    "sequences": ("LabelPrediction", "SequenceTask"),
    "span": ("Candidate", "Span", "SpanPrediction"),
    "tokens": ("Entity", "TagPrediction", "Tokens"),
}

__all__ = [
    "TASKS", "Candidate", "Classification", "Entity", "LabelPrediction", "Logits", "Prediction", "Regression",
    "Seq2Seq", "SequenceTask", "Span", "SpanPrediction", "TagPrediction", "Task", "TextPrediction", "Tokens",
    "task_from_config",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"stretto.tasks.{home}"), name)
    raise AttributeError(f"module 'stretto.tasks' has no attribute '{name}'")


def task_from_config(config: PreTrainedConfig, saved: Mapping[str, Any] | None = None) -> Task:
    """The task of a model: as stretto stored it (`saved`), else from its transformers config.

    The config names it by the architecture (…ForTokenClassification), its problem type and the number of labels. A bare
    encoder counts as one for sequence classification."""
    labels = {int(i): name for i, name in (config.id2label or {}).items()}
    names = [labels[i] for i in sorted(labels)]
    if saved:
        settings = dict(saved)
        return TASKS[settings.pop("name")].make(names, **settings)
    architecture = (config.architectures or [""])[0]
    heads = [task.architecture for task in TASKS.values()]
    head = next((head for head in heads if architecture.endswith(head)), heads[0])
    for task in TASKS.values():
        if task.architecture == head and task.fits(config.problem_type, names):
            return task.make(names)
    raise StrettoError(
        f"Expected a model that gives each input one of several labels or one number, got {config.problem_type} with "
        f"{len(names)} outputs. Use a model for {' or '.join(TASKS)}."
    )
