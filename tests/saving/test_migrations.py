"""A folder of format 1 (kept here, with what it answered) loads and answers as it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stretto import AdaptiveModel, StrettoError
from stretto.engine.cost import full_flops
from stretto.saving import migrations
from stretto.saving.folder import read_folder

OLD = Path(__file__).parent / "format-1"


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_of_format_1_answers_as_it_did(again: bool, tmp_path: Path) -> None:
    expected = json.loads((OLD / "answers.json").read_text())
    model = AdaptiveModel.from_pretrained(OLD)
    if again:  # written in today's format
        model.save_pretrained(tmp_path / "new")
        model = AdaptiveModel.from_pretrained(tmp_path / "new")
    assert json.loads((OLD / "stretto.json").read_text())["format"] == 1
    assert model.dial == 0.6
    assert [(point.dial, point.score, point.n, point.dtype) for point in model.operating_points] == [
        (0.0, 0.9, 40, "float32"), (0.6, 0.895, 40, "float32"), (1.0, 0.7, 40, "float32"),
    ]  # fmt: skip
    lengths = torch.tensor(
        [len(feature["input_ids"]) for feature in model.encode([(text,) for text in expected["texts"]]).features]
    )
    scale = full_flops(lengths, model.backbone) / full_flops(lengths, model.backbone, every_row=True)
    left_early = 0
    for dial, answers in expected["answers"].items():
        got = model.predict(expected["texts"], None if dial == "None" else float(dial))
        assert [(p.label, p.depth) for p in got] == [(p["label"], p["depth"]) for p in answers]
        assert [p.probabilities for p in got] == [pytest.approx(p["probabilities"], abs=1e-5) for p in answers]
        # Costs were parts of a full model that updated all rows of its last layer.
        early = [index for index, answer in enumerate(got) if answer.depth < model.backbone.n_layers]
        costs = [got[index].cost * float(scale[index]) for index in early]
        assert costs == pytest.approx([answers[index]["cost"] for index in early], abs=1e-4)
        left_early += len(early)
    assert left_early > 5


def test_what_a_setting_meant_before_it_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"format": 1, "method": "pabee", "config": {"pool": "mean"}, "points": []}
    earlier = {1: {"pabee": {"pool": "cls", "grace": 3}, "lte": {"pool": "first"}}}
    monkeypatch.setattr(migrations, "EARLIER_SETTINGS", earlier)
    assert migrations.to_current(settings)["config"] == {"pool": "mean", "grace": 3}
    assert migrations.to_current({**settings, "method": "lte", "config": {}})["config"] == {"pool": "first"}
    assert migrations.to_current({**settings, "method": "full"})["config"] == {"pool": "mean"}
    assert migrations.to_current({**settings, "format": 2})["config"] == {"pool": "mean"}


def test_of_several_formats_the_nearest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default that changed twice: a folder means what held when it was written."""
    monkeypatch.setattr(migrations, "EARLIER_SETTINGS", {1: {"full": {"a": 1}}, 2: {"full": {"a": 2, "b": 2}}})
    assert migrations.earlier(1, "full") == {"a": 1, "b": 2}
    assert migrations.earlier(2, "full") == {"a": 2, "b": 2}
    assert migrations.earlier(3, "full") == {}


def test_depths_of_earlier_folders_stay_as_published() -> None:
    settings = {"format": 2, "method": "depth_mi", "config": {"depth_epochs": 1}, "points": []}
    assert migrations.to_current(settings)["config"] == {"depth_epochs": 1, "direction": "shallow"}
    both = migrations.to_current({**settings, "method": "depth_mi+deebert", "config": {}})["config"]
    assert both == {"depth_mi_direction": "shallow"}
    named = migrations.to_current({**settings, "config": {"direction": "deep"}})
    assert named["config"] == {"direction": "deep"}


@pytest.mark.parametrize("version", [0, 3, "1", 1.5, None])
def test_unknown_formats(version: object, tmp_path: Path) -> None:
    settings = json.loads((OLD / "stretto.json").read_text())
    (tmp_path / "stretto.json").write_text(json.dumps({**settings, "format": version}))
    with pytest.raises(StrettoError, match="of format 2 or earlier, got format"):
        read_folder(str(tmp_path))


def test_settings_that_are_gone_are_passed_over() -> None:
    config = {"unlabelled": "texts.txt", "penalty": 0.1}
    settings = {"format": 2, "method": "depth_reconstruction", "config": config, "points": []}
    assert migrations.to_current(settings)["config"] == {"penalty": 0.1}
