"""Saliency: how much the right answer depends on each token.

    S_i = ‖∂y_c/∂h⁰_i ⊙ h⁰_i‖₂, divided by Σ_i S_i

h⁰ are the embeddings' outputs, y_c the logit of the right answer (Modarressi, Mohebbi, Pilehvar: *AdapLeR*, ACL 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.engine.reference import ReferenceEngine
from stretto.state import Inputs
from stretto.tasks import Task


def saliency(engine: ReferenceEngine, task: Task, inputs: Inputs, labels: Tensor) -> Tensor:
    """[B, T], summing to 1 over the tokens of each sequence; 0 on padding. The model must be in eval mode."""
    return layer_saliency(engine, task, inputs, labels, depth=1)[0]


@torch.enable_grad()
def layer_saliency(
    engine: ReferenceEngine, task: Task, inputs: Inputs, labels: Tensor, depth: int | None = None
) -> Tensor:
    """[depth, B, T]: the same with the input of each of the first `depth` layers (default: all) instead of h⁰."""
    head = engine.backbone.head
    embedded = engine.embed(inputs).detach().requires_grad_()
    *states, last = engine.hidden_states(inputs, embedded=embedded)
    logits = head(head.pool_padded(last, inputs.attention_mask))
    states = states[:depth]
    gradients = torch.autograd.grad(task.right_logit(logits, labels).sum(), states)
    sizes = torch.stack([(g * state).detach().norm(dim=-1) for g, state in zip(gradients, states, strict=True)])
    sizes = sizes * inputs.attention_mask  # [depth, B, T]
    return sizes / sizes.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(sizes.dtype).tiny)
