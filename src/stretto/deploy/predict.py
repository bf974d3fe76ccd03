"""Answering files and streams: records in, rows out, in order and in bounded memory."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from stretto.data.records import Record, Records
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel, Prediction

#: The input's columns, the answer, its depth and cost.
Row = dict[str, Any]


class Predictor:
    """A model, its settings for answering, and the totals of its answers so far."""

    def __init__(
        self, model: AdaptiveModel, dial: float | None = None, *, budget: str | None = None, batch_size: int = 32,
        probabilities: bool = False,
    ) -> None:  # fmt: skip
        if probabilities and not (model.task.answers == "sequence" and model.task.label_names):
            raise StrettoError(
                f"Expected probabilities of a model that chooses among labels, got one for the task {model.task.name}. "
                "Leave them out."
            )
        self.model, self.dial = model, model.dials_for(dial, budget, 1).item()
        self.batch_size, self.probabilities = batch_size, probabilities
        self.count, self.truncated = 0, 0
        self.flops, self.full_flops = 0.0, 0.0

    @property
    def cost(self) -> float:
        """The cost of all answers so far together, as `evaluate` reports it."""
        return self.flops / self.full_flops

    def rows(self, records: Records | Sequence[Record]) -> Iterator[list[Row]]:
        """The rows of the answers, a few batches at a time; only these are in memory.

        If the next record is not there yet, those that have arrived are answered first."""
        waiting: deque[Record] = deque()
        ready = records.ready if isinstance(records, Records) else lambda: True

        def texts() -> Iterator[tuple[str, ...]]:
            for record in records:
                waiting.append(record)
                yield record.texts

        for group in self.model.stream(texts(), self.dial, self.batch_size, ready=ready):
            self.count += len(group.answers)
            self.truncated += group.encoded.truncated
            self.flops += float(group.cost.flops.sum())
            self.full_flops += float(group.cost.full.sum())
            yield [self.row(waiting.popleft(), answer) for answer in group.answers]

    def row(self, record: Record, prediction: Prediction) -> Row:
        answer = dataclasses.asdict(prediction)
        took = {name: answer.pop(name) for name in ("depth", "cost")}
        if not self.probabilities:
            answer.pop("probabilities", None)
        taken = record.given.keys() & {*answer, *took}
        if taken:
            raise StrettoError(
                f"{record.where}: expected columns that are not called as parts of an answer ({', '.join(answer)}, "
                f"{', '.join(took)}), got '{min(taken)}'. Rename it, or do not --keep it."
            )
        return {**record.given, **answer, **took}
