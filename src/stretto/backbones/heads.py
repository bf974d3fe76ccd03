"""Heads: what reads the last states of a sequence and answers.

A head reads one row of a sequence, the mean of its rows, or every row. A loaded Hugging Face model keeps its own head,
and answers as its own forward does. B sequences, T columns, N rows, d hidden size, C labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from stretto.errors import StrettoError
from stretto.state import State

# ---- what one answer is made of ----------------------------------------------------------------------------


def first_rows(rows: Tensor, state: State) -> Tensor:
    """[N, d] -> [B, d]: the row of position 0, which is never dropped."""
    return rows.index_select(0, state.starts)


def first_tokens(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """[B, T, d], [B, T] -> [B, d]: the state of position 0, for either padding side."""
    everyone = torch.arange(
        hidden.shape[0], device=hidden.device
    )  # not len(): the ONNX export would fix the batch size
    return hidden[everyone, attention_mask.long().argmax(dim=1)]


def mean_of_rows(rows: Tensor, state: State) -> Tensor:
    """[N, d] -> [B, d]"""
    everything = torch.arange(len(rows), device=rows.device)
    # segment_reduce is 4 to 7 times slower than a bag, a bag's own mean twice as slow as its sum
    return embedding_bag(everything, rows, state.starts, mode="sum") / state.lengths.unsqueeze(1)


def mean_of_tokens(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """[B, T, d], [B, T] -> [B, d]"""
    mask = attention_mask.unsqueeze(-1).bool()
    return hidden.masked_fill(~mask, 0).sum(dim=1) / mask.sum(dim=1)


class Reading(NamedTuple):
    """From the rows of a sequence to one vector, in both layouts."""

    of_rows: Callable[[Tensor, State], Tensor]
    """[N, d] -> [B, d]"""
    of_tokens: Callable[[Tensor, Tensor], Tensor]
    """[B, T, d] and a mask [B, T] -> [B, d]"""


#: By the names that settings and Hugging Face's configs have for them.
READINGS = {"cls": Reading(first_rows, first_tokens), "mean": Reading(mean_of_rows, mean_of_tokens)}


# ---- heads -------------------------------------------------------------------------------------------------


class Head(ABC):
    """Rows as `Backbone.for_head` gives them -> logits. `answer` maps what is read to logits with `modules`, whose cost
    is counted."""

    every_row: ClassVar[bool] = False
    """Whether every token gets an answer; if not, a sequence gets one."""
    first_row: ClassVar[bool] = False
    """Whether it reads position 0 alone. The last layer then updates no other row (`Run.freeze_unread`)."""

    def __init__(self, answer: Callable[[Tensor], Tensor], modules: Sequence[nn.Module] = ()) -> None:
        self.answer, self.modules = answer, modules
        linears = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
        self.macs = sum(linear.weight.numel() for linear in linears)
        """Multiply-adds of one answer."""

    def __call__(self, read: Tensor) -> Tensor:
        """[…, d] -> […, C]"""
        return self.answer(read)

    def macs_of(self, lengths: Tensor) -> Tensor:
        """[B] tokens of each sequence -> [B] multiply-adds of all its answers."""
        return torch.full_like(lengths, self.macs)

    @abstractmethod
    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        """What it reads of packed rows: [N, d] -> [B, d], or [N, d] where it reads every row."""

    @abstractmethod
    def pool_padded(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """What it reads of padded states: [B, T, d] -> [B, d], or [B, T, d] where it reads every row."""


class PoolingHead(Head):
    """One answer for a sequence."""

    reading: ClassVar[Reading]

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        return self.reading.of_rows(rows, state)

    def pool_padded(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        return self.reading.of_tokens(hidden, attention_mask)


class FirstRow(PoolingHead):
    """Reads position 0 ([CLS], <s>)."""

    first_row = True
    reading = READINGS["cls"]


class MeanOfRows(PoolingHead):
    """Reads the mean of the rows that are still there."""

    reading = READINGS["mean"]


class EveryRow(Head):
    """Answers every token; dropped ones by their last state."""

    every_row = True

    def macs_of(self, lengths: Tensor) -> Tensor:
        return lengths * self.macs

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        return rows

    def pool_padded(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        return hidden


# ---- from a Hugging Face model -----------------------------------------------------------------------------

#: Heads of sequences by `config.classifier_pooling`; models without that setting read position 0.
POOLED: dict[str, type[PoolingHead]] = {"cls": FirstRow, "mean": MeanOfRows}


def sequence_head(model: Any, classify: Callable[[Tensor], Tensor], modules: Sequence[nn.Module]) -> Head:
    """The head of a …ForSequenceClassification: `classify` ([B, d] -> [B, C]) on the rows that its config names."""
    pooling = getattr(model.config, "classifier_pooling", "cls")
    if pooling not in POOLED:
        raise StrettoError(
            f"Expected classifier_pooling to be one of {', '.join(POOLED)}; got '{pooling}'. "
            "Load a model whose classifier pools in one of these ways."
        )
    return checked(POOLED[pooling](classify, modules), model)


def token_head(model: Any) -> Head:
    """The head of a …ForTokenClassification or …ForQuestionAnswering: one Linear, by the names that all have for it."""
    linear = model.qa_outputs if hasattr(model, "qa_outputs") else model.classifier
    dropouts = [child for child in model.children() if isinstance(child, nn.Dropout)]

    def label(rows: Tensor) -> Tensor:
        for dropout in dropouts:
            rows = dropout(rows)
        return linear(rows)

    return checked(EveryRow(label, [linear]), model)


def checked(head: Head, model: Any) -> Head:
    """The head; an error if the model has other modules after its encoder."""
    known = [model.base_model, *head.modules]
    unknown = [
        name
        for name, child in model.named_children()
        if not isinstance(child, nn.Dropout) and not any(child is module for module in known)
    ]
    if unknown:
        raise StrettoError(
            f"Expected a {type(model).__name__} whose answers come from its encoder and a head that is known here, got "
            f"one that also has {', '.join(unknown)}. Its answers would be wrong. Define `head_modules` "
            "and `classify` in its backbone class."
        )
    return head
