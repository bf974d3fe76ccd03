"""Dropout of attention in training: which module it is, which kernel runs, and that nothing changes afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, tiny_backbone, tiny_model, tiny_reviews
from torch import nn

from stretto import train
from stretto.training.run import dropout_in_attention
from stretto.training.trainer import StageTrainer

QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 16}


@pytest.mark.parametrize(("dropout", "kernel"), [(0.1, "eager"), (0.0, "sdpa")])
def test_attention_with_dropout_is_unfused_while_training_and_as_before_afterwards(
    dropout: float, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = tiny_model("length_adaptive", num_train_epochs=1, drop_epochs=1), set()
    before, compute_loss = model.encoder.config._attn_implementation, StageTrainer.compute_loss

    def watched(trainer: StageTrainer, *args: Any, **named: Any) -> Any:
        seen.add(model.encoder.config._attn_implementation)
        return compute_loss(trainer, *args, **named)

    monkeypatch.setattr(StageTrainer, "compute_loss", watched)
    train(model, tiny_reviews(32), tiny_reviews(16, seed=1), tmp_path / "out", attention_dropout=dropout, **QUICK)
    assert seen == {kernel}
    assert model.encoder.config._attn_implementation == before == "sdpa"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_dropout_is_that_of_attention_and_no_other(architecture: str) -> None:
    backbone = tiny_backbone(architecture)
    backbone.model.train()
    names = {module: name for name, module in backbone.model.named_modules()}
    known = {
        "albert": "attention.attention_dropout", "alberta": "attention_dropout", "distilbert": "attention.dropout",
        "mpnet": "attention.attn.dropout",
    }  # fmt: skip
    assert names[backbone.specs[0].attention.dropout].endswith(known.get(architecture, "attention.self.dropout"))
    for module in backbone.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    hidden, positions = torch.randn(2, 6, backbone.d), torch.arange(6).expand(2, 6)

    def twice() -> list[torch.Tensor]:
        return [backbone.attend(0, hidden, torch.zeros(2, 1, 1, 6), positions) for _ in range(2)]

    with dropout_in_attention(backbone, 0.5):
        first, second = twice()
        assert not torch.equal(first, second)
        with dropout_in_attention(backbone, None):
            first, second = twice()
            assert not torch.equal(first, second)
        with dropout_in_attention(backbone, 0.0):
            torch.testing.assert_close(*twice(), atol=0, rtol=0)
    torch.testing.assert_close(*twice(), atol=0, rtol=0)


def test_attention_dropout_holds_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model("length_adaptive", num_train_epochs=1, drop_epochs=1), set()
    module, compute_loss = model.backbone.specs[1].attention.dropout, StageTrainer.compute_loss

    def watched(trainer: StageTrainer, *args: Any, **named: Any) -> Any:
        seen.add(module.p)
        return compute_loss(trainer, *args, **named)

    monkeypatch.setattr(StageTrainer, "compute_loss", watched)
    train(model, tiny_reviews(32), tiny_reviews(16, seed=1), tmp_path / "out", attention_dropout=0.25, **QUICK)
    assert seen == {0.25}
    assert module.p == model.encoder.config.attention_probs_dropout_prob != 0.25
