"""Deciders that follow a script instead of the input, so that a benchmark knows in advance what is saved.

Dropping follows a geometric schedule: before layer l each sequence keeps the first ⌈keep_l · n⌉ of its n tokens,

    keep_l = r ^ min(max(l - start, 0), L // 3),   l = 1..L

so tokens leave a little in each of the first layers, the rest of the way runs at a constant length, and r is solved
for so that the FLOPs of the given sequences fall by the wanted factor. Layer 1 sees all tokens (start = 1) unless
it alone would take most of the budget (10× fewer FLOPs of 12 layers are 1.2 layers): then start = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.cost import flops, full_flops, updated_rows
from stretto.engine.decider import Exits, Silent
from stretto.state import Decision, State, Trace

WHOLE_FIRST_LAYER = 1.4  # layers' worth of FLOPs that must be left for layer 1 to see all tokens


class ScriptedDrop(Silent):
    """Before layer l, a sequence of n tokens keeps the first ⌈keep[l - 1] · n⌉."""

    points = frozenset({"before"})

    def __init__(self, keep: Sequence[float]) -> None:
        super().__init__()
        self.keep = [1.0, *keep]  # before the first layer all tokens are live

    def decide(self, state: State) -> Decision | None:
        if state.layer == 1:
            state.notes_of(self).sequences["length"] = state.lengths
        if self.keep[state.layer] == self.keep[state.layer - 1]:
            return None
        kept = kept_tokens(self.keep[state.layer], state.notes_of(self).sequences["length"])
        return Decision(drop=state.position >= kept[state.sequence])


class ScriptedExit(Silent):
    """After `layer` every other sequence leaves: those whose index in the pool (`first` + index in batch) is even."""

    points = frozenset({"after"})

    def __init__(self, layer: int, exits: Exits, first: int = 0) -> None:
        super().__init__(exits)
        self.layer, self.first = layer, first

    def decide(self, state: State) -> Decision | None:
        if state.layer != self.layer:
            return None
        _ = state.exit_logits  # a real decider reads the answers for all sequences: they are computed and counted
        return Decision(exit=(state.ids + self.first) % 2 == 0)


def kept_tokens(keep: float, lengths: Tensor) -> Tensor:
    """[B] tokens that stay of sequences with `lengths` ([B]) tokens; position 0 always does."""
    return torch.ceil(keep * lengths.double()).long().clamp(min=1)


def drop_schedule(factor: float, lengths: Tensor, backbone: Backbone) -> tuple[float, ...]:
    """keep_1..keep_L that divide the FLOPs of sequences of these lengths ([B]) by `factor`, as closely as whole
    tokens allow (very short texts cannot shrink tenfold: one token per layer is left)."""
    n_layers = backbone.n_layers
    start = 1 if n_layers / factor >= WHOLE_FIRST_LAYER else 0

    def schedule(r: float) -> tuple[float, ...]:
        return tuple(r ** min(max(layer - start, 0), max(n_layers // 3, 1)) for layer in range(1, n_layers + 1))

    def miss(r: float) -> float:
        return float(scheduled_flops(schedule(r), lengths, backbone) - wanted)

    wanted = full_flops(lengths, backbone).sum() / factor
    low, high = 0.0, 1.0
    for _ in range(50):  # FLOPs never fall when r rises
        middle = (low + high) / 2
        low, high = (middle, high) if miss(middle) < 0 else (low, middle)
    return schedule(min(low, high, key=lambda r: abs(miss(r))))


def scheduled_flops(keep: Sequence[float], lengths: Tensor, backbone: Backbone) -> Tensor:
    """FLOPs of all sequences together under a drop schedule."""
    rows = torch.stack([kept_tokens(part, lengths) for part in keep], dim=1)  # [B, L]
    deciders = lengths * backbone.embedding_macs + backbone.head.macs_of(lengths)
    updated = updated_rows(rows, backbone)
    return flops(Trace(lengths, updated, rows, updated, deciders, torch.zeros_like(rows)), backbone).sum()
