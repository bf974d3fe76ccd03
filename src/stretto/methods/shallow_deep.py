"""Shallow-Deep Networks: exit where the answer is confident.

Joint training as in BranchyNet, with weights that grow with depth. A sequence leaves at the first exit whose largest
probability exceeds a threshold.

Kaya, Hong, Dumitras: *Shallow-Deep Networks: Understanding and Mitigating Network Overthinking*, ICML 2019.

    L = Σ_i τ_i L_i / Σ_i τ_i, τ_i = i / L       -> `ShallowDeep.exit_weights`
    exit at i if max_c softmax(z_i)_c > T        -> `confidence`, `ShallowDeep.decide`

Differs from the paper: transformers instead of convolutional networks. The weights are fixed at i / L (in the paper
each grows during training from 0.01 to the relative cost of its exit).

Dial: T, the probability above which a sequence leaves. 1 is the full model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.methods.base import Dial, Needs, spaced
from stretto.methods.branchynet import JointConfig, JointExits
from stretto.state import Compared, Decision, State


@dataclass(frozen=True)
class ShallowDeepConfig(JointConfig):
    """No further settings."""


def confidence(logits: Tensor) -> Tensor:
    """[…, C] -> […]: the largest softmax probability."""
    return torch.softmax(logits, dim=-1).amax(dim=-1)


class ShallowDeep(JointExits):
    name = "shallow_deep"
    Config = ShallowDeepConfig
    needs = Needs(one_of_labels=True)
    dial = Dial(
        "confidence",
        "leave at the first exit whose largest probability is above this; 1 never leaves early",
        off=1.0,
        sweep=spaced(1.0, 0.0),
        upper=1.0,
    )

    def exit_weights(self) -> Tensor:
        return torch.arange(1, self.shape.n_layers + 1) / self.shape.n_layers

    def decide(self, state: State) -> Decision:
        probability = confidence(state.exit_logits)
        # a softmax that rounds to exactly 1 must not leave at T = 1: `>` is strict
        return Decision(exit=probability > state.dial, compared=Compared("confidence", probability, state.dial))
