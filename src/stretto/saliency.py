"""Saliency: how much the right answer hangs on each token.

    S_i = ‖∂y_c/∂h⁰_i ⊙ h⁰_i‖₂, divided by Σ_i S_i

h⁰ are the embeddings' outputs, y_c the logit of the right answer (Modarressi, Mohebbi, Pilehvar: *AdapLeR*, ACL 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.engine.reference import ReferenceEngine
from stretto.state import Inputs
from stretto.tasks import Task


@torch.enable_grad()
def saliency(engine: ReferenceEngine, task: Task, inputs: Inputs, labels: Tensor) -> Tensor:
    """[B, T], summing to 1 over the tokens of each sequence; 0 on padding. The model must be in eval mode."""
    backbone = engine.backbone
    embedded = engine.embed(inputs).detach().requires_grad_()
    last = engine.hidden_states(inputs, embedded=embedded)[-1]
    if backbone.token_head is None:
        first = torch.arange(len(last), device=last.device), inputs.attention_mask.argmax(dim=1)
        logits = backbone.classify(last[first])
    else:
        logits = backbone.label_tokens(last)
    (gradient,) = torch.autograd.grad(task.right_logit(logits, labels).sum(), embedded)
    size = (gradient * embedded).detach().norm(dim=-1) * inputs.attention_mask  # [B, T]
    return size / size.sum(dim=1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
