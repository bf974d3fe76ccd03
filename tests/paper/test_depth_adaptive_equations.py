"""The equations of the Depth-Adaptive Transformer on numbers computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from stretto.methods.depth_adaptive import block_weights, lead, shift
from stretto.methods.oracles import (
    best_block,
    geometric_log_q,
    geometric_loss,
    kernel,
    multinomial_loss,
    sequence_oracle,
    token_oracle,
    token_values,
)


def test_kernel() -> None:
    """κ(t, t') = exp(-|t - t'|² / σ)"""
    k = kernel(3, 2.0, torch.zeros(1))
    near, far = math.exp(-1 / 2), math.exp(-4 / 2)
    torch.testing.assert_close(k, torch.tensor([[1, near, far], [near, 1, near], [far, near, 1]]))
    assert torch.equal(kernel(3, 0.0, torch.zeros(1)), torch.eye(3))


def test_what_blocks_achieve() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]]])  # [1, 3, 2]
    labels = torch.tensor([[0, 0, -100]])
    likelihood = token_values(logits, labels, "likelihood")
    expected = [-math.log(1 + math.exp(-2)), -math.log(1 + math.exp(1)), 0.0]
    torch.testing.assert_close(likelihood, torch.tensor([expected]))
    assert token_values(logits, labels, "correctness").tolist() == [[1.0, 0.0, 0.0]]


#: C_t^n of three blocks at four tokens of one text: the first block is right at token 1, the second at 1, 2 and 4, ...
CORRECT = torch.tensor([[[1.0, 0.0, 0.0, 0.0]], [[1.0, 1.0, 0.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]]])


def test_token_oracle() -> None:
    """Without smoothing: the lowest block that is right; with a price above 1/2 a third block is not worth it."""
    assert token_oracle(CORRECT, 0.1, 0.0).tolist() == [[1, 2, 3, 2]]
    assert token_oracle(CORRECT, 0.6, 0.0).tolist() == [[1, 2, 1, 2]]  # 3 - 1: right costs 1.2 more than wrong
    assert token_oracle(CORRECT, 1.1, 0.0).tolist() == [[1, 1, 1, 1]]
    # σ = 1 with e = exp(-1): token 1 sees 1, 1 + e, 1 + e + … of its neighbours; at λ = 0.1 block 2 gains e > 0.1
    assert token_oracle(CORRECT, 0.1, 1.0).tolist() == [[2, 3, 3, 3]]


def test_sequence_oracle() -> None:
    """Totals 1, 3, 4: at λ = 1 the second block (3 - 2) ties with the third (4 - 3), and the lower one is taken."""
    assert sequence_oracle(CORRECT, 0.5).tolist() == [[3, 3, 3, 3]]
    assert sequence_oracle(CORRECT, 1.0).tolist() == [[2, 2, 2, 2]]
    assert sequence_oracle(CORRECT, 2.5).tolist() == [[1, 1, 1, 1]]
    assert best_block(torch.tensor([[[1.0]], [[1.0]]]), 0.0).item() == 1


def test_geometric_distribution() -> None:
    """χ = 1/2, 1/4 with three blocks: q = 1/2, 1/2 · 1/4, 1/2 · 3/4"""
    gates = torch.tensor([0.0, -math.log(3)]).view(2, 1, 1)
    q = geometric_log_q(gates).exp().flatten()
    torch.testing.assert_close(q, torch.tensor([1 / 2, 1 / 8, 3 / 8]))
    oracle = torch.tensor([[3]])
    torch.testing.assert_close(geometric_loss(gates, oracle), torch.tensor([[-math.log(3 / 8)]]))


def test_multinomial_loss() -> None:
    """-log softmax(0, log 3)_2 = -log 3/4"""
    loss = multinomial_loss(torch.tensor([[0.0, math.log(3)]]), torch.tensor([2]))
    torch.testing.assert_close(loss, torch.tensor([-math.log(3 / 4)]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("uniform", [1, 1, 1, 1]), ("linear", [1, 2, 3, 4]), ("root", [1, 2**0.5, 3**0.5, 2]),
     ("inverse_root", [1, 2**-0.5, 3**-0.5, 0.5]), ("inverse", [1, 1 / 2, 1 / 3, 1 / 4])],
)  # fmt: skip
def test_block_weights(name: str, expected: list[float]) -> None:
    torch.testing.assert_close(block_weights(name, 4), torch.tensor(expected) / sum(expected))


def test_the_dial_shifts_the_decision() -> None:
    """0 is the full decoder, 0.5 the paper's decision, 1 the first block; between them depth never rises."""
    dials = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    torch.testing.assert_close(shift(dials)[1:4], torch.tensor([math.log(3), 0.0, -math.log(3)], dtype=torch.float64))
    logits = torch.tensor([[1.0, 2.0, 1.5]]).expand(5, -1)
    biased = logits.double() + shift(dials).clamp(-1e6, 1e6).unsqueeze(1) * torch.arange(1, 4)
    assert (biased.argmax(dim=1) + 1).tolist() == [3, 3, 2, 1, 1]
    assert first_block(logits, dials) == [3, 3, 2, 1, 1]


def first_block(logits: torch.Tensor, dials: torch.Tensor) -> list[int]:
    """The first block whose lead is at least the shift; else the last."""
    leaves = lead(logits) >= shift(dials).unsqueeze(1)
    return torch.cat([leaves, torch.ones_like(leaves[:, :1])], dim=1).int().argmax(dim=1).add(1).tolist()


def test_the_first_sufficient_lead_is_the_argmax() -> None:
    torch.testing.assert_close(lead(torch.tensor([[1.0, 2.0, 1.5]])), torch.tensor([[-1.0, 0.5]], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 6, generator=generator, dtype=torch.float64)
    dials = torch.rand(400, generator=generator, dtype=torch.float64)
    biased = logits + shift(dials).unsqueeze(1) * torch.arange(1, 7)
    assert first_block(logits, dials) == (biased.argmax(dim=1) + 1).tolist()
