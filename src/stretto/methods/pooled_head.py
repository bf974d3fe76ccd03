"""Heads of methods: one answer from all tokens, whatever layer they stopped at.

    v = ReLU([max; mean]) over the tokens, logits = W v + b                -> `PooledHead`
    v = tanh(W' mean + b'), logits = W v + b                               -> `MeanHead`

The first is Eq. 6 of Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021. The second has the
form of an exit (`stretto.methods.exits`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.backbones.heads import mean_of_rows, mean_of_tokens
from stretto.state import State


class PooledHead(nn.Module):
    """One head for all layers. B sequences, T columns, d hidden size, C labels."""

    def __init__(self, d: int, n_labels: int, dropout: float, off: float) -> None:
        super().__init__()
        self.classifier = nn.Linear(2 * d, n_labels)
        self.dropout = nn.Dropout(dropout)
        self.off = off
        """The dial at which the model's own head answers."""
        self.macs = 2 * d * n_labels  # for one sequence

    def answers(self, state: State) -> Tensor:
        """[B] bool: sequences that this head answers."""
        return state.dial != self.off

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        """Packed rows [N, d] -> [B, 2 d]."""
        empty = rows.new_zeros(state.n_sequences, rows.shape[1])
        largest = empty.scatter_reduce(0, state.sequence.unsqueeze(1).expand_as(rows), rows, "amax", include_self=False)
        return torch.cat([largest, mean_of_rows(rows, state)], dim=1).relu()

    def pool_padded(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Padded states [B, T, d] -> [B, 2 d]; the same as `pool_rows`, for training."""
        largest = hidden.masked_fill(~attention_mask.unsqueeze(-1).bool(), -torch.inf).amax(dim=1)
        return torch.cat([largest, mean_of_tokens(hidden, attention_mask)], dim=1).relu()

    def forward(self, pooled: Tensor) -> Tensor:
        """[…, 2 d] -> […, C]"""
        return self.classifier(self.dropout(pooled))

    def of_token(self, hidden: Tensor) -> Tensor:
        """[…, d] -> […, C]: what a single token would answer; its maximum and its mean are itself."""
        return self(torch.cat([hidden, hidden], dim=-1).relu())


class MeanHead(nn.Module):
    """One head for all layers that a sequence may leave after."""

    def __init__(self, d: int, n_labels: int, dropout: float, off: float) -> None:
        super().__init__()
        self.pooler, self.classifier, self.dropout = nn.Linear(d, d), nn.Linear(d, n_labels), nn.Dropout(dropout)
        self.off = off
        """The dial at which the model's own head answers."""
        self.macs = d * d + d * n_labels  # for one sequence

    def answers(self, state: State) -> Tensor:
        """[B] bool: sequences that this head answers."""
        return state.dial != self.off

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        """Packed rows [N, d] -> [B, d]."""
        return mean_of_rows(rows, state)

    def forward(self, pooled: Tensor) -> Tensor:
        """[…, d] -> […, C]"""
        return self.classifier(self.dropout(torch.tanh(self.pooler(pooled))))
