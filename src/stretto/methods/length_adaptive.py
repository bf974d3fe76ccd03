"""Length-Adaptive Transformer: one training, any budget.

In training every layer shortens its sequences at random. Then a search finds, for every budget, how many tokens each
layer should keep. A score decides which ones: the attention a token receives, and how strongly its word is associated
with the label. Dropped tokens get their last state back at the end, so tasks that answer every token (entities, answer
spans) work too.

Kim, Cho: *Length-Adaptive Transformer: Train Once with Length Drop, Use Anytime with Search*, ACL 2021.

    l_{i+1} ~ U((1 - p) l_i, l_i), smallest l_{i+1} = (1 - p) l_i    -> `sample_drops`, `dropped_lengths`
    LayerDrop: each layer skipped with probability p                 -> `sample_skips`
    (L_full + KL(full ‖ smallest) + Σ KL(full ‖ random)) / (n_s + 2) -> `LengthDrop.sandwich_loss`
    significance: attention received, drop between attention and FFN -> `LengthDrop.decide`, `stretto.methods.scores`
    evolutionary search                                              -> `stretto.budget.search`
    a configuration per text (open in the paper)                     -> `PerInput`, `stretto.budget.per_input`

Differs from the paper:

- Configurations are fractions of the input's length. So they apply to any input, and each sequence of a batch is
  shortened by its own length.
- By default the score is the best on the dev texts of attention received, attention plus a table of words, and a
  predictor (`select="attention"`: as published).
- LayerDrop does not apply to the full model, which is the teacher of the others.
- The configuration may differ between the sequences of a batch, like the dial. With `stretto search --per-input` a
  predictor chooses the configuration of each text after layer 1, which then keeps all tokens.

Dial: the budget. It selects the most expensive configuration whose cost on the search data was at most this (before a
search: among constant ratios). 1 is the full model.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.backbones.heads import READINGS
from stretto.errors import StrettoError
from stretto.methods.base import ANY_ANSWER, Dial, Shape, Stage, TrainingBatch
from stretto.methods.scores import KeepsBest, ScoreConfig
from stretto.methods.selection import AT_LEAST, drop_all_but, within_budget
from stretto.methods.settings import Count, Epochs, LearningRate, Share
from stretto.state import Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class LengthDropConfig(ScoreConfig):
    drop_epochs: Epochs = 5
    """Epochs of training with LengthDrop (the second stage)."""
    drop_learning_rate: LearningRate = 2e-5
    """Learning rate of the second stage."""
    length_drop: Share = 0.2
    """p: the largest fraction of its tokens that a layer may drop in training."""
    layer_drop: Share = 0.2
    """Probability with which a sub-model skips a layer in training."""
    random_models: Count = 2
    """n_s: random sub-models per step, in addition to the full and the smallest one."""


@dataclass(frozen=True)
class LengthAdaptiveConfig(LengthDropConfig):
    costs: tuple[float, ...] = ()
    """Costs of the configurations the search found, falling; written by `stretto search`."""
    frontier: tuple[tuple[float, ...], ...] = ()
    """Those configurations: for each layer the fraction of the input's tokens that it keeps."""
    prices: tuple[float, ...] = ()
    """Prices at which each text chooses its configuration; written by `stretto search --per-input`."""
    price_costs: tuple[float, ...] = ()
    """What texts cost on average at these prices, falling."""


def constant_ratio_lengths(ratio: float | Tensor, n_layers: int) -> Tensor:
    """[…, L] fractions of the input: every layer keeps `ratio` of what it gets."""
    ratios = torch.as_tensor(ratio, dtype=torch.float64).unsqueeze(-1)
    return ratios ** torch.arange(1, n_layers + 1, device=ratios.device)


def sample_drops(most: float, n_layers: int) -> Tensor:
    """[L] the fraction of its tokens that each layer drops: between 0 and `most`."""
    return most * torch.rand(n_layers, dtype=torch.float64)


def dropped_lengths(drops: Tensor, skipped: tuple[int, ...]) -> Tensor:
    """[L] the fraction of its tokens that each layer drops -> [L] fractions of the input; skipped layers drop none."""
    drops = drops.clone()
    drops[[layer - 1 for layer in skipped]] = 0
    return (1 - drops).cumprod(dim=0)


def sample_skips(probability: float, n_layers: int) -> tuple[int, ...]:
    """Layers (from 1) to skip; never all."""
    skipped = (torch.rand(n_layers) < probability).nonzero().squeeze(1).add(1).tolist()
    return tuple(skipped[:-1] if len(skipped) == n_layers else skipped)


def nominal_cost(lengths: Tensor) -> Tensor:
    """[…, L] fractions kept by each layer -> […] rough cost: attention at the old length, FFN at the new one.

    Projections of a layer take a third, its FFN two thirds, as in every usual encoder (f = 4 d)."""
    before = torch.cat([torch.ones_like(lengths[..., :1]), lengths[..., :-1]], dim=-1)
    return (before / 3 + lengths * 2 / 3).mean(dim=-1)


@dataclass(frozen=True)
class FixedLengths:
    """The context of a pass (of a training step, of a search) in which the dial does not choose the lengths."""

    fractions: Tensor
    """[L] fractions of its input that every sequence keeps."""


def count_of(fraction: Tensor, n: Tensor) -> Tensor:
    """[B] fractions of [B] tokens -> [B] tokens; rounded first: 0.8² · 25 must not be a little more than 16."""
    return (fraction * n).round(decimals=9).ceil().long().clamp(min=AT_LEAST)


class LengthDrop(KeepsBest):
    """Training that makes a model work at any length, and the selection by score."""

    verbs = frozenset({"drop"})
    points = frozenset({"between"})
    needs = ANY_ANSWER
    restore = True

    def lengths(self, dial: Tensor) -> Tensor:
        """[B] dials -> [B, L] fractions of the input that each layer keeps."""
        raise NotImplementedError

    def kept(self, n: Tensor, dial: Tensor, layer: int) -> Tensor:
        return count_of(self.lengths(dial)[:, layer - 1], n)

    def decide(self, state: State) -> Decision:
        if isinstance(state.context, FixedLengths):
            fraction = state.context.fractions[state.layer - 1].to(state.dial)
        else:
            fraction = self.fraction(state)
        came_in = state.notes_of(self).sequences.setdefault("length", state.lengths)
        count = count_of(fraction, came_in)
        if bool((count >= state.lengths).all()):
            return Decision()
        score = self.score(state, count < state.lengths)
        return Decision(drop=drop_all_but(count, score, state), score=score)

    def fraction(self, state: State) -> Tensor:
        """[B] the fraction of its input that each sequence keeps in this layer."""
        return self.lengths(state.dial)[:, state.layer - 1]

    def stages(self) -> list[Stage]:
        config = self.config
        drop = Stage(
            "drop", config.drop_epochs, config.drop_learning_rate, decides=True, dials=self.dev_dials(),
            objective=self.sandwich_loss, prepare=self.count_words, choose=self.choose if self.chooses else None,
        )  # fmt: skip
        return [self.finetuning(), *self.score_stages(), drop]

    def dev_dials(self) -> tuple[float, ...]:
        """The full model and one at about half its cost decide which checkpoint is best."""
        return (self.dial.off, self.dial.sweep[len(self.dial.sweep) // 2])

    def sandwich_loss(self, batch: TrainingBatch) -> Tensor:
        config, n_layers = self.config, self.shape.n_layers
        full = batch.run(self.dial.off).logits
        loss = self.loss(full, batch.targets).mean()
        smallest = torch.full((n_layers,), config.length_drop, dtype=torch.float64)
        samples = [sample_drops(config.length_drop, n_layers) for _ in range(config.random_models)]
        for drops in (smallest, *samples):
            skipped = sample_skips(config.layer_drop, n_layers)
            lengths = FixedLengths(dropped_lengths(drops, skipped))
            student = batch.run(self.dial.off, skip=skipped, context=lengths).logits
            loss = loss + self.task.distillation(student, full.detach(), batch.labels).mean()
        return loss / (config.random_models + 2)


class PerInput(nn.Module):
    """Which configuration suits a text, predicted from the mean of its rows after layer 1.

    A linear map predicts how far each configuration is from the full model's answer (the logarithm of the divergence).
    A text takes the one with the least divergence + price · cost; the dial sets the price."""

    def __init__(self, config: LengthAdaptiveConfig, d: int, costs: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(d, len(costs) - 1)  # the full model is no distance away
        self.costs = costs  # [F + 1]
        self.prices = torch.tensor([0.0, *config.prices], dtype=torch.float64)  # [P + 1]
        self.budgets = torch.tensor([1.0, *config.price_costs], dtype=torch.float64)  # [P + 1]

    @property
    def macs(self) -> int:
        return self.linear.in_features * self.linear.out_features

    def distances(self, pooled: Tensor) -> Tensor:
        """[B, d] -> [B, F + 1] predicted divergence; a cheaper configuration is never predicted to be closer."""
        predicted = self.linear(pooled).double().exp().cummax(dim=-1).values
        return torch.cat([torch.zeros_like(predicted[:, :1]), predicted], dim=-1)

    def choose(self, pooled: Tensor, budget: Tensor) -> Tensor:
        """[B, d], [B] -> [B] index of a configuration."""
        price = self.prices.to(budget.device)[within_budget(self.budgets, budget)]
        return (self.distances(pooled) + price.unsqueeze(-1) * self.costs.to(budget.device)).argmin(dim=-1)


class LengthAdaptive(LengthDrop):
    name = "length_adaptive"
    Config = LengthAdaptiveConfig
    dial = Dial(
        "budget", "the most expensive configuration that costs at most this fraction of the full model is used",
        off=1.0, sweep=(1.0,), upper=1.0,
    )  # fmt: skip

    def __init__(self, config: LengthAdaptiveConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        if config.frontier:
            check_frontier(config, shape.n_layers)
            frontier = torch.tensor(config.frontier, dtype=torch.float64)
            costs = torch.tensor(config.costs, dtype=torch.float64)
        else:
            frontier = constant_ratio_lengths(torch.linspace(0.98, 0.7, 15, dtype=torch.float64), shape.n_layers)
            costs = nominal_cost(frontier)
        # [F + 1, L] and [F + 1], from expensive to cheap; the full model is always included
        self.frontier = torch.cat([torch.ones(1, shape.n_layers, dtype=torch.float64), frontier])
        self.costs = torch.cat([torch.ones(1, dtype=torch.float64), costs])
        self.dial = dataclasses.replace(type(self).dial, sweep=tuple(self.costs.tolist()))
        # searched lengths are ordered by their mean cost: a single text may cost more with the next one
        self.monotone = not config.frontier
        self.per_input: PerInput | None = None
        if config.prices:
            self.per_input = PerInput(config, shape.d, self.costs)
            self.points = frozenset({"between", "after"})
            self.dial = dataclasses.replace(self.dial, sweep=tuple(self.per_input.budgets.tolist()))

    def changed(self, **settings: Any) -> LengthAdaptive:
        """A copy with other configurations that scores tokens in the same way."""
        other = LengthAdaptive(dataclasses.replace(self.config, **settings), self.shape, self.task)
        other.scores = self.scores
        return other.eval()

    def lengths(self, dial: Tensor) -> Tensor:
        return self.frontier.to(dial.device)[within_budget(self.costs, dial)]

    def decide(self, state: State) -> Decision:
        if state.point == "between":
            return super().decide(state)
        if self.per_input is not None and state.layer == 1 and not isinstance(state.context, FixedLengths):
            asked = state.dial != self.dial.off  # sequences that run in full do not use the predictor
            choice = self.per_input.choose(READINGS["mean"].of_rows(state.rows, state), state.dial)
            state.notes_of(self).sequences["choice"] = torch.where(asked, choice, 0)
            state.add_macs(asked * self.per_input.macs)
        return Decision()

    def fraction(self, state: State) -> Tensor:
        if self.per_input is None:
            return super().fraction(state)
        if state.layer == 1:  # nothing is known of the text yet
            return torch.ones_like(state.dial)
        return self.frontier.to(state.dial.device)[state.notes_of(self).sequences["choice"], state.layer - 1]


def check_frontier(config: LengthAdaptiveConfig, n_layers: int) -> None:
    fits = (
        len(config.prices) == len(config.price_costs)
        and all(dear > cheap for dear, cheap in itertools.pairwise((1.0, *config.price_costs)))
        and len(config.costs) == len(config.frontier)
        and all(len(lengths) == n_layers for lengths in config.frontier)
        and all(dear > cheap for dear, cheap in itertools.pairwise((1.0, *config.costs)))
        and all(
            1 >= before >= after > 0
            for lengths in config.frontier
            for before, after in itertools.pairwise((1.0, *lengths))
        )
    )
    if not fits:
        raise StrettoError(
            f"Expected a frontier of falling costs below 1, each with {n_layers} fractions that do not rise, got "
            f"{len(config.costs)} costs and {len(config.frontier)} configurations. Let `stretto search` write it."
        )
