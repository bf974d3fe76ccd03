"""Exits: a small head after each layer but the last (whose answer is the final head's).

Each exit pools a sequence to one vector, then Linear + tanh, dropout, Linear to the labels. `cls` pools as
published (the state of position 0); `mean` averages the live rows, which is far better on sentence encoders,
whose lower layers hardly write to position 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from stretto.backbones.heads import READINGS
from stretto.engine.linear import product
from stretto.engine.parts import rounded
from stretto.methods.settings import Epochs, FinetuningConfig, LearningRate, Share
from stretto.state import State

Pool = Literal["mean", "cls"]


@dataclass(frozen=True)
class ExitConfig(FinetuningConfig):
    """Settings shared by the methods that train exits."""

    exit_epochs: Epochs = 10
    """Epochs of the stage that trains the exits on the frozen backbone (fast: the backbone runs only once)."""
    exit_learning_rate: LearningRate = 1e-3
    """Learning rate of the exits."""
    pool: Pool = "mean"
    """What an exit reads: 'mean' of the live tokens, or 'cls' as published."""
    dropout: Share = 0.1
    """Dropout inside the exits."""


class ExitHeads(nn.Module):
    """The exits of layers 1..n_exits. B sequences, T columns, d hidden size, C labels."""

    def __init__(self, d: int, n_exits: int, n_labels: int, pool: Pool, dropout: float) -> None:
        super().__init__()
        self.pool = pool
        self.poolers = nn.ModuleList(nn.Linear(d, d) for _ in range(n_exits))
        self.classifiers = nn.ModuleList(nn.Linear(d, n_labels) for _ in range(n_exits))
        self.dropout = nn.Dropout(dropout)
        self.macs = d * d + d * n_labels  # of one exit, for one sequence

    def start_from(self, pooler: nn.Linear | None) -> None:
        """Initialise every exit's pooler from the pretrained one (published practice for `cls`)."""
        if pooler is not None and self.pool == "cls":
            for own in self.poolers:
                own.load_state_dict(pooler.state_dict())

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        """Packed rows [N, d] -> [B, d]."""
        return READINGS[self.pool].of_rows(rows, state)

    def pool_padded(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Padded states [B, T, d] -> [B, d]; the same as `pool_rows`, for training."""
        return READINGS[self.pool].of_tokens(hidden, attention_mask)

    def forward(self, layer: int, pooled: Tensor) -> Tensor:
        """Answers of the exit after `layer` (from 1): [B, d] -> [B, C]."""
        return self.classifiers[layer - 1](self.dropout(torch.tanh(self.poolers[layer - 1](pooled))))

    def packed(self) -> PackedExits:
        return PackedExits(self)


class PackedExits:
    """Exits for inference, with their weights in the layout of the packed engine."""

    def __init__(self, exits: ExitHeads) -> None:
        self.pool_rows, self.macs = exits.pool_rows, exits.macs
        self.poolers = [
            product(cast(nn.Linear, pooler), dtype="float32", activation=torch.tanh) for pooler in exits.poolers
        ]
        self.classifiers = list(exits.classifiers)  # looking one up in a ModuleList takes time

    def __call__(self, layer: int, pooled: Tensor) -> Tensor:
        """Answers of the exit after `layer` (from 1): [B, d] -> [B, C]."""
        return self.classifiers[layer - 1](self.poolers[layer - 1](rounded(pooled))[: len(pooled)])
