"""Halting unit: the depth of a sequence is predicted after the first layer.

A head on the output of the first layer predicts the depth at which the answer will be right. The sequence runs to that
depth without further checks. The training target (oracle) is the first layer from which the answer stays right,
according to exits that were not trained on the text.

The baseline of Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021 (sequence level),
after Elbayad, Gu, Grave, Auli: *Depth-Adaptive Transformer*, ICLR 2020.

    oracle depth = min {n: C^m for all m >= n}, else L, C^n = [exit n is right]   -> `settled_depth`
    as published: argmax_n (C^n - λ n)                               -> `oracle_depth`
    L_halt = H(oracle, q), q = softmax(W x_1 + b)                    -> `Halting.halting_loss`
    run to the smallest n with Σ_{m<=n} q_m >= dial                  -> `depth_at_quantile`

Differs from the paper:

- The papers take argmax q, which has no dial. Here it is a quantile of q, from full depth to one layer.
- Exits are trained on the frozen fine-tuned backbone (as in DeeBERT), so the final answer does not change.
- The published oracle (`oracle="first"`) counts lucky answers at layer 1, and gives depth 1 to an example that no exit
  answers correctly.
- Exits are mostly right about the texts they were trained on, so the oracle uses exits of held-out folds (`folds`; 0:
  the exits themselves, with dropout).

Dial: the probability with which the predicted depth must be enough. 1 is the full model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import Above, alone
from stretto.methods.base import Batches, Dial, Needs, Notes, Pass, Shape, Stage, spaced
from stretto.methods.deebert import DeeBERT
from stretto.methods.folds import FoldConfig, held_out_answers
from stretto.methods.settings import Weight
from stretto.state import Compared, Decision, State
from stretto.tasks import Task

Oracle = Literal["stays", "first"]


@dataclass(frozen=True)
class HaltingConfig(FoldConfig):
    oracle: Oracle = "stays"
    """The target depth: the first layer from which the answer 'stays' right (never right: all layers), or the 'first'
    that is right, where a layer costs λ, as published."""
    penalty: Weight = 0.05
    """λ: what one more layer must be worth in correctness (0 to 1), with the oracle 'first'."""


def settled_depth(correct: Tensor) -> Tensor:
    """[L, …] bool, exit n right? -> […] the first depth 1..L from which it stays right; L if the last one is wrong."""
    staying = correct.flip(0).int().cumprod(dim=0).sum(dim=0)  # right answers at the end, without a break
    return (len(correct) + 1 - staying).clamp(max=len(correct))


def oracle_depth(correct: Tensor, penalty: float) -> Tensor:
    """[L, …] bool, exit n right? -> […] depth 1..L = argmax_n (C^n - λ n); ties go to the shallower."""
    n = torch.arange(1, len(correct) + 1, device=correct.device).view(-1, *[1] * (correct.dim() - 1))
    return (correct.double() - penalty * n).argmax(dim=0) + 1


def oracle_of(correct: Tensor, config: Any) -> Tensor:
    """[L, …] bool -> […] depth 1..L, by the oracle of the settings."""
    return settled_depth(correct) if config.oracle == "stays" else oracle_depth(correct, config.penalty)


def cumulated(logits: Tensor) -> Tensor:
    """[B, L] -> [B, L] the probability that so many layers suffice."""
    return torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)


def depth_at_quantile(logits: Tensor, quantile: Tensor) -> Tensor:
    """[B, L], [B] -> [B] smallest depth whose cumulated probability reaches the quantile; quantile 1 is depth L."""
    depth = (cumulated(logits) < quantile.unsqueeze(-1)).sum(dim=-1) + 1
    return torch.where(quantile >= 1, logits.shape[-1], depth).clamp(max=logits.shape[-1])


class Halting(DeeBERT):
    name = "halting"
    Config = HaltingConfig
    needs = Needs(right_or_wrong=True)
    dial = Dial(
        "quantile",
        "run to the depth that is enough with this probability; 1 runs all layers",
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
            logits = self.predictor(state.pooled)
            notes.update(depth=depth_at_quantile(logits, state.dial), sufficient=cumulated(logits))
            state.add_macs(self.shape.d * self.shape.n_layers)
        sufficient = notes["sufficient"][:, state.layer - 1]
        return Decision(exit=notes["depth"] == state.layer, compared=Compared("sufficient", sufficient, state.dial))

    def stages(self) -> list[Stage]:
        finetuning, exits = super().stages()
        prepare = self.note_oracle if self.config.folds > 1 else None
        halting = dataclasses.replace(
            exits, name="halting", best_by="loss", objective=self.halting_loss, prepare=prepare
        )
        return [finetuning, exits, halting]

    def note_oracle(self, engine: ReferenceEngine, batches: Batches, above: Above = alone) -> Notes:
        """The oracle depth of every training text, from exits that have not seen it."""
        answers, labels = held_out_answers(engine, batches, self.task, self.shape, self.config, above)
        return {"text_oracle": self.oracle(answers, labels).unsqueeze(1)}

    def oracle(self, answers: Tensor, labels: Tensor) -> Tensor:
        """[L, B, C] answers, [B] -> [B] depth 1..L."""
        return oracle_of(torch.stack([self.task.correct(logits, labels) for logits in answers]), self.config)

    def halting_loss(self, forward: Pass) -> Tensor:
        noted = forward.targets.notes.get("text_oracle")
        oracle = self.oracle(forward.logits, forward.labels) if noted is None else noted.squeeze(1)
        return nn.functional.cross_entropy(self.predictor(forward.pooled[0].detach()), oracle - 1)
