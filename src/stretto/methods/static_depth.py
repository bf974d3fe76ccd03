"""Static depth: the first k layers only, for every input. The baseline for methods that exit.

First the exit at layer k is trained on the fine-tuned model. Then the lower k layers are fine-tuned with it as their
head.

Reference: a common baseline, e.g. Table 1 of Xin et al., *DeeBERT*, ACL 2020.

    L = H(y, z_k)                    -> `Method.final_loss`
    exit at k, always                -> `StaticDepth.decide`

Differs from the paper: training starts from the fine-tuned full model. Only depth k is trained: the layers
above it are still there, but they do not fit the changed lower layers.

Dial: the depth: k, as trained, or all layers (off).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from stretto.errors import StrettoError
from stretto.methods.base import Dial, Method, Shape, Stage
from stretto.methods.deebert import exits_stage
from stretto.methods.exits import ExitConfig
from stretto.methods.settings import Count, Epochs, LearningRate
from stretto.state import Compared, Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class StaticDepthConfig(ExitConfig):
    depth: Count = 0
    """Layers to keep; 0 means half of them."""
    shallow_epochs: Epochs = 1
    """Epochs of fine-tuning the kept layers with their own exit, after both have been trained separately."""
    shallow_exit_learning_rate: LearningRate = 3e-4
    """Learning rate of the exit while it trains together with the layers."""


class StaticDepth(Method):
    name = "static_depth"
    Config = StaticDepthConfig
    verbs = frozenset({"exit"})
    points = frozenset({"after"})
    uses_exits = True

    def __init__(self, config: StaticDepthConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.depth = config.depth or max(shape.n_layers // 2, 1)
        if not 1 <= self.depth < shape.n_layers:
            raise StrettoError(
                f"Expected a depth between 1 and {shape.n_layers - 1}, got {config.depth}. "
                "Keep fewer layers than the model has."
            )

        trained, full = float(self.depth), float(shape.n_layers)
        self.dial = Dial(
            "depth", f"layers to run: {self.depth}, as trained, or all {shape.n_layers}",
            off=full, sweep=(full, trained), lower=trained, upper=full, trained=trained,
        )  # fmt: skip

    def decide(self, state: State) -> Decision | None:
        if state.layer != self.depth:
            return None
        depth = torch.full_like(state.dial, self.depth)
        return Decision(exit=state.dial <= depth, compared=Compared("depth", depth, state.dial))

    def stages(self) -> list[Stage]:
        config = self.config
        exits = dataclasses.replace(exits_stage(config, self.shape, self.final_loss), layers=(self.depth,), final=False)
        shallow = dataclasses.replace(
            exits, name="shallow", epochs=config.shallow_epochs, trains_backbone=True,
            learning_rate=config.learning_rate, method_learning_rate=config.shallow_exit_learning_rate,
        )  # fmt: skip
        return [self.finetuning(), exits, shallow]
