"""The committed results: one format, made by the committed suites; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.bench.results import Clock, Results, Row, compact, load_all
from stretto.bench.suite import BASELINES, Suite
from stretto.errors import StrettoError
from stretto.methods import METHODS
from stretto.tasks import TASKS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = load_all(BENCHMARKS / "results")
#: Rows that say nothing of training.
RANDOM_WEIGHTS = ("engine", "decoder", "server")
#: Rows of models that no suite has trained.
WITHOUT_SUITE = (*RANDOM_WEIGHTS, "guarantee")
SUITES = {path.stem: Suite.load(path) for path in sorted((BENCHMARKS / "suites").glob("*.yaml"))}
ABOUT = {"set": "s", "model": "m", "name": "full", "method": "full", "seed": 1, "command": "c", "versions": {}}


@pytest.mark.parametrize("name", RESULTS)
def test_committed_results_follow_the_format(name: str) -> None:
    results = RESULTS[name]
    assert results.path is not None and results.path.stem == name
    assert compact(results.to_json()) + "\n" == results.path.read_text(encoding="utf-8")
    for row in results.rows:
        assert row.points or row.clock or row.load or row.guarantee, row.key
        assert {point.split for point in row.points} <= {"dev", "test"}
        for point in row.points:
            assert -1 <= point.score <= 1 and 0 < point.cost < 5 and point.depth > 0, row.key
        for clock in row.clock:
            assert clock.batch >= 1 and clock.rounds >= 1 and clock.threads >= 1 and clock.sequences >= 1
            assert clock.flops_ratio > 0 and min(clock.ratios.values()) > 0
        if name not in RANDOM_WEIGHTS:
            assert row.task in TASKS and (row.method in METHODS or row.method in BASELINES)
            assert row.metric and row.n_train and row.n_test
            assert all(row.at(clock.dial) is not None for clock in row.clock), row.key


@pytest.mark.parametrize("name", [name for name in RESULTS if name not in WITHOUT_SUITE])
def test_suites_describe_what_was_run(name: str) -> None:
    suite = SUITES[name]
    for row in RESULTS[name].rows:
        if row.name in suite.baselines:
            continue
        recipe = suite.recipe(row.name, suite.sets[row.set])
        made_with = {key: value for key, value in recipe.settings.items() if key != "num_train_epochs"}
        given = {key: value for key, value in row.settings.items() if key != "num_train_epochs"}
        assert (recipe.method, made_with) == (row.method, given), row.key
        assert row.seed in suite.seeds and recipe.layers == row.layers


def written(path: Path, *rows: dict[str, Any], **more: Any) -> Path:
    path.write_text(json.dumps({"format": 1, "suite": "s", "rows": list(rows), **more}))
    return path


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    path, row = tmp_path / "s.json", {**ABOUT}
    clock = {"batch": 1, "flops_ratio": 1.0, "ratios": {"full": 1.0}, "sequences": 1, "rounds": 1, "threads": 1}
    assert Results.load(written(path, {**row, "clock": [clock]})).rows == [Row(**ABOUT, clock=[Clock(**clock)])]
    for wrong, message in (
        ({**row, "scores": 1}, "got scores"),
        ({key: value for key, value in row.items() if key != "set"}, "expected set, got none"),
        ({**row, "seed": True}, "seed: expected a value of type int"),
        ({**row, "points": [{"dial": 0.0}]}, "points 0: expected cost, depth, score"),
        ({**row, "clock": [{**clock, "ratios": {"full": "fast"}}]}, "ratios, full"),
    ):
        with pytest.raises(StrettoError, match=message):
            Results.load(written(path, wrong))
    with pytest.raises(StrettoError, match="got one twice"):
        Results.load(written(path, row, row))
    with pytest.raises(StrettoError, match="of format 1"):
        Results.load(written(path, row, format=0))
    with pytest.raises(StrettoError, match="got those of 's'"):
        Results.start("other", written(path, row))


def test_rows_are_replaced_and_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "s.json"
    results = Results.start("s", path)
    results.put(Row(**ABOUT))
    results.put(Row(**{**ABOUT, "seed": 2}))
    results.put(Row(**ABOUT, hours=1.0))
    assert [(row.seed, row.hours) for row in Results.load(path).rows] == [(1, 1.0), (2, None)]
    assert [file.name for file in path.parent.iterdir()] == ["s.json"]
