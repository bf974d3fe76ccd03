"""Saliency against slopes measured by small steps."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tiny import random_inputs, tiny_encoder

from stretto.backbones import backbone_for
from stretto.engine.reference import ReferenceEngine
from stretto.methods.saliency import saliency
from stretto.tasks import Classification


def test_saliency_is_the_gradient_times_the_embedding() -> None:
    backbone = backbone_for(copy.deepcopy(tiny_encoder("bert", n_layers=2)).double())
    engine, inputs = ReferenceEngine(backbone), random_inputs([4, 2], side="left")
    labels = torch.tensor([2, 0])
    got = saliency(engine, Classification(["a", "b", "c"]), inputs, labels)

    with torch.no_grad():
        embedded, small = engine.embed(inputs), 1e-5
        slope = torch.zeros_like(embedded)
        for where in itertools.product(range(4), range(backbone.d)):
            ends = []
            for step in (small, -small):
                moved = embedded.clone()
                moved[(slice(None), *where)] += step
                last = engine.hidden_states(inputs, embedded=moved)[-1]
                first = last[torch.arange(2), inputs.attention_mask.argmax(dim=1)]
                ends.append(backbone.head(first)[torch.arange(2), labels])
            slope[(slice(None), *where)] = (ends[0] - ends[1]) / (2 * small)
        size = (slope * embedded).norm(dim=-1) * inputs.attention_mask
    torch.testing.assert_close(got, size / size.sum(dim=1, keepdim=True), atol=1e-7, rtol=1e-5)
    assert got.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert got[1].tolist()[:2] == [0.0, 0.0]  # padding
