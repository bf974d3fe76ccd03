"""The study of guarantees: the real chooser passes it, a wrong one fails; from the command line to the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run, write_reviews
from sources import jsonl, write
from tiny import tiny_model, tiny_reviews

from stretto import StrettoError
from stretto.bench.guarantee import QUANTILES, Recorded, guaranteed, most_violations, study, uncorrected
from stretto.bench.report.guarantees import draw_studies, study_panels, study_table
from stretto.bench.report.plots import digest, drawn_digest
from stretto.bench.results import Results
from stretto.budget.risk import Risk

RISK = Risk(0.05, 0.9, binary=True)


def recorded(n: int = 1500) -> Recorded:
    """Ten dials: each loses more than the one before, around what is allowed, and costs less."""
    dice = np.random.default_rng(1)
    rates = np.array([0, 0.01, 0.02, 0.03, 0.04, 0.045, 0.05, 0.055, 0.06, 0.08])[:, None]
    lengths = dice.integers(1, 9, n).astype(float)
    return Recorded((dice.random(n) < rates).astype(float), np.linspace(1, 0.1, 10)[:, None] * lengths, lengths)


def test_a_guarantee_holds_and_an_uncorrected_choice_does_not() -> None:
    found = study(recorded(), RISK, splits=100, seed=3)
    right, wrong, limit = found["guaranteed"], found["uncorrected"], found["most_violations"]
    assert right["violations"] <= limit < wrong["violations"]
    assert right["violations_on_test"] < wrong["violations_on_test"]
    assert found["oracle"]["cost"] < right["cost"] < 1 and right["full_model"] < 100
    assert found["calibration"] == found["test"] == 750
    assert len(right["quantiles"]) == len(QUANTILES) and right["quantiles"][-1] >= right["risk"]
    assert study(recorded(), RISK, splits=100, seed=3) == found != study(recorded(), RISK, splits=100, seed=4)


def test_choosers() -> None:
    losses = np.zeros((4, 200))
    losses[1, :4], losses[2, :30], losses[3, :9] = 1, 1, 1
    costs = np.array([1.0, 0.8, 0.5, 0.2])
    assert guaranteed(RISK)(losses, costs) == 1  # the third fails, and ends the sequence
    assert uncorrected(RISK)(losses, costs) == 3
    assert guaranteed(Risk(0.01, 0.99, binary=True))(losses, costs) == 0  # not even the full model passes


def test_how_many_violations_chance_explains() -> None:
    assert most_violations(200, 0.95) == 15
    assert most_violations(20, 0.5) == 14


def test_too_few_texts() -> None:
    with pytest.raises(StrettoError, match="at least 45 texts to calibrate on and some to test on, got 20 of 40"):
        study(recorded(40), RISK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    made, dice = tiny_model("deebert"), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in made.method.parameters():
            parameter.normal_(std=0.4, generator=dice)
    path = tmp_path_factory.mktemp("guarantee") / "model"
    made.save_pretrained(path)
    return path


def test_from_the_command_line_to_the_plot(folder: Path, tmp_path: Path) -> None:
    one, other = write_reviews(tmp_path / "one.jsonl", 80), write_reviews(tmp_path / "other.jsonl", 80, seed=1)
    args = ["--max-loss", "20,30", "--agreement", "0.7", "--confidence", 0.8, "--splits", 20, "--set", "reviews"]
    result = run("bench", "guarantee", folder, one, other, *args, "--json", tmp_path / "g.json")
    assert result.exit_code == 0, result.stderr
    assert "160 texts" in result.stderr and "of 20" in result.stdout
    run("bench", "guarantee", folder, one, other, *args, "--json", tmp_path / "g.json")
    rows = Results.load(tmp_path / "g.json").rows  # the same rows: replaced
    assert [row.name for row in rows] == [
        "deebert loss-20 float32",
        "deebert loss-30 float32",
        "deebert agreement-0.7 float32",
    ]
    assert {row.n_test for row in rows} == {160} and {row.set for row in rows} == {"reviews"}
    assert study_table(rows).count("| reviews |") == 3 and study_table([]) == "Not measured yet."
    panels = study_panels(rows)
    draw_studies(panels, tmp_path / "plot.png")
    assert drawn_digest(tmp_path / "plot.png") == digest(panels)


def test_numbers_are_judged_by_their_worst_error(tmp_path: Path) -> None:
    tiny_model("lte", n_labels=1).save_pretrained(tmp_path / "model")
    data = tiny_reviews(80)
    rows = [{"text": text, "label": float(label)} for (text,), label in zip(data.texts, data.labels, strict=True)]
    args = [tmp_path / "model", write(tmp_path / "d.jsonl", jsonl(*rows)), "--max-loss", 20, "--agreement", 0.8]
    refused = run("bench", "guarantee", *args)
    assert refused.exit_code == 1 and "Set it, for example --worst-error 5" in refused.stderr
    more = ["--worst-error", 2, "--confidence", 0.8, "--splits", 20, "--json", tmp_path / "g.json"]
    result = run("bench", "guarantee", *args, *more)
    assert result.exit_code == 0, result.stderr
    assert [row.settings["worst error"] for row in Results.load(tmp_path / "g.json").rows] == [2, 2]


def test_a_full_model_that_was_not_trained_is_no_measure(tmp_path: Path) -> None:
    tiny_model("static_depth").save_pretrained(tmp_path / "model")
    refused = run("bench", "guarantee", tmp_path / "model", write_reviews(tmp_path / "d.jsonl", 80), "--max-loss", 20)
    assert refused.exit_code == 1 and "Expected a full model that was trained" in refused.stderr


def test_bad_inputs(folder: Path, tmp_path: Path) -> None:
    data = write_reviews(tmp_path / "d.jsonl", 80)
    for args, message in (
        (["--max-loss", "1"], "at least 299 texts to calibrate on and some to test on, got 40 of 80"),
        (["--max-loss", "one"], "Expected numbers separated by commas after --max-loss"),
        (["--max-loss", "200"], "strictly between 0 and 1"),
        (["--max-loss", "30", "--part", "1"], "got 80 of 80"),
    ):
        refused = run("bench", "guarantee", folder, data, *args, "--json", tmp_path / "g.json")
        assert refused.exit_code == 1 and message in refused.stderr, refused.stderr
    assert not (tmp_path / "g.json").exists()


def test_a_broken_guarantee_is_an_error(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wrong chooser in its place the command fails."""
    monkeypatch.setattr("stretto.bench.guarantee.guaranteed", uncorrected)
    data = write_reviews(tmp_path / "d.jsonl", 160)
    result = run("bench", "guarantee", folder, data, "--max-loss", 20, "--confidence", 0.95, "--splits", 60)
    assert result.exit_code == 1 and "broken more often than chance explains: deebert loss-20" in result.stderr
