"""Which tokens of a sequence matter most: ranks by a score, and the choice of the best.

Shared by the methods that keep a number of tokens rather than those above a threshold.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stretto.state import State

#: Sequences always keep at least this many tokens ([CLS] and one more), as in the Length-Adaptive Transformer.
AT_LEAST = 2


@runtime_checkable
class KeepsTokens(Protocol):
    """A method whose layers keep a number of tokens that is known from a text's length: those with the best score."""

    def kept(self, n: Tensor, dial: Tensor, layer: int) -> Tensor:
        """[B] tokens of the input, [B] dials -> [B] tokens that `layer` (from 1) keeps."""
        ...

    def score(self, state: State, asked: Tensor | None = None) -> Tensor:
        """[N] what the tokens are ranked by; sequences that are not `asked` ([B] bool) drop none, and may get 0."""
        ...


def ranks(scores: Tensor, state: State) -> Tensor:
    """[N] scores -> [N] rank within the sequence, 0 for the highest. Protected rows come first, ties by position."""
    first = torch.where(state.protected, torch.inf, scores.double())
    by_score = first.argsort(descending=True, stable=True)
    order = by_score[state.sequence[by_score].argsort(stable=True)]  # by sequence, then by score
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places - state.starts[state.sequence]


def within_budget(costs: Tensor, budget: Tensor) -> Tensor:
    """[F] falling costs, [B] budgets -> [B] index of the most expensive that is affordable, or of the cheapest."""
    affordable = costs.to(budget.device) <= budget.unsqueeze(-1)  # [B, F]; the first affordable is the most expensive
    return torch.where(affordable.any(dim=-1), affordable.int().argmax(dim=-1), len(costs) - 1)


def drop_all_but(count: Tensor, scores: Tensor, state: State) -> Tensor:
    """[N] bool: True for the rows that do not belong to the best `count` ([B]) of their sequence."""
    return ranks(scores, state) >= count[state.sequence]
