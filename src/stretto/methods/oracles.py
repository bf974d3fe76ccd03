"""The block at which each token of a known text should leave, from the answers of all blocks.

N blocks, B texts of T tokens. The value of a block at a token is its log-likelihood LL_t^n = log p(y_t | h_t^n), or
whether it is right: C_t^n = 1 if y_t is the most likely token. An oracle subtracts a price of λ for each block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_values(logits: Tensor, labels: Tensor, kind: str) -> Tensor:
    """[B, T, V] of one block and [B, T] -> [B, T]: LL ('likelihood') or C ('correctness'); 0 where no token is."""
    there = labels >= 0
    if kind == "correctness":
        return ((logits.argmax(dim=-1) == labels) & there).to(logits.dtype)
    log_probs = logits.log_softmax(dim=-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return log_probs * there


def kernel(length: int, sigma: float, like: Tensor) -> Tensor:
    """κ(t, t') = exp(-|t - t'|² / σ), [T, T]; σ = 0 looks at the token alone."""
    place = torch.arange(length, device=like.device, dtype=like.dtype)
    distance = (place[:, None] - place[None, :]) ** 2
    return (distance == 0).to(like.dtype) if sigma == 0 else torch.exp(-distance / sigma)


def token_oracle(values: Tensor, penalty: float, sigma: float) -> Tensor:
    """argmax_n Σ_t' κ(t, t') value_t'^n - λ n for each token: [N, B, T] -> [B, T], from 1. Of equal ones the lowest."""
    smooth = values @ kernel(values.shape[2], sigma, values)  # κ is symmetric
    return best_block(smooth, penalty)


def sequence_oracle(values: Tensor, penalty: float) -> Tensor:
    """argmax_n Σ_t value_t^n - λ n, the same for all tokens of a text: [N, B, T] -> [B, T], from 1."""
    total = values.sum(dim=2, keepdim=True).expand_as(values)
    return best_block(total, penalty)


def best_block(values: Tensor, penalty: float) -> Tensor:
    """[N, B, T] -> [B, T]: the first n (from 1) with the greatest value - λ n."""
    depth = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    return (values - penalty * depth[:, None, None]).argmax(dim=0) + 1


def multinomial_loss(logits: Tensor, oracle: Tensor) -> Tensor:
    """-log q_t(n*) of q = softmax(logits): […, N] and […] -> […]"""
    return -logits.log_softmax(dim=-1).gather(-1, (oracle - 1).unsqueeze(-1)).squeeze(-1)


def geometric_log_q(gates: Tensor) -> Tensor:
    """log q(n) with χ^n = σ(gate_n): χ^n Π_{n'<n} (1 - χ^n') for n < N, and what is left for N. [N - 1, …] -> [N, …]"""
    leave, stay = torch.nn.functional.logsigmoid(gates), torch.nn.functional.logsigmoid(-gates)
    nothing = torch.zeros_like(gates[:1])
    stayed = torch.cat([nothing, stay.cumsum(dim=0)])  # log Π_{n'<n} (1 - χ^n'), for n = 1..N
    return torch.cat([leave, nothing]) + stayed


def geometric_loss(gates: Tensor, oracle: Tensor) -> Tensor:
    """-log q_t(n*) of the geometric-like distribution: [N - 1, B, T] and [B, T] -> [B, T]"""
    return -geometric_log_q(gates).gather(0, (oracle - 1).unsqueeze(0)).squeeze(0)
