"""A combination is trained in stages from one call, gets one dial, and is saved as any other method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_reviews

from stretto import AdaptiveModel, sweep, train
from stretto.methods import Combined

QUICK = {"per_device_train_batch_size": 16, "progress": False, "seed": 1}
PAIRS = {
    "length_adaptive+deebert": {"length_adaptive_drop_epochs": 1, "deebert_exit_epochs": 4},
    "depth_mi+pabee": {"depth_mi_depth_epochs": 1, "pabee_joint_epochs": 4, "pabee_joint_exit_learning_rate": 5e-3},
    "adapler+alberta": {"adapler_adaptive_epochs": 1, "alberta_gate_epochs": 1},
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_combination_learns_and_is_saved(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, num_train_epochs=6, learning_rate=2e-3, **PAIRS[name])
    train(model, tiny_reviews(96), tiny_reviews(24, seed=1), tmp_path / "out", **QUICK)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    method = loaded.method
    assert isinstance(method, Combined)
    assert method.name == name
    assert method.config.frontier  # found on the dev data
    assert method.dial.sweep[1:] == method.config.costs
    points = sweep(loaded, tiny_reviews(48, seed=2), progress=False)
    assert points[0].score > 0.85
    assert min(point.cost for point in points) < 0.7
    texts = [text for (text,) in tiny_reviews(12, seed=3).texts]
    budgets = torch.tensor([method.dial.sweep[i % len(method.dial.sweep)] for i in range(12)])
    for text, budget, together in zip(texts, budgets.tolist(), loaded.predict(texts, budgets), strict=True):
        alone = loaded.predict(text, budget)
        assert (alone.label, alone.depth, alone.cost) == (together.label, together.depth, together.cost)
        assert alone.score == pytest.approx(together.score, abs=1e-5)
