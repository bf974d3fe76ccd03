"""Static depth: the first k layers only, for every input. What an adaptive method has to beat.

The lower k layers are fine-tuned with the exit at layer k as their head.

Reference: a common baseline, e.g. Table 1 of Xin et al., *DeeBERT*, ACL 2020.

    L = H(y, z_k)                    -> `StaticDepth.loss`
    exit at k, always                -> `StaticDepth.decide`

Differs from the paper: training starts from the fine-tuned full model. Only depth k has been trained: the layers
above it are still there, but they were fine-tuned for lower layers that have moved since.

Dial: the depth: k, as trained, or all layers (off).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stretto.errors import StrettoError
from stretto.methods.base import Dial, Method, Pass, Shape, Stage
from stretto.methods.exits import ExitConfig
from stretto.state import Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class StaticDepthConfig(ExitConfig):
    depth: int = 0
    """Layers to keep; 0 means half of them."""
    shallow_epochs: float = 1
    """Epochs of fine-tuning the kept layers with their own exit, after ordinary fine-tuning."""


class StaticDepth(Method):
    name = "static_depth"
    Config = StaticDepthConfig
    tasks = ("classification", "regression")
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
            off=full, sweep=(full, trained), lower=trained, upper=full,
        )  # fmt: skip

    def decide(self, state: State) -> Decision | None:
        if state.layer != self.depth:
            return None
        return Decision(exit=state.dial <= self.depth)

    def stages(self) -> list[Stage]:
        config = self.config
        shallow = Stage(
            "shallow", config.shallow_epochs, config.learning_rate, config.exit_learning_rate,
            layers=(self.depth,), final=False,
        )  # fmt: skip
        return [self.finetuning(), shallow]

    def loss(self, stage: Stage, forward: Pass, labels: Tensor) -> Tensor:
        if stage.name == "backbone":
            return super().loss(stage, forward, labels)
        return self.losses(forward, labels)[0]
