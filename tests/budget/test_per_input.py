"""Lengths for each text: what the predictor reads, how it is fitted, what it chooses, saving and loading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run, write_reviews
from tiny import tiny_model, tiny_reviews

from stretto import AdaptiveModel, StrettoError
from stretto.budget.per_input import Observed, fit_per_input, priced, ridge, solve
from stretto.budget.teacher import Teacher
from stretto.methods.length_adaptive import LengthAdaptiveConfig, PerInput

FOUND = {
    "costs": (0.8, 0.6, 0.4), "frontier": ((0.9, 0.8, 0.8, 0.7), (0.8, 0.6, 0.5, 0.4), (0.6, 0.4, 0.3, 0.1)),
}  # fmt: skip


def searched() -> Any:
    return tiny_model("length_adaptive", **FOUND)


def test_a_text_takes_the_least_distance_and_price() -> None:
    config = LengthAdaptiveConfig(prices=(1.0, 100.0), price_costs=(0.7, 0.3))
    costs = torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    per_input = PerInput(config, 2, costs)
    with torch.no_grad():
        per_input.linear.weight.copy_(torch.eye(2))
        per_input.linear.bias.zero_()

    def budget(value: float) -> torch.Tensor:
        return torch.full((3,), value, dtype=torch.float64)

    pooled = torch.tensor([[-3.0, -2.0], [-3.0, 1.0], [2.0, -5.0]])
    near = per_input.distances(pooled)
    assert torch.allclose(near[0], torch.tensor([0, -3.0, -2.0]).exp().double() * torch.tensor([0.0, 1, 1]), atol=1e-6)
    assert near[2, 2] == near[2, 1]  # cheaper is not closer
    assert per_input.choose(pooled, budget(1.0)).tolist() == [0, 0, 0]  # the price is nothing
    # .05 + .5, .14 + .2; .05 + .5, 2.7 + .2; 7.4 + .5, 7.4 + .2; the full model: 1
    assert per_input.choose(pooled, budget(0.7)).tolist() == [2, 1, 0]
    assert per_input.choose(pooled, budget(0.3)).tolist() == [2, 2, 2]
    assert per_input.macs == 4


def test_least_squares() -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, dtype=torch.float64, generator=dice)
    truth = torch.randn(3, 6, dtype=torch.float64, generator=dice)
    y = x @ truth.T + 2 + 0.01 * torch.randn(200, 3, dtype=torch.float64, generator=dice)
    weight, bias = ridge(x, y)
    assert torch.allclose(weight, truth, atol=0.3) and torch.allclose(bias, torch.full((3,), 2.0).double(), atol=0.1)
    noise = torch.randn(200, 3, dtype=torch.float64, generator=dice)
    assert ridge(x, noise)[0].abs().max() < 0.05  # nothing to learn: the same for all
    assert solve(x, y, 1e6)[0].abs().max() < 1e-4
    weight, bias = solve(x + 3, y, 1e-9)  # features need not be around 0
    assert torch.allclose(weight, truth, atol=0.01) and torch.allclose(bias, 2 - 3 * truth.sum(dim=1), atol=0.05)


def test_prices_become_costs_with_the_predictor() -> None:
    per_input = PerInput(LengthAdaptiveConfig(prices=(1.0,), price_costs=(0.5,)), 4, torch.tensor([1.0, 0.5]).double())
    with torch.no_grad():
        per_input.linear.weight.zero_()
        per_input.linear.bias.fill_(-5.0)
        flops = torch.tensor([[100.0, 50.0], [100.0, 50.0]]).double()
        observed = Observed(torch.zeros(2, 4).double(), torch.full((2, 1), -5.0).double(), flops)
        prices, costs = priced(observed, per_input, per_input.costs)
    assert costs == pytest.approx([(2 * 50 + 2 * 2 * 4) / 200])  # two texts, 2 · 4 FLOPs of the predictor for each
    assert 0.5 * prices[0] >= math.exp(-5)  # what half of the cost is worth


def test_it_reads_what_was_observed() -> None:
    """Fitted on the reference engine's states, asked on the packed engine's."""
    model, data = searched(), tiny_reviews(20)
    seen = []
    fit_per_input(model, data, progress=False)
    teacher, choose = Teacher(model, model.encode(data.texts)), model.method.per_input.choose
    model.method.per_input.choose = lambda pooled, budget: seen.append(pooled) or choose(pooled, budget)
    observed = Observed.of(model, model.method, teacher, 32, False)
    model.predict(data.texts, model.method.dial.sweep[-1], batch_size=1)
    model.method.per_input.choose = choose
    got = torch.cat(seen).double()
    assert len(got) == 20
    distance = torch.cdist(got, observed.pooled)
    assert distance.min(dim=0).values.max() < 1e-4 and distance.min(dim=1).values.max() < 1e-4
    assert (observed.distance[:, 1:] - observed.distance[:, :-1]).mean() > 0  # shorter is further away
    assert (observed.flops[:, 1:] < observed.flops[:, :1]).all()


def test_fitted_saved_and_loaded(tmp_path: Path) -> None:
    model, data = searched(), tiny_reviews(30)
    scores = model.method.scores
    points = fit_per_input(model, data, progress=False)
    assert model.method.scores is scores  # tokens are ranked as before
    sweep = model.method.dial.sweep
    assert [point.dial for point in points] == list(sweep) and sweep[0] == 1.0
    for point in points[1:]:  # the dial is the cost that was measured, the predictor included
        assert point.cost == pytest.approx(point.dial, abs=1e-3)
    model.save_pretrained(tmp_path / "m")
    loaded: Any = AdaptiveModel.from_pretrained(tmp_path / "m")
    assert loaded.method.dial.sweep == sweep and loaded.operating_points == points
    dial = sweep[len(sweep) // 2]
    assert [answer.cost for answer in loaded.predict(data.texts, dial)] == [
        answer.cost for answer in model.predict(data.texts, dial)
    ]


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(StrettoError, match="Search first"):
        fit_per_input(tiny_model("length_adaptive"), tiny_reviews(20))
    with pytest.raises(StrettoError, match="10 texts or more to fit a predictor on, got 5"):
        fit_per_input(searched(), tiny_reviews(5))
    with pytest.raises(StrettoError, match="a frontier of falling costs"):
        tiny_model("length_adaptive", **FOUND, prices=(1.0,))


def test_from_the_command_line(tmp_path: Path) -> None:
    tiny_model("length_adaptive").save_pretrained(tmp_path / "m")
    data = write_reviews(tmp_path / "dev.jsonl", 24)
    few = ["--iterations", 1, "--mutations", 2, "--crossovers", 0, "--population", 4]
    result = run("search", tmp_path / "m", data, *few, "--per-input")
    assert result.exit_code == 0, result.stderr
    first: Any = AdaptiveModel.from_pretrained(tmp_path / "m").method
    assert first.per_input is not None and len(first.dial.sweep) > 1
    assert run("evaluate", tmp_path / "m", data).exit_code == 0
    run("search", tmp_path / "m", data, *few)  # another search forgets the predictor of the first
    again: Any = AdaptiveModel.from_pretrained(tmp_path / "m").method
    assert again.per_input is None
