"""PABEE: exit when the answer has stopped changing.

A sequence leaves when `patience` exits in a row agree with the exit before. Joint training, each exit weighted by its
layer number. It needs no probabilities, so it also works for regression.

Zhou, Xu, Ge, McAuley, Xu, Wei: *BERT Loses Patience: Fast and Robust Inference with Early Exit*, NeurIPS 2020.

    L = Σ_i i·L_i / Σ_i i                                             -> `PABEE.exit_weights`
    cnt_i = cnt_{i-1} + 1 if argmax z_i = argmax z_{i-1} else 0       -> `agreements`
    regression: agreement is |y_i - y_{i-1}| < τ                      -> `SequenceTask.same_answer`
    exit at i if cnt_i = patience                                     -> `PABEE.decide`

Differs from the paper: exits pool the mean of the tokens by default. The counter is kept per sequence, so answers and
costs do not depend on the rest of the batch.

Dial: patience. The earliest exit is after patience + 1 layers; 0 (or L - 1 and more) is the full model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.methods.base import Dial, Shape
from stretto.methods.branchynet import JointConfig, JointExits
from stretto.methods.settings import Weight
from stretto.state import Compared, Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class PABEEConfig(JointConfig):
    tolerance: Weight = 0.05
    """Regression: answers closer than this agree (in the unit of the labels)."""


def agreements(count: Tensor, agrees: Tensor) -> Tensor:
    """[B] consecutive agreements so far, [B] bool -> the new count; a change starts again at 0."""
    return torch.where(agrees, count + 1, torch.zeros_like(count))


class PABEE(JointExits):
    name = "pabee"
    Config = PABEEConfig
    dial = Dial(
        "patience",
        "leave when this many exits in a row agree with the exit before; 0 never leaves early",
        off=0.0,
        sweep=(0.0, 1.0),
    )

    def __init__(self, config: PABEEConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        patiences = range(shape.n_layers - 1, 0, -1)
        self.dial = dataclasses.replace(type(self).dial, sweep=(0.0, *map(float, patiences)))

    def exit_weights(self) -> Tensor:
        return torch.arange(1, self.shape.n_layers + 1)

    def decide(self, state: State) -> Decision:
        notes = state.notes_of(self).sequences
        logits, before = state.exit_logits, notes.get("logits")
        count = torch.zeros_like(state.ids)
        if before is not None:
            agrees = self.task.same_answer(logits, before, self.config.tolerance)
            count = agreements(notes["agreements"], agrees)
        notes.update(logits=logits, agreements=count)
        patient = (count >= state.dial) & (state.dial > 0)
        return Decision(exit=patient, compared=Compared("agreements", count, state.dial))
