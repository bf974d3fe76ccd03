"""Budgets: which dial a goal finds, what its certificate says, and that too few examples change nothing."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from scipy.stats import binom
from sources import jsonl, write
from tiny import tiny_model, tiny_questions, tiny_reviews, tiny_tagging

from stretto import AdaptiveModel, StrettoError
from stretto.budget.calibrate import Agreement, MaxLoss, Spend, Wait, calibrate
from stretto.budget.risk import Risk, in_order
from stretto.data import Dataset
from stretto.saving.digests import dataset_digest
from stretto.saving.place import locked
from stretto.saving.points import Certificate, Latency
from stretto.tasks import Classification, LabelPrediction, Regression, Span, Tokens

REVIEWS = tiny_reviews(120)


@pytest.fixture(scope="module")
def varied() -> Any:
    """A model whose exits leave at many dials, and are often but not always of the full model's opinion."""
    made, dice = tiny_model("deebert"), torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in made.method.parameters():
            parameter.normal_(std=0.4, generator=dice)
    return made


def fresh(model: Any) -> Any:
    model.operating_points, model.dial = [], 0.0
    return model


# ---- the tests of dials


@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_the_p_value_of_zero_one_losses_is_the_binomial_tail(k: int) -> None:
    """The least count whose average comes out above it in floating point is among these: 7/300 · 300 > 7."""
    risk = Risk(0.05, 0.95, binary=True)
    assert risk.p_value(k / 300, 300) == pytest.approx(min(binom.cdf(k, 300, 0.05), hoeffding(k / 300, 300, 0.05)))


def hoeffding(loss: float, n: int, allowed: float) -> float:
    if loss == 0:
        return (1 - allowed) ** n
    return math.exp(-n * (loss * math.log(loss / allowed) + (1 - loss) * math.log((1 - loss) / (1 - allowed))))


def test_losses_between_zero_and_one_get_the_weaker_bound() -> None:
    assert Risk(0.1, 0.95, binary=False).p_value(0.02, 200) > Risk(0.1, 0.95, binary=True).p_value(0.02, 200)


def test_how_many_examples_are_needed() -> None:
    risk = Risk(0.01, 0.95, binary=True)
    assert risk.examples_needed() == math.ceil(math.log(0.05) / math.log(0.99)) == 299
    needed = risk.examples_needed(0.005)
    assert needed is not None and needed > 1000
    assert risk.p_value(0.005, needed) <= 0.05 < risk.p_value(0.005, needed - 1)
    assert risk.examples_needed(0.01) is None
    assert risk.examples_needed(0.01 - 1e-9) is None


@pytest.mark.parametrize(("allowed", "confidence"), [(0, 0.95), (1, 0.95), (0.01, 1), (0.01, 0), (math.nan, 0.9)])
def test_bounds_that_say_nothing(allowed: float, confidence: float) -> None:
    with pytest.raises(StrettoError, match="strictly between 0 and 1"):
        Risk(allowed, confidence, binary=True)


def test_the_first_failure_ends_the_tests_though_a_later_one_would_pass() -> None:
    asked = []

    def losses() -> Any:
        for dial, loss in ((0.0, 0), (0.1, 0), (0.2, 1), (0.3, 0)):
            asked.append(dial)
            yield dial, [float(loss)] * 50 + [0.0] * 50

    risk = Risk(0.1, 0.95, binary=True)
    tests = list(in_order(risk, losses()))
    assert [test.dial for test in tests] == asked == [0.0, 0.1, 0.2]
    assert tests[-1].loss == 0.5
    assert risk.safe([test.p_value for test in tests]) == [0, 1]


# ---- goals


def by_hand(model: Any, data: Dataset, allowed: float, confidence: float, labels: list[Any] | None) -> tuple[Any, Any]:
    """The last dial before the first whose binomial tail is too heavy, and all p-values."""
    full = [answer.label for answer in model.predict(data.texts, 0.0)]
    names = model.task.label_names
    p_values, safe = [], []
    for dial in model.method.dial.sweep:
        answers = model.predict(data.texts, dial)
        if labels is None:
            lost = [a.label != b for a, b in zip(answers, full, strict=True)]
        else:
            right = [names[label] for label in labels]
            lost = [f == r and a.label != r for f, a, r in zip(full, answers, right, strict=True)]
        risk = sum(lost) / len(lost)
        p = (
            1.0
            if risk > allowed
            else min(binom.cdf(sum(lost), len(lost), allowed), hoeffding(risk, len(lost), allowed))
        )
        p_values.append((dial, p))
        if p > 1 - confidence:
            break
        safe.append(dial)
    return safe, p_values


@pytest.mark.parametrize("with_labels", [True, False])
def test_a_guarantee_is_the_cheapest_dial_before_the_first_failure(with_labels: bool, varied: Any) -> None:
    model = fresh(varied)
    labels = REVIEWS.labels if with_labels else None
    goal = MaxLoss(points=15, confidence=0.8) if with_labels else Agreement(agreement=0.85, confidence=0.8)
    data = REVIEWS if with_labels else dataclasses.replace(REVIEWS, labels=None)
    point = calibrate(model, data, goal, seed=3)
    safe, p_values = by_hand(model, REVIEWS, 0.15, 0.8, labels)
    assert 1 < len(safe) < len(model.method.dial.sweep)
    assert point.dial in safe and point.cost < 1
    assert point.certificate is not None
    assert [dial for dial, _ in point.certificate.p_values] == [dial for dial, _ in p_values]
    assert [p for _, p in point.certificate.p_values] == pytest.approx([min(p, 1) for _, p in p_values], abs=1e-6)
    assert (point.certificate.risk, point.certificate.confidence, point.certificate.seed) == (
        pytest.approx(0.15), 0.8, 3,
    )  # fmt: skip
    assert {"stretto", "torch", "mapie"} <= set(point.certificate.versions)
    assert (point.n, point.data, point.dtype) == (120, dataset_digest(data), "float32")
    assert point.name == ("loss-15" if with_labels else "agreement-0.85")
    assert math.isnan(point.score) != with_labels
    assert model.operating_points == [point]


def test_a_cost_needs_no_labels(varied: Any) -> None:
    model = fresh(varied)
    texts = dataclasses.replace(REVIEWS, labels=None)
    point = calibrate(model, texts, Spend(0.7), name="fast")
    mean = np.mean([answer.cost for answer in model.predict(REVIEWS.texts, point.dial)])
    assert point.cost <= 0.7
    assert point.certificate is None
    assert mean == pytest.approx(point.cost, abs=0.05)  # a mean of shares, and a share of sums
    cheaper = calibrate(model, texts, Spend(0.5), name="fast")
    assert cheaper.cost <= 0.5 < point.cost
    assert model.operating_points == [cheaper]  # of the same name: replaced
    with pytest.raises(
        StrettoError, match=r"a cost that a dial of deebert can reach, got 0\.01: the cheapest, 1, costs"
    ):
        calibrate(model, texts, Spend(0.01))


def test_a_latency_is_met_by_the_most_expensive_dial_that_does(varied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(varied)
    sweep = model.method.dial.sweep

    def measure(model: Any, groups: Any, dial: float, batch: int, percentile: float) -> Latency:
        assert {len(group) for group in groups} == {7}
        return Latency(50.0 - sweep.index(dial), batch, percentile, "some")

    monkeypatch.setattr("stretto.budget.latency.measure", measure)
    point = calibrate(model, REVIEWS, Wait(31, 7, 90))
    assert point.dial == sweep[19]
    assert point.latency == Latency(31.0, 7, 90, "some")
    assert point.name == "latency-31ms"
    with pytest.raises(StrettoError, match=r"can reach, got 9 ms: at the cheapest, 1, 95 % of the batches of 7 take"):
        calibrate(model, REVIEWS, Wait(9, 7))


def test_a_latency_is_measured_from_texts_to_answers(varied: Any) -> None:
    few = dataclasses.replace(REVIEWS, texts=REVIEWS.texts[:3], labels=None, where=REVIEWS.where[:3])
    point = calibrate(fresh(varied), few, Wait(60_000, 8))
    assert point.dial == 0.0 and point.latency is not None and 0 < point.latency.milliseconds < 60_000


def test_too_few_examples_change_nothing(varied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh(varied)
    with pytest.raises(StrettoError, match=r"at least 299 examples .* at most 1 % with 95 % confidence.*got 120"):
        calibrate(model, REVIEWS, MaxLoss(points=1))
    for sweep, points, advice in (((0.0, 0.34), 15, r"About \d+ examples"), ((0.0, 0.8), 15, "More would not help")):
        monkeypatch.setattr(model.method, "dial", dataclasses.replace(model.method.dial, sweep=sweep))
        with pytest.raises(StrettoError, match=rf"got 120 on which the first, {sweep[1]}, loses .* \(p = .*{advice}"):
            calibrate(model, REVIEWS, MaxLoss(points=points, confidence=0.999999))
    assert model.operating_points == []


def test_dials_that_pass_but_save_nothing(varied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no text leaves, exits are computed for nothing."""
    model, goal = fresh(varied), MaxLoss(points=15, confidence=0.999999)
    for sweep, message in (
        ((0.0, 1e-9), r"costs less than the full model, got only dials that guarantee .* but cost 1\.\d+ or more"),
        ((0.0, 1e-9, 0.34), r"got 120 on which 1 dial passed without saving anything and the next, 0\.34, loses"),
    ):
        monkeypatch.setattr(model.method, "dial", dataclasses.replace(model.method.dial, sweep=sweep))
        with pytest.raises(StrettoError, match=message):
            calibrate(model, REVIEWS, goal)


@pytest.mark.parametrize("method", ["alberta", "static_depth", "constant_ratio+static_depth"])
def test_no_loss_is_guaranteed_against_a_full_model_that_was_not_trained(method: str) -> None:
    with pytest.raises(StrettoError, match=r"a full model that was trained, .* got one of .* Calibrate to a cost"):
        calibrate(tiny_model(method), REVIEWS, Agreement(agreement=0.85, confidence=0.8))
    assert calibrate(tiny_model(method), REVIEWS, Spend(0.9)).cost <= 0.9


def test_int8_is_calibrated_as_int8_and_used_as_int8(varied: Any, tmp_path: Path) -> None:
    model = fresh(varied)
    calibrate(model, REVIEWS, Spend(0.6), name="fast")
    model.save_pretrained(tmp_path / "m")
    quick = AdaptiveModel.from_pretrained(tmp_path / "m", dtype="int8")
    with pytest.raises(StrettoError, match="a budget 'fast' for int8, got one for float32"):
        quick.predict("a good film", budget="fast")
    point = calibrate(quick, REVIEWS, Spend(0.7), name="fast")
    assert point.dtype == "int8"
    assert [(p.name, p.dtype) for p in quick.operating_points] == [("fast", "float32"), ("fast", "int8")]
    assert quick.predict("a good film", budget="fast").cost > 0


# ---- using budgets


def test_a_budget_per_text_in_one_batch_is_as_running_them_apart(varied: Any) -> None:
    model = fresh(varied)
    for cost, name in ((0.4, "fast"), (0.7, "middle"), (1.1, "full")):
        calibrate(model, REVIEWS, Spend(cost), name=name)
    names = [("fast", "middle", "full")[i % 3] for i in range(18)]
    texts = REVIEWS.texts[:18]
    together = model.predict(texts, budget=names, batch_size=5)
    assert len({answer.depth for answer in together}) > 1
    for i, (text, name) in enumerate(zip(texts, names, strict=True)):
        apart = model.predict(text, budget=name)
        assert (apart.label, apart.depth, apart.cost) == (together[i].label, together[i].depth, together[i].cost)
        assert apart.score == pytest.approx(together[i].score, abs=1e-5)
    with pytest.raises(StrettoError, match="one for each of 18 inputs, got 2"):
        model.predict(texts, budget=["fast", "full"])
    with pytest.raises(StrettoError, match=r"Expected a dial or a budget, got both"):
        model.predict(texts, 0.3, budget="fast")


def test_two_budgets_at_one_dial_promise_what_each_was_asked_for(varied: Any) -> None:
    model = fresh(varied)
    spent = calibrate(model, REVIEWS, Spend(0.7), name="fast")
    given = Certificate("right answers lost", 0.02, 0.95, 0.0, ((0.0, 0.01),), 1, {})
    model.operating_points.append(dataclasses.replace(spent, name="careful", certificate=given))
    assert model.promise(spent.dial).startswith("guaranteed")
    assert model.promise(spent.dial, "careful").startswith("guaranteed")
    assert model.promise(spent.dial, "fast") == f"estimate on {spent.n} examples, no guarantee"
    assert "dtype" not in spent.to_json() and model.operating_points[-1].to_json()["dtype"] == "float32"


def test_a_combination_has_budgets_like_any_other(tmp_path: Path) -> None:
    """One dial for two methods: the budget says which dials of theirs it stands for."""
    model = tiny_model("length_adaptive+deebert")
    with torch.no_grad():
        for parameter in model.method.parameters():
            parameter.normal_(std=0.4, generator=torch.Generator().manual_seed(8))
    for cost, name in ((0.4, "fast"), (0.8, "middle")):
        calibrate(model, dataclasses.replace(REVIEWS, labels=None), Spend(cost), name=name)
    model.save_pretrained(tmp_path / "m")
    loaded = AdaptiveModel.from_pretrained(tmp_path / "m")
    assert [p.to_json() for p in loaded.operating_points] == [p.to_json() for p in model.operating_points]
    fast, middle = loaded.operating_points
    assert fast.cost <= 0.4 < middle.cost <= 0.8 and len(fast.dials) == 2 and fast.dials != middle.dials
    names = ["fast", "middle", "middle", "fast"]
    together = loaded.predict(REVIEWS.texts[:4], budget=names)
    apart = [loaded.predict(text, budget=name) for text, name in zip(REVIEWS.texts[:4], names, strict=True)]
    assert [(a.label, a.depth, a.cost) for a in apart] == [(a.label, a.depth, a.cost) for a in together]


# ---- how answers of each task are judged


def test_quality_of_numbers_and_labels() -> None:
    numbers = [LabelPrediction(value) for value in (1.0, 3.0, 9.0)]
    assert Regression().quality(numbers, [1.0, 2.0, 1.0], 5) == [1.0, 0.8, 0.0]
    assert Regression().as_labels(numbers) == [1.0, 3.0, 9.0]
    with pytest.raises(StrettoError, match="--worst-error"):
        Regression().quality(numbers, [1.0, 2.0, 1.0])
    task = Classification(["bad", "good"])
    answers = [LabelPrediction(name) for name in ("good", "bad")]
    assert task.quality(answers, [1, 1]) == [1.0, 0.0]
    assert task.as_labels(answers) == [1, 0]


@pytest.mark.parametrize("method", ["length_adaptive", "full"])
def test_tasks_with_several_answers_agree_with_themselves(method: str) -> None:
    for task, data in (
        (Tokens(["O", "B-ask", "I-ask", "B-place"]), tiny_tagging(8)),
        (Tokens(["noun", "verb"]), tiny_tagging(8)),
        (Span(no_answer=True), tiny_questions(8, no_answer=True)),
    ):
        answers = tiny_model(method, task=task).predict(data.texts)
        assert task.quality(answers, task.as_labels(answers)) == [1.0] * 8


def test_f1_of_one_sentence() -> None:
    from stretto.tasks.metrics import sentence_accuracy, sentence_f1

    assert sentence_f1(["B-a", "I-a", "O", "B-b"], ["B-a", "I-a", "O", "O"]) == pytest.approx(2 / 3)
    assert sentence_f1(["B-a", "I-a"], ["B-a", "O"]) == 0
    assert sentence_f1(["O"], ["O"]) == 1
    assert sentence_accuracy(["x", "y"], ["x", "z"]) == 0.5
    assert sentence_accuracy([], []) == 1


def test_a_guarantee_for_tagging() -> None:
    """Losses between 0 and 1, of a method that drops tokens: each dial is run."""
    model, data = tiny_model("length_adaptive", task=Tokens(["O", "B-ask", "I-ask", "B-place"])), tiny_tagging(40)
    point = calibrate(model, data, Agreement(agreement=0.3, confidence=0.6))
    assert point.certificate is not None
    assert point.certificate.loss == "distance of each answer from the full model's"
    assert 0 < point.certificate.measured < 0.7


# ---- the command line


@pytest.fixture
def folder(varied: Any, tmp_path: Path) -> Path:
    fresh(varied).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    texts = [text for (text,) in REVIEWS.texts]
    labels = [["bad", "good"][label] for label in REVIEWS.labels]
    data = write(tmp_path / "d.jsonl", jsonl(*({"text": t, "label": y} for t, y in zip(texts, labels, strict=True))))
    weights = (folder / "model.safetensors").stat().st_mtime_ns
    result = run("calibrate", folder, data, "--max-loss", 15, "--confidence", 0.8, "--name", "safe", "--default")
    assert result.exit_code == 0, result.stderr
    assert "budget 'safe' (float32): entropy" in result.stdout
    assert "guaranteed with 80 % confidence: right answers lost at most 15 % (120 examples)" in result.stdout
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights
    loaded = AdaptiveModel.from_pretrained(folder)
    (point,) = loaded.operating_points
    assert loaded.dial == point.dial > 0
    card = (folder / "README.md").read_text()
    assert f"Default dial: {point.dial:g} (guaranteed with 80 % confidence" in card
    assert "| safe | float32 |" in card

    result = run("calibrate", folder, data, "--cost", 0.6, "--json", "--limit", 50)
    content = json.loads(result.stdout)
    assert content["budget"]["name"] == "cost-0.6" and content["budget"]["n"] == 50 and not content["default"]
    answers = [json.loads(line) for line in run("predict", folder, data, "--budget", "cost-0.6").stdout.splitlines()]
    expected = AdaptiveModel.from_pretrained(folder).predict(texts, budget="cost-0.6")
    assert [(a["label"], a["depth"]) for a in answers] == [(a.label, a.depth) for a in expected]

    before = (folder / "stretto.json").read_text()
    for args, message in (
        (["--max-loss", 1], "at least 299 examples"),
        ([], "Expected one of --cost, --latency-ms, --max-loss, --agreement, got none"),
        (["--cost", 0.5, "--agreement", 0.9], "got --cost and --agreement"),
        (["--cost", 0.5, "--confidence", 0.9], "Expected --confidence together with --max-loss or --agreement"),
        (["--latency-ms", 0], "milliseconds above 0"),
        (["--max-loss", 0], "strictly between 0 and 1"),
        (["--agreement", 1], "strictly between 0 and 1"),
        (["--cost", 0.001], "Ask for more"),
    ):
        refused = run("calibrate", folder, data, *args)
        assert refused.exit_code == 1 and message in refused.stderr, (args, refused.stderr)
    assert (folder / "stretto.json").read_text() == before
    both = run("predict", folder, data, "--budget", "safe", "--dial", 0.3)
    assert both.exit_code == 1 and "Expected --dial or --budget, got both" in both.stderr
    unknown = run("predict", folder, data, "--budget", "slow")
    assert unknown.exit_code == 1 and "('safe', 'cost-0.6'), got 'slow'" in unknown.stderr


def test_what_others_save_meanwhile_is_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def locked_late(path: str) -> Any:
        other = AdaptiveModel.from_pretrained(folder)
        calibrate(other, REVIEWS, Spend(0.6), name="other")
        other.save_points(folder)
        with locked(path):
            yield

    monkeypatch.setattr("stretto.saving.place.locked", locked_late)
    data = write(tmp_path / "d.txt", "a good film\n")
    assert run("calibrate", folder, data, "--cost", 0.9, "--name", "own").exit_code == 0
    assert [point.name for point in AdaptiveModel.from_pretrained(folder).operating_points] == ["other", "own"]


def test_without_mapie(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.budget.risk.util.find_spec", lambda name: None)
    data = write(tmp_path / "d.txt", "a good film\n")
    refused = run("calibrate", folder, data, "--agreement", 0.9)
    assert refused.exit_code == 1 and "pip install 'stretto[calibrate]'" in refused.stderr
