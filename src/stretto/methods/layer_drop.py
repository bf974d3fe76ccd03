"""LayerDrop: trained with random layers skipped, then pruned to any number of layers. A baseline for other methods.

In each training step every layer is skipped with some probability. So the model learns to answer without any of them,
and after one training it can be pruned to any depth: evenly spread layers are removed, for every input.

Fan, Grave, Joulin: *Reducing Transformer Depth on Demand with Structured Dropout*, ICLR 2020.

    each layer skipped with probability p, per update, never all      -> `stretto.methods.length_adaptive.sample_skips`
    Every Other: remove layers d with d ≡ 0 mod ⌊1/p⌋                 -> `spread_layers` (more general)
    run only the other layers                                         -> `LayerDrop.decide`

Differs from the paper:

- The paper trains with LayerDrop from the start of pretraining. Here a fine-tuned model is trained further with it.
- Any number n of layers can be removed: layers ⌈j L / n⌉ for j = 1..n. If n divides L this is the paper's rule.
- The pruned model is not fine-tuned again.

Dial: the layers: how many are kept, evenly spread. All of them (off) is the full model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.methods.base import ANY_ANSWER, Dial, Method, Shape, Stage, TrainingBatch
from stretto.methods.length_adaptive import sample_skips
from stretto.methods.settings import Epochs, FinetuningConfig, LearningRate, Share
from stretto.state import Decision, State
from stretto.tasks import Task


@dataclass(frozen=True)
class LayerDropConfig(FinetuningConfig):
    drop_epochs: Epochs = 3
    """Epochs of training with layers skipped (the second stage)."""
    drop_learning_rate: LearningRate = 5e-5
    """Learning rate of the second stage."""
    layer_drop: Share = 0.2
    """p: probability with which a layer is skipped in a training step. To prune to r of L layers, 1 - r / L is best,
    according to the paper."""


def spread_layers(n_layers: int, kept: int) -> tuple[int, ...]:
    """The layers (from 1) to remove, so that `kept` of them stay: ⌈j L / n⌉ for j = 1..n, n = L - kept."""
    out = n_layers - kept
    return tuple(-(-place * n_layers // out) for place in range(1, out + 1))


class LayerDrop(Method):
    name = "layer_drop"
    Config = LayerDropConfig
    needs = ANY_ANSWER
    verbs = frozenset({"skip"})
    points = frozenset({"before"})

    def __init__(self, config: LayerDropConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        depths = range(shape.n_layers, 0, -1)
        self.dial = Dial(
            "layers", "how many layers to keep, evenly spread; all of them is the full model",
            off=float(shape.n_layers), sweep=tuple(map(float, depths)), lower=1.0, upper=float(shape.n_layers),
        )  # fmt: skip
        self.left_out = torch.zeros(shape.n_layers + 1, shape.n_layers, dtype=torch.bool)  # [kept, layer - 1]
        for kept in depths:
            self.left_out[kept, [layer - 1 for layer in self.left_out_at(kept)]] = True

    def left_out_at(self, dial: float) -> tuple[int, ...]:
        """The layers (from 1) that are skipped."""
        return spread_layers(self.shape.n_layers, int(dial))

    def decide(self, state: State) -> Decision | None:
        if bool((state.dial == self.dial.off).all()):
            return None
        return Decision(skip=self.left_out.to(state.dial.device)[state.dial.long(), state.layer - 1])

    def stages(self) -> list[Stage]:
        config = self.config
        half = float(max(self.shape.n_layers // 2, 1))
        drop = Stage(
            "drop", config.drop_epochs, config.drop_learning_rate, decides=True, dials=(self.dial.off, half),
            objective=self.pruned_loss,
        )  # fmt: skip
        return [self.finetuning(), drop]

    def pruned_loss(self, batch: TrainingBatch) -> Tensor:
        """The task's loss with some layers skipped, the same for the whole batch."""
        skipped = sample_skips(self.config.layer_drop, self.shape.n_layers)
        return self.loss(batch.run(self.dial.off, skip=skipped).logits, batch.targets).mean()
