"""LTE (learning to exit): a tiny shared predictor of "this exit is wrong".

Exits and backbone train in alternation: even steps improve the final answer, odd steps all exits. One
Linear(d -> 1) + sigmoid, shared by all layers, learns how wrong each exit is; a sequence leaves where it
expects little error. Works for regression, where there is no probability to look at.

Xin, Tang, Yu, Lin: *BERxiT: Early Exiting for BERT with Better Fine-Tuning and Extension to Regression*, EACL 2021.

    even step: L_L; odd step: Σ_{i<=L} L_i                     -> `LTE.joint_loss`
    u_i = σ(w·x_i + b), L_LTE = mean (u_i - ũ_i)²              -> `LTE.uncertainty`, `LTE.predictor_loss`
    ũ_i = 1 - [argmax z_i = y], or |tanh(y_i - y)|             -> `SequenceTask.wrongness`
    exit at i if u_i < threshold                               -> `LTE.decide`

Differs from the paper: x_i is the pooled state the exit itself reads (mean by default); the odd step's sum is
divided by the number of exits, so that both kinds of step have one scale; the predictor does not push gradients into
the backbone.

Dial: the expected wrongness below which a sequence leaves. 0 is the full model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.methods.base import Dial, Pass, Shape, spaced
from stretto.methods.branchynet import JointConfig, JointExits
from stretto.state import Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class LTEConfig(JointConfig):
    """Nothing of its own."""


class LTE(JointExits):
    name = "lte"
    Config = LTEConfig
    dial = Dial(
        "uncertainty",
        "leave at the first exit whose predicted wrongness is below this; 0 never leaves early",
        off=0.0,
        sweep=spaced(0.0, 1.0),
        upper=1.0,
    )

    def __init__(self, config: LTEConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.predictor = nn.Linear(shape.d, 1)

    def uncertainty(self, pooled: Tensor) -> Tensor:
        """[…, d] -> […] in (0, 1)."""
        return torch.sigmoid(self.predictor(pooled)).squeeze(-1)

    def decide(self, state: State) -> Decision:
        state.spend(self.shape.d)
        return Decision(exit=self.uncertainty(state.pooled) < state.dial)

    def exits_loss(self, forward: Pass) -> Tensor:
        return self.losses(forward).mean() + self.predictor_loss(forward)

    def joint_loss(self, forward: Pass) -> Tensor:
        losses = self.losses(forward)
        return (losses[-1] if forward.step % 2 == 0 else losses.mean()) + self.predictor_loss(forward)

    def predictor_loss(self, forward: Pass) -> Tensor:
        target = self.task.wrongness(forward.logits[:-1].detach(), forward.labels)
        return (self.uncertainty(forward.pooled.detach()) - target).square().mean()
