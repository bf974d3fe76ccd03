"""Constant ratio: every layer keeps the same fraction of its tokens. The baseline for searched lengths.

The model is trained like a Length-Adaptive Transformer; only the configuration is simpler. `select` compares ways to
choose tokens at equal cost.

Kim, Cho: *Length-Adaptive Transformer*, ACL 2021 (the comparison in its Figure 3 and Table 2).

    l_i = r^i n                                                    -> `constant_ratio_lengths`
    keep the highest: as `stretto.methods.scores`, or by chance or saliency  -> `ConstantRatio.score`

Differs from the paper: chance and saliency are our additions. Chance gives each position of a text one random number,
for all layers and texts. Saliency needs a gradient, so it is a note on the input ([batch, columns], see
`stretto.methods.saliency`). It is an upper bound; its own cost is not counted.

Dial: r. 1 is the full model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.methods.base import Dial, Stage
from stretto.methods.length_adaptive import LengthDrop, LengthDropConfig, constant_ratio_lengths
from stretto.state import State

LONGEST = 8192


@dataclass(frozen=True)
class ConstantRatioConfig(LengthDropConfig):
    select: Literal["auto", "attention", "attention+table", "predictor", "random", "saliency"] = "auto"  # type: ignore[assignment]
    """Which tokens stay: those with the most 'attention', as published; 'attention+table', which adds how strongly a
    word is associated with the label; those with the largest contribution by a 'predictor'; the best of these on the
    dev texts ('auto'); 'random' ones; by 'saliency'."""
    selection_seed: int = 0
    """Seed of the random choice."""


def chance(position: Tensor, seed: int) -> Tensor:
    """[N] positions -> [N] random numbers, the same for the same position and seed."""
    drawn = torch.rand(LONGEST, generator=torch.Generator().manual_seed(seed))
    return drawn.to(position.device)[position % LONGEST]


class ConstantRatio(LengthDrop):
    name = "constant_ratio"
    Config = ConstantRatioConfig
    dial = Dial(
        "ratio", "the fraction of its tokens that every layer keeps; 1 keeps all",
        off=1.0, sweep=tuple(round(1 - step / 50, 2) for step in range(21)), upper=1.0,
    )  # fmt: skip

    def lengths(self, dial: Tensor) -> Tensor:
        return constant_ratio_lengths(dial, self.shape.n_layers)

    def stages(self) -> list[Stage]:
        if self.config.select == "saliency":
            raise StrettoError(
                "Expected a selection to train with (auto, attention, attention+table, predictor, random), got "
                "saliency, which needs a trained model and the right answer. Train, then open the model with "
                "select='saliency'."
            )
        return super().stages()

    def score(self, state: State, asked: Tensor | None = None) -> Tensor:
        if self.config.select == "random":
            return chance(state.position, self.config.selection_seed)
        if self.config.select != "saliency":
            return super().score(state, asked)
        if "saliency" not in state.input_notes:
            raise StrettoError(
                "Expected the saliency of every token in Inputs.notes, got none. "
                "Compute it with stretto.methods.saliency, or select by attention."
            )
        return state.input_notes["saliency"]
