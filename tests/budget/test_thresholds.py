"""Screening thresholds of a decoder on what every block says of the right texts: by hand."""

from __future__ import annotations

import torch

from stretto.budget.thresholds import Screened, promising

#: Three blocks, four tokens: how sure each block is, and whether it is right.
SCREEN = Screened(
    torch.tensor([[0.9, 0.6, 0.2, 0.8], [0.9, 0.7, 0.6, 0.9], [1.0, 1.0, 1.0, 1.0]]),
    torch.tensor([[True, False, False, True], [True, True, False, False], [True, True, True, True]]),
)


def test_a_token_leaves_at_the_first_sure_block() -> None:
    thresholds = torch.tensor([[0.5, 0.5], [0.7, 0.65], [1.0, 1.0], [0.0, 0.0]])
    accuracy, exit = SCREEN.of(thresholds)
    # 1: blocks 1, 1, 2, 1; 2: 1, 2, 3, 1; 3: all at the last; 4: all at the first
    assert accuracy.tolist() == [0.5, 1.0, 1.0, 0.5]
    assert exit.tolist() == [1.25, 1.75, 3.0, 1.0]


def test_what_is_promising_is_beaten_by_no_other_draw() -> None:
    found = torch.tensor(promising(SCREEN, draws=200, keep=4, seed=0))
    accuracy, exit = SCREEN.of(found)
    assert 2 <= len(found) <= 4
    assert (accuracy.diff() < 0).all() and (exit.diff() < 0).all()  # from deep to shallow
    drawn = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
    right, depth = SCREEN.of(drawn)
    for one, other in zip(accuracy, exit, strict=True):
        assert not ((right > one) & (depth <= other)).any()
