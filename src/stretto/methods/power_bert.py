"""PoWER-BERT: every layer keeps a fixed number of tokens, found by gradient descent.

A search learns how many tokens each layer needs. The output of the token with the k-th highest significance is
multiplied by a learned weight, and a penalty pushes all weights to 0. The sum of a layer's weights is the number of
tokens it keeps. Then the model is trained again with the other tokens removed.

Goyal, Choudhury, Raje, Chakaravarthy, Sabharwal, Verma: *PoWER-BERT: Accelerating BERT Inference via Progressive
Word-vector Elimination*, ICML 2020.

    significance of a token: attention it receives                  -> `stretto.methods.scores`
    soft extraction: output x r_l[place], 0 <= r <= 1               -> `places`, `soft_extract`
    loss + λ Σ_l (l / L) Σ_k r_l[k]                                 -> `elimination_penalty`, `PowerBERT.search_loss`
    l_j = round Σ_k r_j[k], at least 2, never rising                -> `configuration`
    hard extraction: protected tokens and the best l_j - 1 others   -> `PowerBERT.decide`

Differs from the paper:

- By default the score is the best on the dev texts of attention received, attention plus a table of words, and a
  predictor (`select="attention"`: as published). Attention of a token to itself is included, padding is not.
- Tokens that must not be dropped share place 0, whose weight is fixed at 1.
- Layer numbers are divided by L. So λ is what a token in the last layer must be worth in loss, at any depth (the
  paper's λ times L).
- Places that no training text has start at 0. A text keeps min(l_j, n) of its n tokens. Places from `max_tokens` on
  share the last weight in the search and are dropped afterwards.
- In tasks that answer every token, a dropped token keeps its last state. The search multiplies its output by 0, so it
  keeps more tokens than needed.

Dial: the strength. 0 is the full model. At 1 every layer keeps its l_j tokens, as trained. Values between interpolate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.methods.base import ANY_ANSWER, Batches, Dial, Notes, Shape, Stage, TrainingBatch
from stretto.methods.scores import KeepsBest, ScoreConfig
from stretto.methods.selection import AT_LEAST, ranks
from stretto.methods.settings import Epochs, LearningRate, Size, Weight
from stretto.state import Decision, State
from stretto.tasks import Task

if TYPE_CHECKING:
    from stretto.engine.reference import ReferenceEngine


AS_TRAINED = 1.0  # the dial at which every layer keeps the number of tokens it was trained with


@dataclass(frozen=True)
class PowerBERTConfig(ScoreConfig):
    search_epochs: Epochs = 3
    """Epochs of the search for how many tokens each layer keeps (the second stage)."""
    search_learning_rate: LearningRate = 2e-5
    """Learning rate of the backbone while searching."""
    retention_learning_rate: LearningRate = 1e-2
    """Learning rate of the weights r that the search looks for."""
    penalty: Weight = 3e-3
    """λ: what a token in the last layer must be worth in loss. A larger value drops more tokens."""
    max_tokens: Size = 512
    """The largest number of places in the search; no layer keeps more tokens than this."""
    retrain_epochs: Epochs = 3
    """Epochs of training with the other tokens dropped (the third stage)."""
    retrain_learning_rate: LearningRate = 3e-5
    """Learning rate of the third stage."""


def places(scores: Tensor, state: State) -> Tensor:
    """[N] scores -> [N] place within the sequence: 0 for all protected rows, then 1, 2, … from the highest score on."""
    return (ranks(scores, state) - n_protected(state)[state.sequence] + 1).clamp(min=0)


def n_protected(state: State) -> Tensor:
    """[B] rows of each sequence that may not be dropped; at least 1, position 0."""
    return torch.bincount(state.sequence[state.protected], minlength=state.n_sequences)


def retention(weights: Tensor) -> Tensor:
    """[…, K] parameters -> […, K] r in [0, 1]; place 0 is always kept."""
    return torch.cat([torch.ones_like(weights[..., :1]), weights[..., 1:].clamp(0, 1)], dim=-1)


def soft_extract(r: Tensor, place: Tensor) -> Tensor:
    """[K] weights of a layer, [N] places -> [N] factor on each token's output."""
    return r[place.clamp(max=len(r) - 1)]


def elimination_penalty(r: Tensor) -> Tensor:
    """[L, K] -> Σ_l (l / L) Σ_k r_l[k]: the penalty grows with the layer."""
    layer = torch.arange(1, len(r) + 1, dtype=r.dtype, device=r.device)
    return (layer / len(r)) @ r.sum(dim=1)


def configuration(r: Tensor) -> Tensor:
    """[L, K] -> [L] tokens that each layer keeps."""
    return r.double().sum(dim=1).round().clamp(min=AT_LEAST).cummin(dim=0).values


def interpolate(n: Tensor, kept: Tensor, strength: Tensor) -> Tensor:
    """[B] tokens, tokens kept at strength 1, [B] strength -> [B] tokens kept; falls as the strength rises."""
    return (n - strength * (n - kept).clamp(min=0)).ceil().long()


class Searching:
    """The context of a training pass in which tokens are weighed instead of dropped."""


class PowerBERT(KeepsBest):
    name = "power_bert"
    Config = PowerBERTConfig
    verbs = frozenset({"drop"})
    points = frozenset({"between"})
    needs = ANY_ANSWER
    restore = True
    dial = Dial(
        "strength", "how far to go from all tokens to the number each layer was trained to keep; 0 keeps all",
        off=0.0, sweep=tuple(step / 20 for step in range(21)), upper=1.0,
    )  # fmt: skip

    def __init__(self, config: PowerBERTConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        if config.max_tokens < AT_LEAST:
            raise StrettoError(
                f"Expected max_tokens of at least {AT_LEAST}, got {config.max_tokens}. "
                "Set it to the length of the longest texts."
            )
        self.weights = nn.Parameter(torch.ones(shape.n_layers, config.max_tokens))  # r before it is clipped

    def decide(self, state: State) -> Decision | None:
        if isinstance(state.context, Searching):
            place = places(self.score(state), state)
            return Decision(output_factor=soft_extract(retention(self.weights)[state.layer - 1], place))
        present = state.lengths - n_protected(state) + 1  # [B] places, as all protected rows share one
        n = state.notes_of(self).sequences.setdefault("places", present)  # number of places at the input
        count = self.kept(n, state.dial, state.layer)
        if bool((count >= present).all()):
            return None
        significance = self.score(state, count < present)
        return Decision(drop=places(significance, state) >= count[state.sequence], score=significance)

    def kept(self, n: Tensor, dial: Tensor, layer: int) -> Tensor:
        return interpolate(n, configuration(retention(self.weights.detach()))[layer - 1], dial)

    def stages(self) -> list[Stage]:
        config = self.config
        search = Stage(
            "search", config.search_epochs, config.search_learning_rate, best_by="last", decides=True,
            dials=(AS_TRAINED,), rates=(("weights", config.retention_learning_rate),),
            objective=self.search_loss, prepare=self.prepare_search, choose=self.choose if self.chooses else None,
            after_step=self.clip_weights,
        )  # fmt: skip
        retrain = Stage(
            "retrain", config.retrain_epochs, config.retrain_learning_rate, decides=True, dials=(AS_TRAINED,),
            objective=self.loss_at(AS_TRAINED),
        )  # fmt: skip
        return [self.finetuning(), *self.score_stages(), search, retrain]

    @torch.no_grad()
    def prepare_search(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        """Places that no training text has start at 0."""
        longest = max(int(inputs.attention_mask.sum(dim=1).max()) for inputs, _ in batches)
        self.weights[:, longest:] = 0
        return self.count_words(engine, batches)

    def search_loss(self, batch: TrainingBatch) -> Tensor:
        logits = batch.run(self.dial.off, context=Searching()).logits
        loss = self.loss(logits, batch.targets).mean()
        return loss + self.config.penalty * elimination_penalty(retention(self.weights))

    @torch.no_grad()
    def clip_weights(self) -> None:
        self.weights.clamp_(0, 1)
