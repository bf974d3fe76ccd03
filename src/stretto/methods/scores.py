"""Scores that rank tokens, for the methods that keep a number of them in each layer.

    attention           a_t: the attention a token receives, summed over heads and rows, as published
    attention+table     a_t / max a + w · A(word of t): plus the association of its word with the label -> `association`
    predictor           the output of a contribution predictor                    -> `stretto.methods.contribution`
    auto                the one of these that is best on the dev texts            -> `KeepsBest.choose`

Attention alone drops words that the answer depends on. The table is counted on the training texts and saved with the
model; looking a word up takes no arithmetic. Predictors are distilled from the saliency of the fine-tuned model, with
the backbone frozen; their cost is counted. Training and inference use the same score: with `auto` it is chosen on the
fine-tuned model, before tokens are dropped in training. All scores are compared at the same lengths of the dev texts.
The score with answers closest to the full model's (mean divergence) wins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.data.words import WordTable
from stretto.engine.decider import Decider, Silent
from stretto.engine.reference import ReferenceEngine
from stretto.methods.base import Batches, Method, Notes, Shape, Stage, TrainingBatch
from stretto.methods.contribution import ContributionPredictors, divergence, saliency_notes
from stretto.methods.selection import AT_LEAST, drop_all_but
from stretto.methods.settings import Epochs, FinetuningConfig, LearningRate, Size, Weight
from stretto.methods.word_counts import rows_of, texts_with_words
from stretto.state import Decision, Point, State
from stretto.tasks import Task

LABEL_BINS = 5  # bins of equal size, which replace labels in a regression
CANDIDATES = ("attention", "attention+table", "predictor")  # if equally good, the first: it costs least
LAST = (0.5, 0.25, 0.1)  # fractions of the tokens that the last layer keeps while they are compared


@dataclass(frozen=True)
class ScoreConfig(FinetuningConfig):
    """Settings shared by the methods that keep the best tokens."""

    select: Literal["auto", "attention", "attention+table", "predictor"] = "auto"
    """Which tokens stay: those that receive most 'attention', as published; 'attention+table', which adds how strongly
    a word is associated with the label (texts with one label each; elsewhere it is attention alone); those that a small
    network, the 'predictor', expects to contribute most; or 'auto', the best of these on the dev texts, after the
    fine-tuning."""
    table_weight: Weight = 1.0
    """Weight of the table beside attention, whose largest value in a text counts as 1."""
    predictor_size: Size = 32
    """Hidden size of a predictor."""
    predictor_epochs: Epochs = 2
    """Epochs of training the predictors, with the backbone frozen."""
    predictor_learning_rate: LearningRate = 1e-3
    """Learning rate of the predictors."""


def association(texts_with: Tensor, texts: Tensor) -> Tensor:
    """[V, C] texts of each label with the word, [C] texts of each label -> [V] association of the word with the label.

    √(2 Σ_c (n_c - n p_c)²) / √(n + 1), n_c of the n texts with the word having label c, and p_c of all texts. With two
    labels that are equally frequent it is |n_1 - n_0| / √(n + 1)."""
    n = texts_with.sum(dim=1, keepdim=True)
    surprise = texts_with - n * texts / texts.sum()
    return (2 * surprise.square().sum(dim=1)).sqrt() / (n.squeeze(1) + 1).sqrt()


class Shortened(Silent):
    """Drops tokens by the score of a method, the same number whatever the score: layer l of L keeps
    1 - (1 - last) l / L of them."""

    points: frozenset[Point] = frozenset({"between"})
    restore = True

    def __init__(self, method: KeepsBest, last: float) -> None:
        super().__init__()
        self.method, self.last = method, last

    def decide(self, state: State) -> Decision:
        came_in = state.notes_of(self).sequences.setdefault("length", state.lengths)
        fraction = 1 - (1 - self.last) * state.layer / self.method.shape.n_layers
        count = (came_in * fraction).ceil().long().clamp(min=AT_LEAST)
        return Decision(drop=drop_all_but(count, self.method.score(state), state))


def relative(received: Tensor, state: State) -> Tensor:
    """[N] -> [N] divided by the largest of each sequence."""
    largest = received.new_zeros(state.n_sequences).scatter_reduce(0, state.sequence, received, "amax")
    return received / largest.clamp(min=torch.finfo(received.dtype).tiny)[state.sequence]


class TokenScores(nn.Module):
    """The table or the predictors, as the settings require, and the score in use."""

    chosen: Tensor
    """With 'auto': the number of the score in use among `CANDIDATES`."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        self.ranks_by: str = "attention+table" if config.select == "auto" else config.select
        self.form = {name: getattr(config, name) for name in ("select", "predictor_size")}
        if config.select in ("auto", "attention+table"):
            self.table = WordTable(width=1)
        if config.select in ("auto", "predictor"):
            self.predictors = ContributionPredictors(shape, config.predictor_size)
        if config.select == "auto":
            self.register_buffer("chosen", torch.tensor(CANDIDATES.index(self.ranks_by)))

    @torch.no_grad()
    def pick(self, name: str) -> None:
        """Rank tokens by this score from now on; it is saved with the model."""
        self.ranks_by = name
        self.chosen.fill_(CANDIDATES.index(name))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if "chosen" in self._buffers and f"{prefix}chosen" in state_dict:
            self.pick(CANDIDATES[int(state_dict[f"{prefix}chosen"])])


class KeepsBest(Method):
    """Base of the methods whose layers keep a number of tokens: those with the best score."""

    config: Any

    def __init__(self, config: ScoreConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.scores = TokenScores(config, shape)
        self.reads_words = config.select in ("auto", "attention+table") and task.answers == "sequence"

    @property
    def chooses(self) -> bool:
        """Whether the score is chosen on the dev texts. Not for written texts: their tokens cannot be compared."""
        return self.config.select == "auto" and self.task.answers != "text"

    @property
    def ranks_by(self) -> str:
        """The score in use: the one of the settings, or the one that was chosen."""
        return self.scores.ranks_by

    def found(self) -> dict[str, str]:
        return {"tokens ranked by": f"{self.ranks_by}, chosen on dev data"} if self.chooses else {}

    def score(self, state: State, asked: Tensor | None = None) -> Tensor:
        """[N] what the tokens are ranked by; sequences that are not `asked` ([B] bool) drop none, and may get 0."""
        ranks_by = self.ranks_by
        if ranks_by == "predictor":
            everyone = torch.ones_like(state.ids, dtype=torch.bool)
            return self.scores.predictors.ask(state, everyone if asked is None else asked)
        received = state.attention_received
        if ranks_by == "attention" or not self.reads_words or not len(self.scores.table):
            return received
        notes = state.notes_of(self).rows
        if "association" not in notes:  # the same in all layers
            table: WordTable = self.scores.table
            rows = rows_of(table, state)
            notes["association"] = torch.where(rows < 0, 0.0, table.values[rows.clamp(min=0), 0])
        return relative(received, state) + self.config.table_weight * notes["association"]

    # ---- training

    def score_stages(self) -> list[Stage]:
        """The stages that train the score, before any token is dropped."""
        config = self.config
        if config.select != "predictor" and not self.chooses:
            return []
        return [
            Stage(
                "predictors", config.predictor_epochs, 0.0, config.predictor_learning_rate, trains_backbone=False,
                best_by="last", decides=True, objective=self.predictor_loss, prepare=self.note_saliency,
            )
        ]  # fmt: skip

    def choose(self, distance: Callable[[Decider], float]) -> None:
        """Keep the score with answers closest to the full model's: `distance` is measured on the dev texts."""
        found: dict[str, float] = {}
        for name in CANDIDATES:
            if name != "attention+table" or self.reads_words:
                self.scores.pick(name)
                found[name] = sum(distance(Shortened(self, last)) for last in LAST)
        self.scores.pick(min(found, key=found.__getitem__))

    def note_saliency(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        return saliency_notes(engine, self.task, batches)

    def predictor_loss(self, batch: TrainingBatch) -> Tensor:
        """Σ_l KL(saliency ‖ softmax(CP_l)), all tokens present."""
        hidden, mask = batch.engine.hidden_states(batch.inputs), batch.inputs.attention_mask.bool()
        target, loss = batch.inputs.notes["saliency"], torch.zeros((), device=mask.device)
        for states, predictor in zip(hidden, self.scores.predictors, strict=False):  # the last states are not read
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
