"""What a stage starts from, trains and keeps: its seed, its checkpoints, the frozen backbone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model, tiny_reviews

from stretto import train
from stretto.saving.files import write_tensors
from stretto.training import run
from stretto.training.learner import Learner
from stretto.training.notes import mean_notes

QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 16}


def test_the_last_complete_checkpoint_is_resumed(tmp_path: Path) -> None:
    assert run.last_checkpoint(tmp_path) is None
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step < 12:  # a kill came before the last file
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert run.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_the_best_checkpoints_are_kept_of_equal_ones_the_first(tmp_path: Path) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.9}
    for step in scores:
        (tmp_path / f"checkpoint-{step}").mkdir()
        write_tensors(tmp_path / f"checkpoint-{step}" / "model.safetensors", {"model.step": torch.tensor([step])})
    history = [{"step": step, "eval_score": score} for step, score in scores.items()]
    run.keep_best(SimpleNamespace(state=SimpleNamespace(log_history=history)), tmp_path, 3)  # type: ignore[arg-type]
    kept = [int(load_file(tmp_path / f"best-{place}.safetensors")["step"]) for place in (1, 2, 3)]
    assert kept == [2, 4, 3] and not (tmp_path / "best-4.safetensors").exists()


def test_a_stage_draws_the_same_whatever_ran_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prepares, too: folds are drawn before the trainer sets its seed."""
    drawn: list[float] = []
    with_notes = run.with_notes

    def watched(*args: Any) -> Any:
        drawn.append(float(torch.rand(1)))
        return with_notes(*args)

    monkeypatch.setattr(run, "with_notes", watched)
    for before in (1, 2):
        torch.manual_seed(before)
        data = tiny_reviews(16)
        train(tiny_model("deebert", exit_epochs=1), data, data, tmp_path / str(before), skip="backbone", **QUICK)
    assert len(drawn) == 2 and drawn[0] == drawn[1]


def test_a_frozen_backbone_has_no_gradients_and_no_dropout() -> None:
    model = tiny_model("deebert")
    finetuning, exits = model.method.stages()
    learner = Learner(model, exits).train()
    assert not any(parameter.requires_grad for parameter in model.encoder.parameters())
    assert all(parameter.requires_grad for parameter in model.method.parameters())
    assert learner.training and not model.encoder.training
    assert all(parameter.requires_grad for parameter in Learner(model, finetuning).model.encoder.parameters())


def test_notes_of_checkpoints_leave_the_model_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("full")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    paths = [tmp_path / f"best-{place}.safetensors" for place in (1, 2)]
    for add, path in enumerate(paths, start=1):
        write_tensors(path, {n: v + add if v.is_floating_point() else v for n, v in before.items()})

    def prepare(engine: Any, batches: Any) -> Any:
        return {"text_weight": torch.stack([next(iter(engine.backbone.model.parameters())).detach().mean()])}

    noted = mean_notes(model, prepare, (), paths)["text_weight"]
    first = next(iter(model.encoder.parameters())).detach().mean()
    assert float(noted) == pytest.approx(float(first) + 1.5, abs=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
