"""The search: better than its start, the same after a kill, refused where it cannot be."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run, write_reviews
from tiny import tiny_model, tiny_reviews

import stretto.budget.search
from stretto import AdaptiveModel, StrettoError, sweep
from stretto.budget.choose import within_loss
from stretto.budget.evolution import Lengths, start_population
from stretto.budget.search import Candidate, Prepared, SearchSettings, evolve, measure_lengths, search
from stretto.budget.teacher import sought
from stretto.data import by_length, sample
from stretto.saving.points import OperatingPoint

SMALL = SearchSettings(iterations=3, mutations=4, crossovers=2, population=4)


def wish(lengths: Lengths) -> Candidate:
    """A made-up world: the first layers' lengths cost, the last one's score."""
    cost, score = sum(lengths) / len(lengths), lengths[-1] ** 0.5
    return Candidate(lengths, OperatingPoint(cost, score, cost, 4.0, {}), score)


def undecided(**settings: Any) -> Any:
    """A random model that calls half of the texts good, so that lengths matter for its score."""
    model = tiny_model("length_adaptive", **settings)
    sure = [
        answer.probabilities["good"] for answer in model.predict([t for (t,) in tiny_reviews(40, seed=1).texts], 1.0)
    ]
    with torch.no_grad():
        model.encoder.classifier.bias[1] -= torch.tensor(sure).logit().median()
    return model


def measured_again(model: Any, data: Any) -> list[OperatingPoint]:
    ready = Prepared.of(model, data, 32)
    return sweep(model, ready.data, progress=False, encoded=ready.encoded, teacher=ready.teacher)


@pytest.fixture
def reviews() -> Any:
    return tiny_reviews(40, seed=1)


# ---- the loop ----------------------------------------------------------------------------------------------


def test_the_area_grows_and_the_frontier_dominates_the_start() -> None:
    settings = SearchSettings(iterations=15, mutations=10, crossovers=10)
    first, *_, last = evolve(wish, start_population(10, 0.8, 4), 0.41, settings)
    areas = [iteration.area for iteration in evolve(wish, start_population(10, 0.8, 4), 0.41, settings)]
    assert all(before <= after for before, after in itertools.pairwise(areas))
    assert last.area > first.area
    for old in first.frontier:
        assert any(new.cost <= old.cost and new.score >= old.score for new in last.frontier)


def test_the_search_stops_when_nothing_grows_or_nothing_is_new() -> None:
    def flat(lengths: Lengths) -> Candidate:
        return Candidate(lengths, OperatingPoint(0, 0.5, 0.5, 4.0, {}), 0.5)

    settings = SearchSettings(iterations=30, patience=3)
    assert [it.number for it in evolve(flat, start_population(5, 0.8, 4), 0.4, settings)] == [0, 1, 2, 3]
    single = SearchSettings(mutations=0, crossovers=0)
    assert len(list(evolve(flat, start_population(5, 0.8, 4), 0.4, single))) == 1


def test_seeds_differ_and_repeat() -> None:
    def frontier(seed: int) -> list[Candidate]:
        *_, last = evolve(wish, start_population(5, 0.8, 4), 0.4, dataclasses.replace(SMALL, seed=seed))
        return last.frontier

    assert frontier(1) == frontier(1) != frontier(2)


def test_settings_are_checked() -> None:
    with pytest.raises(StrettoError, match="at least 1 iteration"):
        SearchSettings(iterations=0)


# ---- on a model --------------------------------------------------------------------------------------------


def test_a_candidate_is_measured_as_the_model_would_run_it(reviews: Any) -> None:
    lengths = (0.9, 0.7, 0.7, 0.4)
    model = undecided()
    ready = Prepared.of(model, reviews, 32)
    point = measure_lengths(model, ready, lengths)
    assert 0.4 < point.cost == point.dial < 1
    fixed = undecided(costs=(point.cost,), frontier=(lengths,))
    assert model.method.monotone and not fixed.method.monotone  # found for the mean of texts, not for each
    assert sweep(fixed, by_length(reviews), [point.cost], progress=False, teacher=ready.teacher) == [point]
    (full,) = sweep(model, reviews, [1.0], progress=False)
    assert (full.cost, full.depth) == (1.0, 4.0)  # outside, the dial counts again
    assert sweep(model, reviews, [0.8], progress=False)[0].cost < 1


def test_what_is_found_is_stored_and_loads(reviews: Any, tmp_path: Path) -> None:
    model = undecided()
    result = search(model, reviews, tmp_path / "out", SMALL, progress=False)
    assert result.finished
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing is left of the work
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    assert loaded.method.config == model.method.config
    assert len(loaded.method.scores.table) == len(model.method.scores.table) > 0  # what tokens are ranked by
    assert loaded.method.dial.sweep == tuple(point.dial for point in result.points)
    assert measured_again(loaded, reviews) == result.points
    assert [point.dial for point in loaded.operating_points] == list(loaded.method.dial.sweep)
    assert loaded.dial in loaded.method.dial.sweep
    assert loaded.provenance["search"].startswith(f"{result.iterations[-1].number} iterations, ")
    assert "search" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_sample_is_searched_and_everything_measured(reviews: Any, tmp_path: Path) -> None:
    model = undecided()
    result = search(model, reviews, tmp_path / "out", dataclasses.replace(SMALL, limit=10), progress=False)
    assert result.examples == 10
    assert measured_again(model, reviews) == result.points
    few = sample(reviews, 10, seed=42)
    assert len(few) == 10 and set(few.where) < set(reviews.where)
    assert sample(reviews, 10, seed=42).where == few.where != sample(reviews, 10, seed=1).where
    assert sample(reviews, 100, seed=1) is reviews


# ---- what is best at a cost -----------------------------------------------------------------------------------


def without_labels(data: Any) -> Any:
    return dataclasses.replace(data, labels=None, label_names=None)


def test_the_divergence_by_hand(reviews: Any) -> None:
    """The mean over texts of Σ p log (p / q), p the full model's probabilities; and how many answers are the same."""
    model, lengths = undecided(), (0.6, 0.5, 0.5, 0.3)
    ready = Prepared.of(model, reviews, 32)
    point = measure_lengths(model, ready, lengths)
    fixed = undecided(costs=(point.cost,), frontier=(lengths,))
    texts = [text for (text,) in ready.data.texts]
    full, other = (fixed.predict(texts, dial) for dial in (1.0, point.cost))
    each = [
        sum(p * math.log(p / b.probabilities[label]) for label, p in a.probabilities.items())
        for a, b in zip(full, other, strict=True)
    ]
    assert point.metrics["divergence"] == pytest.approx(sum(each) / len(each), rel=1e-3) and sum(each) > 0
    same = [a.label == b.label for a, b in zip(full, other, strict=True)]
    assert point.metrics["agreement"] == pytest.approx(sum(same) / len(same))


def test_a_search_by_divergence_needs_no_labels(reviews: Any, tmp_path: Path) -> None:
    """With and without labels the same configurations are found; a search by score refuses texts alone."""
    labelled = search(undecided(), reviews, tmp_path / "labelled", SMALL, progress=False)
    model = undecided()
    alone = search(model, without_labels(reviews), tmp_path / "alone", SMALL, progress=False)
    assert [each.lengths for each in alone.iterations[-1].frontier] == [
        each.lengths for each in labelled.iterations[-1].frontier
    ]
    assert all(math.isnan(point.score) for point in alone.points)
    assert all(point.metrics.keys() == {"divergence", "agreement"} for point in alone.points)
    assert alone.points[0].metrics["divergence"] == pytest.approx(0, abs=1e-6)
    assert alone.points[0].metrics["agreement"] == 1
    loaded = AdaptiveModel.from_pretrained(tmp_path / "alone")
    assert loaded.dial == model.dial in loaded.method.dial.sweep
    assert math.isnan(loaded.operating_points[0].score)
    by_score = dataclasses.replace(SMALL, objective="score")
    with pytest.raises(StrettoError, match="Expected labelled data for the objective 'score'"):
        search(undecided(), without_labels(reviews), tmp_path / "score", by_score, progress=False)
    assert not (tmp_path / "score.search").exists()


def test_the_two_objectives_choose_differently() -> None:
    """Two configurations of the same cost: one is closer to the full model, the other is right more often, by luck."""
    points = {
        (1.0, 1.0): (1.0, 0.80, 0.0),
        (0.8, 0.5): (0.6, 0.79, 0.1),  # close to the full model
        (0.7, 0.6): (0.6, 0.82, 0.9),  # right more often on these few texts
    }

    def best(objective: Any) -> Lengths:
        def measured(lengths: Lengths) -> Candidate:
            cost, score, divergence = points[lengths]
            point = OperatingPoint(cost, score, cost, 2.0, {"divergence": divergence})
            return Candidate(lengths, point, sought(point, objective))

        nothing_new = SearchSettings(mutations=0, crossovers=0, objective=objective)
        (only,) = evolve(measured, list(points), 0.1, nothing_new)
        return only.frontier[-1].lengths

    assert best("divergence") == (0.8, 0.5)
    assert best("score") == (0.7, 0.6)


def test_the_default_without_labels_is_what_agrees() -> None:
    def point(dial: float, **metrics: float) -> OperatingPoint:
        return OperatingPoint(dial, math.nan, dial, 4.0, metrics, n=400)

    points = [point(1.0, agreement=1.0), point(0.7, agreement=0.996), point(0.5, agreement=0.9)]
    assert within_loss(points).dial == 0.7
    assert within_loss([point(1.0), point(0.5)]).dial == 1.0  # nothing is known of it


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [1, 7, 13])
def test_a_killed_search_ends_as_if_it_had_not_been(
    after: int, reviews: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = search(undecided(), reviews, tmp_path / "whole", SMALL, progress=False)
    measured: list[Lengths] = []

    def dying(model: Any, data: Any, lengths: Lengths) -> OperatingPoint:
        if len(measured) == after:
            raise Killed
        measured.append(lengths)
        return measure_lengths(model, data, lengths)

    monkeypatch.setattr(stretto.budget.search, "measure_lengths", dying)
    with pytest.raises(Killed):
        search(undecided(), reviews, tmp_path / "out", SMALL, progress=False)
    assert not (tmp_path / "out").exists()
    state = tmp_path / "out.search" / "state.jsonl"
    with state.open("a") as file:
        file.write('{"key": [0.5, 0.')  # it died while it wrote

    def counting(model: Any, data: Any, lengths: Lengths) -> OperatingPoint:
        measured.append(lengths)
        return measure_lengths(model, data, lengths)

    monkeypatch.setattr(stretto.budget.search, "measure_lengths", counting)
    resumed = search(undecided(), reviews, tmp_path / "out", SMALL, progress=False)
    assert resumed == whole
    assert len(measured) == len(set(measured)) == whole.iterations[-1].tried  # none was measured twice


def test_time_may_be_up_and_the_search_goes_on(reviews: Any, tmp_path: Path) -> None:
    whole = search(undecided(), reviews, tmp_path / "whole", SMALL, progress=False)
    model = undecided()
    model.save_pretrained(tmp_path / "out")
    first = search(model, reviews, tmp_path / "out", SMALL, max_seconds=0, progress=False)
    assert not first.finished
    assert len(first.iterations) == 1
    again = AdaptiveModel.from_pretrained(tmp_path / "out")
    assert len(again.method.dial.sweep) == len(first.points)  # what was found is there already
    assert search(again, reviews, tmp_path / "out", SMALL, progress=False) == whole
    assert not (tmp_path / "out.search").exists()


def test_another_search_is_not_gone_on_with(reviews: Any, tmp_path: Path) -> None:
    def go(model: Any = None, data: Any = reviews, **settings: Any) -> Any:
        chosen = dataclasses.replace(SMALL, **settings)
        return search(model or undecided(), data, tmp_path / "out", chosen, max_seconds=0)

    go()
    with pytest.raises(StrettoError, match="got another settings"):
        go(seed=1)
    with pytest.raises(StrettoError, match="got another data"):
        go(data=tiny_reviews(40, seed=2))
    other = undecided()
    with torch.no_grad():
        next(other.encoder.parameters()).add_(1)
    with pytest.raises(StrettoError, match=r"got another model: .* add --restart .*delete '.*out\.search'\)"):
        go(other)
    go(iterations=4)  # when to stop may change
    (tmp_path / "out.search" / "state.jsonl").write_text("gibberish\n")
    with pytest.raises(StrettoError, match="to be readable"):
        go()


def test_other_methods_and_short_texts_are_refused(reviews: Any, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="method length_adaptive, got one of deebert"):
        search(tiny_model("deebert"), reviews, tmp_path / "out", SMALL)
    empty = dataclasses.replace(reviews, texts=[("",)] * len(reviews))
    with pytest.raises(StrettoError, match="Search on longer texts"):
        search(undecided(), empty, tmp_path / "out", SMALL, progress=False)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StrettoError, match="Expected a folder to save to, got the file"):
        search(undecided(), reviews, tmp_path / "file", SMALL, progress=False)
    assert not (tmp_path / "file.search").exists()  # nothing was begun


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adaptive") / "model"
    undecided().save_pretrained(folder)
    return folder


FLAGS = ["--iterations", "2", "--mutations", "3", "--crossovers", "2", "--population", "3"]


def test_search_command(adaptive: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(adaptive, tmp_path / "model")
    data = write_reviews(tmp_path / "dev.jsonl", 24)
    files = [tmp_path / "search.json", tmp_path / "frontier.png"]
    result = run("search", folder, data, *FLAGS, "--json", files[0], "--plot", files[1])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split() == ["iteration", "tried", "frontier", "area"]
    assert "The frontier on 24 examples; the dial is budget" in result.stdout
    assert f"saved {folder}" in result.stderr
    content = json.loads(files[0].read_text())
    assert content["finished"]
    assert [iteration["iteration"] for iteration in content["iterations"]] == [0, 1, 2]
    assert len(content["iterations"][0]["frontier"][0]["lengths"]) == 4
    assert files[1].read_bytes().startswith(b"\x89PNG")
    saved = AdaptiveModel.from_pretrained(folder)
    assert [point.dial for point in saved.operating_points] == [point["dial"] for point in content["points"]]
    assert run("evaluate", folder, data).exit_code == 0

    elsewhere = run("search", adaptive, data, *FLAGS, "--output", tmp_path / "other", "--json")
    assert json.loads(elsewhere.stdout)["points"] == content["points"]
    assert not AdaptiveModel.from_pretrained(adaptive).method.config.frontier
    again = ["search", adaptive, data, *FLAGS, "--output", tmp_path / "other"]
    assert "which holds a finished model" in run(*again).stderr
    assert run(*again, "--overwrite").exit_code == 0


def test_search_command_without_labels(adaptive: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for (text,) in tiny_reviews(24).texts))
    files = [tmp_path / "search.json", tmp_path / "frontier.png"]
    command = ["search", adaptive, data, *FLAGS, "--output", tmp_path / "out"]
    result = run(*command, "--json", files[0], "--plot", files[1], "--per-input")
    assert result.exit_code == 0, result.stderr
    assert "no labels are used, and no score is measured" in result.stderr
    content = json.loads(files[0].read_text())
    assert content["settings"]["objective"] == "divergence"
    assert all(point["score"] is None and point["metrics"]["divergence"] >= 0 for point in content["points"])
    assert files[1].read_bytes().startswith(b"\x89PNG")
    refused = run(*command, "--objective", "score", "--overwrite")
    assert refused.exit_code == 1 and "label" in refused.stderr
    named = run(*command, "--label", "stars", "--overwrite")
    assert named.exit_code == 1 and "stars" in named.stderr  # a column that was asked for must be there


def test_search_command_of_a_combination(tmp_path: Path) -> None:
    """Its pairs of dials, by either objective."""
    tiny_model("constant_ratio+deebert").save_pretrained(tmp_path / "both")
    data = write_reviews(tmp_path / "dev.jsonl", 24)
    frontiers = {}
    for objective in ("divergence", "score"):
        out = tmp_path / objective
        result = run("search", tmp_path / "both", data, "--objective", objective, "--output", out, "--json")
        assert result.exit_code == 0, result.stderr
        content = json.loads(result.stdout)
        assert content["objective"] == objective
        frontiers[objective] = AdaptiveModel.from_pretrained(out).method.config.frontier
        assert [list(pair) for pair in frontiers[objective]] == content["frontier"] != []
    assert frontiers["divergence"] != frontiers["score"]


def test_search_command_goes_on(adaptive: Path, tmp_path: Path) -> None:
    data = write_reviews(tmp_path / "dev.jsonl", 24)
    command = ["search", adaptive, data, *FLAGS, "--output", tmp_path / "out"]
    first = run(*command, "--max-seconds", 0)
    assert "time limit reached; saved" in first.stderr
    refused = run(*command, "--seed", 1)
    assert refused.exit_code == 1
    assert "got another settings" in refused.stderr
    second = run(*command)
    assert second.exit_code == 0, second.stderr
    assert "resuming the unfinished search" in second.stderr


def test_search_is_refused_before_it_begins(adaptive: Path, model: Path, data: Path) -> None:
    for args, answer in (
        ([model, data], "Expected a model of the method length_adaptive, got one of deebert"),
        ([adaptive, data, "--plot", "p.doc"], "ending in .png"),
        ([adaptive, data, "--label", "stars"], "expected a column 'stars'"),
    ):
        result = run("search", *args)
        assert (result.exit_code, result.stdout) == (1, "")
        assert answer in result.stderr
    assert run("search", adaptive, data, "--iterations", "0").exit_code == 2
