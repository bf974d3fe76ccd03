"""What tokens are ranked by, in the methods that keep a number of them in each layer.

    attention           a_t: the attention a token receives, summed over heads and rows, as published
    attention+table     a_t / max a + w · A(word of t): plus how much its word tells of the label   -> `association`
    predictor           what a contribution predictor says                        -> `stretto.methods.contribution`

Attention alone drops words that the answer hangs on. The table is counted on the training texts and saved with the
model; looking a word up takes no arithmetic. Predictors are distilled from the saliency of the fine-tuned model, with
the backbone frozen, and are paid for. A model is trained with the score it serves with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.data.words import WordTable
from stretto.engine.reference import ReferenceEngine
from stretto.methods.base import Batches, Method, Notes, Shape, Stage, TrainingBatch
from stretto.methods.contribution import ContributionPredictors, divergence, saliency_notes
from stretto.methods.settings import Epochs, FinetuningConfig, LearningRate, Size, Weight
from stretto.methods.word_counts import rows_of, texts_with_words
from stretto.state import State
from stretto.tasks import Task

LABEL_BINS = 5  # of equal size, which take the place of labels in a regression


@dataclass(frozen=True)
class ScoreConfig(FinetuningConfig):
    """Settings shared by the methods that keep the best tokens."""

    select: Literal["attention", "attention+table", "predictor"] = "attention+table"
    """Which tokens stay: those that receive most 'attention', as published; 'attention+table', which adds how much a
    word tells of the label (texts with one label each; elsewhere it is attention alone); or those a small network, the
    'predictor', expects to contribute most."""
    table_weight: Weight = 1.0
    """Weight of the table beside attention, whose largest value in a text counts as 1."""
    predictor_size: Size = 32
    """Hidden size of a predictor."""
    predictor_epochs: Epochs = 2
    """Epochs of training the predictors, with the backbone frozen."""
    predictor_learning_rate: LearningRate = 1e-3
    """Learning rate of the predictors."""


def association(texts_with: Tensor, texts: Tensor) -> Tensor:
    """[V, C] texts of each label with the word, [C] texts of each label -> [V] how much the word tells of the label.

    √(2 Σ_c (n_c - n p_c)²) / √(n + 1), n_c of the n texts with the word having label c, and p_c of all texts. With two
    labels that are equally frequent it is |n_1 - n_0| / √(n + 1)."""
    n = texts_with.sum(dim=1, keepdim=True)
    surprise = texts_with - n * texts / texts.sum()
    return (2 * surprise.square().sum(dim=1)).sqrt() / (n.squeeze(1) + 1).sqrt()


def relative(received: Tensor, state: State) -> Tensor:
    """[N] -> [N] divided by the largest of each sequence."""
    largest = received.new_zeros(state.n_sequences).scatter_reduce(0, state.sequence, received, "amax")
    return received / largest.clamp(min=torch.finfo(received.dtype).tiny)[state.sequence]


class TokenScores(nn.Module):
    """What was counted or learned of tokens, in the form that the settings ask for."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        self.form = {name: getattr(config, name) for name in ("select", "predictor_size")}
        if config.select == "attention+table":
            self.table = WordTable(width=1)
        if config.select == "predictor":
            self.predictors = ContributionPredictors(shape, config.predictor_size)


class KeepsBest(Method):
    """Base of the methods whose layers keep a number of tokens: those with the best score."""

    config: Any

    def __init__(self, config: ScoreConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.scores = TokenScores(config, shape)
        self.reads_words = config.select == "attention+table" and task.answers == "sequence"

    def score(self, state: State, asked: Tensor | None = None) -> Tensor:
        """[N] what the tokens are ranked by; sequences that are not `asked` ([B] bool) drop none, and may get 0."""
        if self.config.select == "predictor":
            everyone = torch.ones_like(state.ids, dtype=torch.bool)
            return self.scores.predictors.ask(state, everyone if asked is None else asked)
        received = state.attention_received
        if not self.reads_words or not len(self.scores.table):
            return received
        notes = state.notes_of(self).rows
        if "told" not in notes:  # the same in all layers
            table: WordTable = self.scores.table
            rows = rows_of(table, state)
            notes["told"] = torch.where(rows < 0, 0.0, table.values[rows.clamp(min=0), 0])
        return relative(received, state) + self.config.table_weight * notes["told"]

    # ---- training

    def score_stages(self) -> list[Stage]:
        """What is to be learned of tokens before any of them is dropped."""
        config = self.config
        if config.select != "predictor":
            return []
        return [
            Stage(
                "predictors", config.predictor_epochs, 0.0, config.predictor_learning_rate, trains_backbone=False,
                best_by="last", decides=True, objective=self.predictor_loss, prepare=self.note_saliency,
            )
        ]  # fmt: skip

    def note_saliency(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        return saliency_notes(engine, self.task, batches)

    def predictor_loss(self, batch: TrainingBatch) -> Tensor:
        """Σ_l KL(saliency ‖ softmax(CP_l)), all tokens present."""
        hidden, mask = batch.engine.hidden_states(batch.inputs), batch.inputs.attention_mask.bool()
        target, loss = batch.inputs.notes["saliency"], torch.zeros((), device=mask.device)
        for states, predictor in zip(hidden, self.scores.predictors, strict=False):  # nobody reads the last ones
            share = predictor(states.detach()).squeeze(-1).masked_fill(~mask, -torch.inf).softmax(dim=1)  # [B, T]
            loss = loss + divergence(target, share).sum(dim=1).mean()
        return loss

    def count_words(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        """Fill the table from the training texts, where each has one label."""
        if not self.reads_words:
            return {}
        labels = torch.cat([labels for _, labels in batches])
        if labels.dim() == 1:
            classes, n_classes = self.task.classes(labels, LABEL_BINS)
            tally = texts_with_words(batches, classes, n_classes)
            values = association(tally.sums, torch.bincount(classes, minlength=n_classes).double())
            self.scores.table.fill(tally.keys, tally.pieces, tally.sums.sum(dim=1), values.unsqueeze(1))
        return {}
