"""Contribution predictors: small networks that predict, before a layer, how much each token contributes to the answer.

    CP_l = Linear(d -> size), GELU, Linear(size -> 1), a softmax over the tokens of a text

They learn from the saliency of a fine-tuned model (Modarressi, Mohebbi, Pilehvar: *AdapLeR*, ACL 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.engine.reference import ReferenceEngine
from stretto.methods.base import Batches, Notes, Shape
from stretto.methods.saliency import saliency
from stretto.state import State
from stretto.tasks import Task


class ContributionPredictors(nn.ModuleList):
    """One for each layer, which reads what the layer reads."""

    def __init__(self, shape: Shape, size: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(shape.d, size), nn.GELU(), nn.Linear(size, 1)) for _ in range(shape.n_layers)
        )
        self.macs = (shape.d + 1) * size  # for one token

    def ask(self, state: State, asked: Tensor) -> Tensor:
        """[N] the predicted contribution of each row in this layer. Sequences not in `asked` ([B] bool) get 0, and
        nothing is computed or counted for them."""
        state.add_macs(asked * state.lengths * self.macs)
        predictor = self[state.layer - 1]
        if bool(asked.all()):
            return predictor(state.rows).squeeze(-1)
        rows = asked[state.sequence]
        predicted = predictor(state.rows[rows]).squeeze(-1)
        return predicted.new_zeros(state.n_rows).index_put((rows,), predicted)


def saliency_notes(engine: ReferenceEngine, task: Task, batches: Batches) -> Notes:
    """The saliency of every training token, from the fine-tuned model."""
    found: list[Tensor] = []
    for inputs, labels in batches:
        salience, mask = saliency(engine, task, inputs, labels), inputs.attention_mask.bool()
        found += [row[kept] for row, kept in zip(salience, mask, strict=True)]
    return {"saliency": found}


def divergence(target: Tensor, score: Tensor) -> Tensor:
    """[…] terms of KL(target ‖ score), both shares that sum to 1 over a text; 0 where the target is."""
    return torch.where(target > 0, target * (target.clamp(min=1e-12) / score.clamp(min=1e-12)).log(), 0.0)
