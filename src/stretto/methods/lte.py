"""LTE (learning to exit): a small shared predictor of "this exit is wrong".

Training alternates: even steps improve the final answer, odd steps all exits. One Linear(d -> 1) + sigmoid, shared by
all layers, learns how wrong each exit is. A sequence leaves where the predicted error is small. This works for
regression too, which has no probabilities. At the end the predictor is trained once more, alone, on the errors of exits
that were not trained on the texts.

Xin, Tang, Yu, Lin: *BERxiT: Early Exiting for BERT with Better Fine-Tuning and Extension to Regression*, EACL 2021.

    even step: L_L; odd step: Σ_{i<=L} L_i                     -> `LTE.joint_loss`
    u_i = σ(w·x_i + b), L_LTE = mean (u_i - ũ_i)²              -> `LTE.uncertainty`, `LTE.predictor_loss`
    ũ_i = 1 - [argmax z_i = y], or |tanh(y_i - y)|             -> `SequenceTask.wrongness`
    exit at i if u_i < threshold                               -> `LTE.decide`

Differs from the paper:

- x_i is the pooled state that the exit reads (mean by default).
- The sum of an odd step is divided by the number of exits, so that both kinds of step have the same scale.
- The predictor passes no gradients to the backbone.
- After the joint training the predictor is trained alone in another stage, on held-out folds of the texts (`folds`; 0:
  no such stage, as published).

Dial: the expected wrongness below which a sequence leaves. 0 is the full model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import Above, alone
from stretto.methods.base import Batches, Dial, Notes, Pass, Shape, Stage, spaced
from stretto.methods.branchynet import JointConfig, JointExits
from stretto.methods.deebert import exits_stage
from stretto.methods.folds import FoldConfig, held_out_answers
from stretto.state import Compared, Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class LTEConfig(JointConfig, FoldConfig):
    """Settings of joint exits, and the folds that the predictor learns from."""


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
        state.add_macs(self.shape.d)
        wrongness = self.uncertainty(state.pooled)
        return Decision(exit=wrongness < state.dial, compared=Compared("uncertainty", wrongness, state.dial))

    def stages(self) -> list[Stage]:
        if self.config.folds < 2:
            return super().stages()
        exits = exits_stage(self.config, self.shape, self.predictor_loss)
        uncertainty = dataclasses.replace(exits, name="uncertainty", best_by="loss", prepare=self.note_wrongness)
        return [*super().stages(), uncertainty]

    def note_wrongness(self, engine: ReferenceEngine, batches: Batches, above: Above = alone) -> Notes:
        """How wrong each exit is about every training text, from exits that have not seen it."""
        answers, labels = held_out_answers(engine, batches, self.task, self.shape, self.config, above)
        return {"text_wrongness": self.task.wrongness(answers[:-1], labels).T}

    def exits_loss(self, forward: Pass) -> Tensor:
        return self.losses(forward).mean() + self.predictor_loss(forward)

    def joint_loss(self, forward: Pass) -> Tensor:
        losses = self.losses(forward)
        return (losses[-1] if forward.step % 2 == 0 else losses.mean()) + self.predictor_loss(forward)

    def predictor_loss(self, forward: Pass) -> Tensor:
        noted = forward.targets.notes.get("text_wrongness")  # [B, E]
        target = self.task.wrongness(forward.logits[:-1].detach(), forward.labels) if noted is None else noted.T
        return (self.uncertainty(forward.pooled.detach()) - target).square().mean()
