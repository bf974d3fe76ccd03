"""Deciders that say random verbs, the same for a sequence in whatever company it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn

from stretto.backbones import Backbone
from stretto.engine.decider import Silent
from stretto.methods.exits import ExitHeads
from stretto.state import Decision, Inputs, State


@dataclass
class Chances:
    """How often each verb is said."""

    drop_before: float = 0.0
    freeze: float = 0.0
    drop_between: float = 0.0
    exit: float = 0.0
    restore: bool = False
    by_attention: bool = False
    gate: bool = False
    skip: float = 0.0
    protect: frozenset[int] = frozenset()


class RandomDecisions(Silent):
    """Says random verbs that depend on (seed, layer, sequence, position) only: any batch, any order, any padding."""

    points = frozenset({"before", "between", "after"})

    def __init__(self, chances: Chances, seed: int, backbone: Backbone, names: list[int]) -> None:
        exits = None
        if not backbone.head.every_row:
            torch.manual_seed(1)
            exits = ExitHeads(backbone.d, backbone.n_layers - 1, backbone.n_labels, "mean", 0.0)
            for parameter in exits.parameters():
                nn.init.normal_(parameter, std=0.2)
        super().__init__(exits)
        self.chances, self.seed, self.names, self.restore = chances, seed, torch.tensor(names), chances.restore

    def dice(self, salt: int, layer: int, sequence: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Uniform in [0, 1), a fixed function of its arguments."""
        mixed = (sequence * 7919 + position * 104729 + layer * 1299709 + (self.seed + salt) * 15485863) % 2147483647
        mixed = (mixed * 48271 % 2147483647) * 48271 % 2147483647
        return mixed.double() / 2147483647

    def decide(self, state: State) -> Decision:
        names = self.names[state.ids]
        rows = (names[state.sequence], state.position)
        if state.point == "before":
            return Decision(
                drop=self.dice(1, state.layer, *rows) < self.chances.drop_before,
                freeze=self.dice(2, state.layer, *rows) < self.chances.freeze,
                gate=1.2 * self.dice(5, state.layer, names, torch.zeros_like(names)) if self.chances.gate else None,
                skip=self.dice(6, state.layer, names, torch.zeros_like(names)) < self.chances.skip,
            )
        if state.point == "between":
            if self.chances.by_attention:  # keep what receives at least the average attention of its sequence
                received = state.attention_received
                mean = torch.segment_reduce(received, "mean", lengths=state.lengths)[state.sequence]
                return Decision(drop=received < mean * self.chances.drop_between * 1.001)
            return Decision(drop=self.dice(3, state.layer, *rows) < self.chances.drop_between)
        return Decision(exit=self.dice(4, state.layer, names, torch.zeros_like(names)) < self.chances.exit)


def method_for(backbone: Backbone, chances: Chances, seed: int, names: list[int]) -> RandomDecisions:
    """`names` say which sequence each of a batch is, whatever its number."""
    return RandomDecisions(chances, seed, backbone, names)


def rows_of(inputs: Inputs, index: list[int]) -> Inputs:
    tensors = {name: value[index] for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return Inputs(**tensors)


CHANCES = st.builds(
    Chances,
    drop_before=st.sampled_from([0.0, 0.3, 1.0]),
    freeze=st.sampled_from([0.0, 0.3, 1.0]),
    drop_between=st.sampled_from([0.0, 0.3, 1.0]),
    exit=st.sampled_from([0.0, 0.4, 1.0]),
    restore=st.booleans(),
    by_attention=st.booleans(),
    gate=st.booleans(),
    skip=st.sampled_from([0.0, 0.0, 0.4, 1.0]),
    protect=st.sampled_from([frozenset(), frozenset({1, 4})]),
)
