"""Halting unit: one look at the bottom layer decides how deep a sequence goes.

A head on the first layer's output predicts the depth at which the answer will be right; the sequence runs to
that depth without asking again. The oracle depth comes from correctness: the shallowest exit that is right,
when each further layer costs λ.

The baseline of Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021 (sequence level),
after Elbayad, Gu, Grave, Auli: *Depth-Adaptive Transformer*, ICLR 2020.

    oracle depth = argmax_n (C^n - λ n), C^n = [exit n is right]     -> `oracle_depth`
    L_halt = H(oracle, q), q = softmax(W x_1 + b)                    -> `Halting.halting_loss`
    run to the smallest n with Σ_{m<=n} q_m >= dial                  -> `depth_at_quantile`

Differs from the paper: the papers take argmax q, which leaves nothing to turn; here a quantile of q is taken, so that
one dial spans full depth to one layer; exits train on the frozen fine-tuned backbone (as DeeBERT's), so the final
answer is untouched; an example no exit gets right has oracle depth 1, as the formula says. Exits answer for the oracle
with dropout, as they do while they learn.

Dial: the probability with which the predicted depth must suffice. 1 is the full model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.methods.base import Dial, Needs, Pass, Shape, Stage, spaced
from stretto.methods.deebert import DeeBERT
from stretto.methods.exits import ExitConfig
from stretto.methods.settings import Weight
from stretto.state import Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class HaltingConfig(ExitConfig):
    penalty: Weight = 0.05
    """λ: what one more layer must be worth in correctness (0 to 1)."""


def oracle_depth(correct: Tensor, penalty: float) -> Tensor:
    """[L, B] bool, exit n right? -> [B] depth 1..L = argmax_n (C^n - λ n); ties go to the shallower."""
    n = torch.arange(1, len(correct) + 1, device=correct.device).unsqueeze(1)
    return (correct.double() - penalty * n).argmax(dim=0) + 1


def depth_at_quantile(logits: Tensor, quantile: Tensor) -> Tensor:
    """[B, L], [B] -> [B] smallest depth whose cumulated probability reaches the quantile; quantile 1 is depth L."""
    cumulated = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    depth = (cumulated < quantile.unsqueeze(-1)).sum(dim=-1) + 1
    return torch.where(quantile >= 1, logits.shape[-1], depth).clamp(max=logits.shape[-1])


class Halting(DeeBERT):
    name = "halting"
    Config = HaltingConfig
    needs = Needs(right_or_wrong=True)
    dial = Dial(
        "quantile",
        "run to the depth that suffices with this probability; 1 runs to the end",
        off=1.0,
        sweep=spaced(1.0, 0.0),
        upper=1.0,
    )

    def __init__(self, config: HaltingConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.predictor = nn.Linear(shape.d, shape.n_layers)

    def decide(self, state: State) -> Decision:
        notes = state.notes_of(self).sequences
        if state.layer == 1:
            notes["depth"] = depth_at_quantile(self.predictor(state.pooled), state.dial)
            state.spend(self.shape.d * self.shape.n_layers)
        return Decision(exit=notes["depth"] == state.layer)

    def stages(self) -> list[Stage]:
        finetuning, exits = super().stages()
        halting = dataclasses.replace(exits, name="halting", best_by="loss", objective=self.halting_loss)
        return [finetuning, exits, halting]

    def halting_loss(self, forward: Pass) -> Tensor:
        correct = torch.stack([self.task.correct(logits, forward.labels) for logits in forward.logits])
        oracle = oracle_depth(correct, self.config.penalty)
        return nn.functional.cross_entropy(self.predictor(forward.pooled[0].detach()), oracle - 1)
