"""Few examples: enough steps to learn from them, and no dial chosen by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import run

from stretto import AdaptiveModel
from stretto.methods import METHODS
from stretto.training.plan import enough_epochs

BATCH = {"per_device_train_batch_size": 32}


@pytest.mark.parametrize(
    ("examples", "named", "arguments", "expected"),
    [
        (270, (), {}, 12.0),  # 9 steps an epoch
        (270, ("num_train_epochs",), {}, 3.0),
        (270, (), {"max_steps": 5}, 3.0),
        (270, (), {"gradient_accumulation_steps": 2}, 20.0),
        (20, (), {}, 100.0),
        (1100, (), {}, 3.0),  # 35 steps an epoch
        (100_000, (), {}, 3.0),
    ],
)
def test_default_epochs_depend_on_the_size(
    examples: int, named: tuple[str, ...], arguments: dict[str, Any], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.training.plan.FEWEST_STEPS", 100)
    config = enough_epochs(METHODS["full"].Config(), named, examples, {**BATCH, **arguments})
    assert config.num_train_epochs == expected


def test_stages_that_are_off_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.training.plan.FEWEST_STEPS", 100)
    config = enough_epochs(METHODS["adapler"].Config(retrain_epochs=0), (), 270, BATCH)
    assert (config.num_train_epochs, config.adaptive_epochs, config.retrain_epochs) == (12, 12, 0)


def test_training_reports_raised_epochs(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.training.plan.FEWEST_STEPS", 8)
    args = ["train", shared / "train.jsonl", "--model", shared / "encoder", "--exit-epochs", 1]
    result = run(*args, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "few examples (58): using --num-train-epochs 4 (default: 3) to train at least 8 steps\n" in result.stderr
    config: Any = AdaptiveModel.from_pretrained(tmp_path / "out").method.config
    assert (config.num_train_epochs, config.exit_epochs) == (4, 1)
