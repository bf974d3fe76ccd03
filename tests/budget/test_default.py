"""The dial of a model just trained: guaranteed, an estimate, or the full model; and that it says which."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, run, write_reviews
from tiny import tiny_model, tiny_reviews

from stretto import AdaptiveModel
from stretto.budget.calibrate import MaxLoss
from stretto.budget.default import CHOOSING, GOAL, parts_of, set_default
from stretto.methods import default_method
from stretto.tasks import TASKS

REVIEWS = tiny_reviews(240)


@pytest.fixture
def varied() -> Any:
    """A model whose exits leave at many dials."""
    made, dice = tiny_model("deebert"), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in made.method.parameters():
            parameter.normal_(std=0.4, generator=dice)
    return made


def test_what_is_promised() -> None:
    assert (GOAL.points, GOAL.confidence) == (1.0, 0.95)


@pytest.mark.parametrize(("n", "fresh"), [(398, 0), (399, 299), (500, 299), (1001, 500)])
def test_a_part_of_the_dev_data_is_kept_for_the_guarantee(n: int, fresh: int, varied: Any) -> None:
    dev = tiny_reviews(n)
    choosing, kept = parts_of(varied, dev, seed=1)
    assert (0 if kept is None else len(kept)) == fresh
    if kept is None:
        assert choosing is dev
        return
    assert len(choosing) == n - fresh >= CHOOSING
    assert sorted(choosing.where + kept.where) == sorted(dev.where)
    assert parts_of(varied, dev, seed=1)[1] == kept != parts_of(varied, dev, seed=2)[1]


@pytest.mark.parametrize("method", ["full", "alberta", "static_depth", "depth_mi+static_depth", "without mapie"])
def test_all_dev_data_choose_where_nothing_can_be_guaranteed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dial; off is not what was trained; no statistics."""
    if method == "without mapie":
        monkeypatch.setattr("stretto.budget.default.have_mapie", lambda: False)
        method = "deebert"
    assert parts_of(tiny_model(method), tiny_reviews(1000), 0)[1] is None


def test_guaranteed_where_the_data_allow_it(varied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.budget.default.GOAL", MaxLoss(points=15, confidence=0.8))
    choosing, fresh = parts_of(varied, REVIEWS, 0)
    assert fresh is not None and len(choosing) == len(fresh) == 120
    set_default(varied, REVIEWS, fresh, seed=0, progress=False)
    *points, budget = varied.operating_points
    assert (budget.name, budget.n, budget.dial) == ("loss-15", 120, varied.dial)
    assert [point.dial for point in points] == list(varied.method.dial.sweep) and {point.n for point in points} == {240}
    assert varied.standing() == "guaranteed"
    assert varied.promise().startswith("guaranteed with 80 % confidence: right answers lost at most 15 %")


def test_an_estimate_says_how_many_examples_a_guarantee_needs(varied: Any, tmp_path: Path) -> None:
    set_default(varied, REVIEWS, parts_of(varied, REVIEWS, 0)[1], seed=0, progress=False)
    assert varied.dial > 0 and varied.standing() == "estimate"
    told = "estimate on 240 examples, no guarantee (one needs at least 299 fresh examples)"
    assert varied.promise() == told
    varied.save_pretrained(tmp_path / "m")
    assert AdaptiveModel.from_pretrained(tmp_path / "m").promise() == told
    assert f"Default dial: {varied.dial:g} ({told})" in (tmp_path / "m" / "README.md").read_text()

    data = write_reviews(tmp_path / "test.jsonl", 40)
    shown = run("evaluate", tmp_path / "m", data, "--plot", tmp_path / "curve.svg")
    assert "default (estimate)" in shown.stdout and told in shown.stderr
    assert "default dial (estimate)" in (tmp_path / "curve.svg").read_text()
    assert json.loads(run("evaluate", tmp_path / "m", data, "--json").stdout)["dial"]["promise"] == told
    answered = run("predict", tmp_path / "m", data, "--output", tmp_path / "answers.jsonl")
    assert f"dial {varied.dial:g}: {told}" in answered.stderr


def test_examples_that_fail_the_test_are_an_estimate_too(varied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.budget.default.GOAL", MaxLoss(points=15, confidence=0.999999))
    monkeypatch.setattr(varied.method, "dial", dataclasses.replace(varied.method.dial, sweep=(0.0, 0.34)))
    set_default(varied, REVIEWS, parts_of(varied, REVIEWS, 0)[1], seed=0, progress=False)
    needed = {point.needs for point in varied.operating_points} - {None}
    assert len(needed) == 1 and needed.pop() > 120
    assert not any(point.certificate for point in varied.operating_points)


def test_too_few_examples_keep_the_full_model(varied: Any) -> None:
    set_default(varied, tiny_reviews(50), None, seed=0, progress=False)
    assert varied.dial == 0 and varied.standing() == "full model"
    assert varied.promise() == "the full model; a guarantee for less needs at least 299 fresh examples"


DEFAULT = {
    "classification": "deebert", "regression": "lte", "tokens": "length_adaptive", "span": "length_adaptive",
    "seq2seq": "depth_adaptive",
}  # fmt: skip


@pytest.mark.parametrize(("task", "method"), DEFAULT.items())
def test_every_task_has_a_default_method(task: str, method: str) -> None:
    assert default_method(TASKS[task]) == method


@pytest.mark.parametrize("mapie", [True, False])
def test_training_ends_with_three_lines(
    mapie: bool, encoder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mapie:
        for place in ("risk", "default"):
            monkeypatch.setattr(f"stretto.budget.{place}.have_mapie", lambda: False)
    dev = write_reviews(tmp_path / "dev.jsonl", 200, seed=3)
    args = [data.with_name("train.jsonl"), "--dev", dev, "--model", encoder, "--output", tmp_path / "out", *QUICK]
    result = run("train", *args)
    assert result.exit_code == 0, result.stderr
    score, speed, promise = result.stdout.splitlines()[-3:]
    assert score.startswith("Score:  accuracy ") and score.endswith("(200 dev texts).")
    assert "times the full model's one text at a time," in speed and "times in bulk (Hugging Face's: " in speed
    if mapie:
        assert "299 fresh examples" in promise
    else:
        assert promise.endswith("Run `pip install 'stretto[calibrate]'` (mapie), which computes guarantees.")
    assert AdaptiveModel.from_pretrained(tmp_path / "out").method.name == "deebert"
