"""DeeBERT: exit where the answer is certain.

After every layer an exit (the paper's off-ramp) answers. A sequence leaves at the first exit whose entropy is below a
threshold. Training has two stages: the backbone is fine-tuned as usual, then frozen while all exits are trained.

Xin, Tang, Lee, Yu, Lin: *DeeBERT: Dynamic Early Exiting for Accelerating BERT Inference*, ACL 2020.

    entropy(z) = -Σ p log p, p = softmax(z)          -> `entropy`
    L = Σ_{i=1}^{L-1} H(y, z_i), backbone frozen     -> `DeeBERT.ramps_loss`
    exit at i if entropy(z_i) < S                    -> `DeeBERT.decide`

Differs from the paper:

- Entropy is divided by log C, so that a threshold means the same for any number of labels.
- Exits pool the mean of the tokens by default (`pool="cls"`: as published).
- A sequence that reaches the last layer is always answered by the final head.
- The pooled states of the frozen backbone are computed once instead of once per epoch.

Dial: S, the normalised entropy below which a sequence leaves. 0 is the full model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stretto.methods.base import Dial, Method, Needs, Pass, Shape, Stage, spaced
from stretto.methods.exits import ExitConfig
from stretto.state import Compared, Decision, State

ENTROPY_DIAL = Dial(
    "entropy",
    "leave at the first exit whose normalised entropy is below this; 0 never leaves early",
    off=0.0,
    sweep=spaced(0.0, 1.0),
    upper=1.0,
)


def entropy(logits: Tensor) -> Tensor:
    """[…, C] -> […] in [0, 1]: -Σ p log p / log C."""
    p = torch.softmax(logits, dim=-1, dtype=torch.float32)
    return torch.special.entr(p).sum(dim=-1) / math.log(logits.shape[-1])


def exits_stage(config: ExitConfig, shape: Shape, objective: Callable[[Pass], Tensor]) -> Stage:
    """All exits together on the frozen backbone."""
    return Stage(
        "exits", config.exit_epochs, 0.0, config.exit_learning_rate, trains_backbone=False,
        layers=tuple(range(1, shape.n_layers)), objective=objective,
    )  # fmt: skip


class DeeBERT(Method):
    name = "deebert"
    Config = ExitConfig
    dial = ENTROPY_DIAL
    needs = Needs(one_of_labels=True)
    verbs = frozenset({"exit"})
    points = frozenset({"after"})
    uses_exits = True

    def decide(self, state: State) -> Decision:
        uncertainty = entropy(state.exit_logits)
        return Decision(exit=uncertainty < state.dial, compared=Compared("entropy", uncertainty, state.dial))

    def stages(self) -> list[Stage]:
        return [self.finetuning(), exits_stage(self.config, self.shape, self.ramps_loss)]

    def ramps_loss(self, forward: Pass) -> Tensor:
        return self.losses(forward)[:-1].sum()
