"""BranchyNet: exits trained together with the backbone; exit by entropy.

All exits and the final head are trained jointly on a weighted sum of their losses, so that lower layers also
learn to answer. A sequence leaves at the first exit whose entropy is below its threshold.

Teerapittayanon, McDanel, Kung: *BranchyNet: Fast Inference via Early Exiting from Deep Neural Networks*, ICPR 2016.

    L = Σ_i w_i L_i / Σ_i w_i            -> `weighted_loss`
    exit at i if entropy(z_i) < S·f_i    -> `BranchyNet.decide`
    thresholds from percentiles          -> `quantile_factors`, `BranchyNet.choose_factors`

Differs from the paper:

- Transformers instead of convolutional networks; a branch is one exit head.
- The sum of losses is divided by the sum of weights, and entropy by log C.
- Thresholds per exit are one dial times fixed factors f_i (default: 1), so that cost is monotone along one number.
- Percentiles are measured on the training texts, at the dial 0.5.

Dial: S, the normalised entropy below which a sequence leaves. 0 is the full model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import Above, Recorder, alone
from stretto.errors import StrettoError
from stretto.methods.base import Batches, Method, Needs, Pass, Shape, Stage
from stretto.methods.deebert import ENTROPY_DIAL, entropy, exits_stage
from stretto.methods.exits import ExitConfig
from stretto.methods.settings import Epochs, LearningRate, Share
from stretto.state import Compared, Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class JointConfig(ExitConfig):
    """Settings shared by the methods that train backbone and exits together."""

    joint_start: Literal["pretrained", "finetuned"] = "pretrained"
    """Where joint training starts: from the 'pretrained' encoder, or 'finetuned', after separate training of both
    (stages backbone and exits, with their settings above)."""
    joint_epochs: Epochs = 2
    """Epochs of training backbone and exits together."""
    joint_exit_learning_rate: LearningRate = 5e-4
    """Learning rate of the exits while they train together with the backbone."""
    detached: bool = False
    """Train each layer from its own exit only, without gradients from the exits above."""


@dataclass(frozen=True)
class BranchyNetConfig(JointConfig):
    factors: tuple[float, ...] = ()
    """Per-exit factors on the threshold, one for each of the L-1 exits; empty means 1 everywhere."""
    leaving_share: Share = 0.0
    """Choose the factors after training instead, so that at dial 0.5 this fraction of all training texts could leave at
    each exit. 0 keeps `factors`."""


#: The dial at which percentiles hold.
MIDDLE = 0.5


def weighted_loss(losses: Tensor, weights: Tensor) -> Tensor:
    """[E] losses, [E] weights -> Σ w L / Σ w."""
    return (losses * weights).sum() / weights.sum()


def quantile_factors(entropies: Tensor, share: float, dial: float) -> Tensor:
    """[E, n] entropies of n examples at E exits -> [E] factors with which `share` of them could leave at each exit."""
    return torch.quantile(entropies.double(), share, dim=1) / dial


class JointExits(Method):
    """Backbone and exits learn together, from the pretrained encoder; or first each alone, so that untrained exits do
    not disturb a trained backbone."""

    verbs = frozenset({"exit"})
    points = frozenset({"after"})
    uses_exits = True

    def exit_weights(self) -> Tensor:
        """[L] weights of the exits' losses, the final head's last."""
        return torch.ones(self.shape.n_layers)

    def stages(self) -> list[Stage]:
        config, exits = self.config, exits_stage(self.config, self.shape, self.exits_loss)
        apart = [self.finetuning(), exits] if config.joint_start == "finetuned" else []
        joint = Stage(
            "joint", config.joint_epochs, config.learning_rate, config.joint_exit_learning_rate, layers=exits.layers,
            detached=config.detached, taught=bool(apart), objective=self.joint_loss,
        )  # fmt: skip
        return [*apart, joint]

    def exits_loss(self, forward: Pass) -> Tensor:
        """The loss of the stage that trains the exits alone."""
        return self.joint_loss(forward)

    def joint_loss(self, forward: Pass) -> Tensor:
        losses = self.losses(forward)
        return weighted_loss(losses, self.exit_weights().to(losses))


class BranchyNet(JointExits):
    name = "branchynet"
    Config = BranchyNetConfig
    needs = Needs(one_of_labels=True)
    dial = ENTROPY_DIAL
    factors: Tensor  # [L - 1]

    def __init__(self, config: BranchyNetConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        if config.factors and len(config.factors) != shape.n_layers - 1:
            raise StrettoError(
                f"Expected {shape.n_layers - 1} threshold factors, one per exit, got {len(config.factors)}. "
                "Give one for each layer but the last, or none."
            )
        self.register_buffer("factors", torch.tensor(config.factors or (1.0,) * (shape.n_layers - 1)).double())

    def decide(self, state: State) -> Decision:
        uncertainty, threshold = entropy(state.exit_logits), state.dial * self.factors[state.layer - 1]
        return Decision(exit=uncertainty < threshold, compared=Compared("entropy", uncertainty, threshold))

    def stages(self) -> list[Stage]:
        *before, joint = super().stages()
        chosen = self.choose_factors if self.config.leaving_share else None
        return [*before, dataclasses.replace(joint, finish=chosen)]

    @torch.no_grad()
    def choose_factors(self, engine: ReferenceEngine, batches: Batches, above: Above = alone) -> None:
        assert self.exits is not None
        found = []
        for inputs, labels in batches:
            recorder = Recorder(self.exits)
            engine.run(inputs.to(self.factors.device), above(recorder, len(labels)), 0.0)
            pooled = recorder.pooled(len(labels), self.shape.n_layers - 1)  # [B, E, d]
            answers = [self.exits(layer, each) for layer, each in enumerate(pooled.unbind(dim=1), start=1)]
            found.append(entropy(torch.stack(answers)))  # [E, B]
        self.factors.copy_(quantile_factors(torch.cat(found, dim=1), self.config.leaving_share, MIDDLE))
