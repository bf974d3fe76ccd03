"""Shared by the methods that give each token its own depth.

A token is updated up to its depth and then frozen: its state is copied upwards, where deeper tokens still see it. When
the last token of a sequence is frozen, the sequence is answered.

Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021.

    h_t^n = layer n of h^{n-1} if n <= d(x_t), else h_t^{n-1}          -> `DepthAdaptive.decide`, Eq. 5
    n_max = max_t d(x_t): no layer above runs                          -> the engines (all tokens are frozen)
    v = ReLU([max; mean]) at n_max                                     -> `PooledHead`, Eq. 6
    the control: depths that do not depend on the word                 -> `WordDepths.drawn`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stretto.data.tokenise import NO_WORD
from stretto.data.words import Tally, WordTable
from stretto.engine.decider import OwnHead
from stretto.errors import StrettoError
from stretto.methods.base import Method, Shape, Stage, TrainingBatch
from stretto.methods.pooled_head import MeanHead, PooledHead
from stretto.methods.settings import Epochs, FinetuningConfig, LearningRate, Share
from stretto.methods.word_counts import rows_of
from stretto.state import Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class DepthConfig(FinetuningConfig):
    """Settings shared by the methods that give every token a depth."""

    depth_epochs: Epochs = 3
    """Epochs of the stage that trains with tokens frozen at their depths."""
    depth_learning_rate: LearningRate = 3e-5
    """Learning rate of the backbone in that stage."""
    head_learning_rate: LearningRate = 1e-3
    """Learning rate of the pooled head."""
    dropout: Share = 0.1
    """Dropout inside the pooled head."""
    full_share: Share = 0.2
    """Fraction of the training texts that run in full, so that the full model keeps its answers."""


@dataclass(frozen=True)
class WordDepthConfig(DepthConfig):
    """Further settings of the methods that estimate depths of words in advance."""

    head: Literal["pooled", "mean", "model"] = "pooled"
    """Which head answers with the dial on: 'pooled', which reads maximum and mean of all tokens, as published; 'mean',
    which reads the mean through a new layer, as an exit does; or 'model', the model's own."""
    special: Literal["full", "deepest"] = "full"
    """Depth of special tokens such as [CLS] and [SEP]: 'full', all layers, as published, or 'deepest', the depth of the
    deepest word of the text, so that a text of shallow words is answered early."""
    table: Literal["estimated", "random"] = "estimated"
    """Which word has which depth: as 'estimated', or 'random', the same depths shuffled over the words. The second is
    the control: what a table of depths gains without the estimate."""
    table_seed: int = 0
    """Seed of the random table."""


class DepthAdaptive(Method):
    """Freezes every token at its depth, which a method returns from `depths`."""

    verbs = frozenset({"freeze"})
    points = frozenset({"before"})
    known_after: ClassVar[int] = 0
    """The layer whose output the depths are computed from; 0: the embeddings."""

    def __init__(self, config: DepthConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.pooled_head = PooledHead(shape.d, shape.n_labels, config.dropout, self.dial.off)

    def own_head(self) -> OwnHead | None:
        return self.pooled_head

    def depths(self, state: State) -> Tensor:
        """[N] depth of each live token, 1..L, at the dial of its sequence."""
        raise NotImplementedError

    def decide(self, state: State) -> Decision | None:
        if state.layer <= self.known_after or not bool((state.dial != self.dial.off).any()):
            return None
        notes = state.notes_of(self).rows
        if "depth" not in notes:
            off = (state.dial == self.dial.off)[state.sequence]
            notes["depth"] = torch.where(off, self.shape.n_layers, self.depths(state))
        return Decision(freeze=notes["depth"] < state.layer, depth=notes["depth"])

    def depth_stage(self, dial: float) -> Stage:
        """The task's loss at this dial; some sequences, drawn again in every step, run in full."""
        config = self.config

        def objective(batch: TrainingBatch) -> Tensor:
            full = torch.rand(len(batch.labels), device=batch.labels.device) < config.full_share
            logits = batch.run(torch.where(full, self.dial.off, dial)).logits
            return self.loss(logits, batch.targets).mean()

        return Stage(
            "depths", config.depth_epochs, config.depth_learning_rate, config.head_learning_rate,
            decides=True, dials=(dial,), objective=objective,
        )  # fmt: skip


class WordDepths(DepthAdaptive):
    """Depths of words, estimated in advance and looked up in a table: nothing is predicted in inference."""

    reads_words = True
    measure: ClassVar[str]
    """The measure that the table has for each word, in words."""

    def __init__(self, config: WordDepthConfig, shape: Shape, task: Task, width: int) -> None:
        super().__init__(config, shape, task)
        self.table = WordTable(width)
        if config.head == "mean":
            self.mean_head = MeanHead(shape.d, shape.n_labels, config.dropout, self.dial.off)

    def own_head(self) -> OwnHead | None:
        if self.config.head == "model":
            return None
        return self.pooled_head if self.config.head == "pooled" else self.mean_head

    def word_measure(self) -> Tensor:
        """[V] the measure of each word of the table."""
        raise NotImplementedError

    def hardness(self, measure: Tensor) -> Tensor:
        """[V] the measure -> [V] numbers that grow with depth, to rank words of the same depth."""
        raise NotImplementedError

    def word_depths(self, rows: Tensor, dial: Tensor) -> Tensor:
        """[n] rows of the table, [n] dials -> [n] depths."""
        raise NotImplementedError

    def table_depths(self, dial: float) -> Tensor:
        """[V] the depth of every word of the table."""
        self.check_table()
        rows = torch.arange(len(self.table), device=self.table.keys.device)
        if dial == self.dial.off:
            return torch.full_like(rows, self.shape.n_layers)
        return self.word_depths(self.drawn(rows), torch.full_like(rows, dial, dtype=torch.float64))

    def drawn(self, rows: Tensor) -> Tensor:
        """[n] rows of the table -> [n] the rows whose depths these words have: their own, or those of other words."""
        if self.config.table == "estimated":
            return rows
        dice = torch.Generator().manual_seed(self.config.table_seed)
        return torch.randperm(len(self.table), generator=dice).to(rows.device)[rows]

    def check_table(self) -> None:
        if not len(self.table):
            raise StrettoError(
                f"Expected a table with the depths of words, got none: this {self.name} model has not been trained. "
                f"Train it with `stretto train --method {self.name}`, all stages."
            )

    def check_words(self, tally: Tally) -> None:
        if not len(tally.keys):
            raise StrettoError("Expected training texts with words in them, got none. Check the text column.")

    def depths(self, state: State) -> Tensor:
        self.check_table()
        rows = rows_of(self.table, state)
        depth = self.word_depths(self.drawn(rows.clamp(min=0)), state.dial[state.sequence])
        depth = torch.where(rows < 0, self.shape.n_layers, depth)  # unseen words and special tokens
        if self.config.special == "deepest":
            special = state.input_notes["word"] == NO_WORD
            of_words = torch.where(special, 0, depth)
            deepest = of_words.new_zeros(state.n_sequences).scatter_reduce(0, state.sequence, of_words, "amax")
            deepest = torch.where(deepest == 0, self.shape.n_layers, deepest)  # a text without words
            depth = torch.where(special, deepest[state.sequence], depth)
        return depth
