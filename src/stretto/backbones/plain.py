"""A layer computed from its spec on padded states: differentiable, with dropout, in plain PyTorch.

The reference engine runs these where a backbone does not give it Hugging Face's own modules. B sequences, T columns;
`bias` ([B, 1 or heads, 1 or T, T]) is added to scaled scores; `positions` ([B, T]) are positions in the input.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones.spec import Affine, AttentionSpec, LayerSpec


def affine(part: Affine, x: Tensor) -> Tensor:
    return F.linear(x, part.weight, part.bias)


def attention_probabilities(spec: LayerSpec, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    """How much each row (third axis) attends to each: [B, T, d] -> [B, heads, T, T]."""
    return _probabilities(spec.attention, spec.attention_input(hidden), bias, positions)


def _probabilities(spec: AttentionSpec, read: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
    query, key = (spec.by_head(spec.turned(affine(part, read), positions)) for part in (spec.query, spec.key))
    scores = query @ key.transpose(2, 3)
    if spec.relative is not None:
        scores = scores + spec.relative.scores(query, key, positions, positions)
    return torch.softmax(scores * spec.scale + bias, dim=-1)


def attend(spec: LayerSpec, hidden: Tensor, bias: Tensor, positions: Tensor, training: bool) -> Tensor:
    """Attention block with residual and norm: [B, T, d] -> [B, T, d]."""
    attention, read = spec.attention, spec.attention_input(hidden)
    weights = F.dropout(_probabilities(attention, read, bias, positions), attention.dropout.p, training)
    context = (weights @ attention.by_head(affine(attention.value, read))).transpose(1, 2).flatten(2)
    added = hidden + attention.output_dropout(attention.output(context))
    return added if spec.pre_norm else spec.attention_norm(added)


def feed_forward(spec: LayerSpec, hidden: Tensor) -> Tensor:
    """FFN block with residual and norm: […, d] -> […, d]."""
    ffn, read = spec.ffn, spec.ffn_norm(hidden) if spec.pre_norm else hidden
    inner = ffn.activation(affine(ffn.into, read))
    if ffn.factor is not None:
        inner = inner * affine(ffn.factor, read)
    added = hidden + ffn.output_dropout(ffn.out(ffn.dropout(inner)))
    return added if spec.pre_norm else spec.ffn_norm(added)
