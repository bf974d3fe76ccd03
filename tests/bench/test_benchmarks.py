"""The benchmark scripts, end to end on a tiny encoder: rows, dials chosen on dev data, times, and going on."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from commands import run
from sources import write
from tiny import tiny_model, tiny_reviews

from stretto import AdaptiveModel, OperatingPoint

ROOT = Path(__file__).parents[2]
GAINS = {"flops_gain", "time_gain", "time_gain_vs_huggingface", "tracking"}


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts, writing their results to a folder of the test."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    found = {name: importlib.import_module(name) for name in ("experiment", "exits", "drops", "depths")}
    monkeypatch.setattr(found["experiment"], "RESULTS", tmp_path)
    return found


def written(path: Path, n: int, seed: int) -> None:
    data = tiny_reviews(n, seed)
    with gzip.open(path, "wt") as file:
        file.writelines(
            json.dumps({"text": text, "label": data.label_names[label]}) + "\n"
            for (text,), label in zip(data.texts, data.labels, strict=True)
        )


@pytest.fixture
def given(tmp_path: Path) -> tuple[Path, str]:
    """A folder of data and an encoder."""
    for split, n, seed in (("train", 60, 0), ("test", 24, 1)):
        written(tmp_path / f"made.{split}.jsonl.gz", n, seed)
    encoder = tmp_path / "tiny"
    model = tiny_model("full")
    model.encoder.base_model.save_pretrained(encoder)
    model.tokenizer.save_pretrained(encoder)
    return tmp_path, str(encoder)


def started(kind: Any, spec: Any, given: tuple[Path, str], name: str = "made") -> Any:
    data, encoder = given
    return kind(data, encoder, name, spec, data / "runs", 42)


def check_clock(rows: dict[str, Any], sizes: tuple[int, ...]) -> None:
    """Every chosen point has its times, and points with one dial have the same."""
    clock = rows["clock"]
    assert clock["threads"] == torch.get_num_threads()
    for key, points in clock["methods"].items():
        if key == "full":
            continue
        by_dial: dict[float, Any] = {}
        for loss, times in points.items():
            assert set(times) == {*map(str, sizes), "stream"}
            largest = str(max(sizes))
            for size, gains in times.items():
                assert set(gains) == (GAINS | {"tracking_of_products"} if size == largest else GAINS)
            assert by_dial.setdefault(rows[key]["chosen"][loss]["dial"], times) == times


def test_drops_from_training_to_times(scripts: dict[str, ModuleType], given: tuple[Path, str]) -> None:
    drops = scripts["drops"]
    settings = {"drop_epochs": 1, "random_models": 1}
    spec = drops.DropSet(
        "made.train", None, "made.test", 1, searched_on=6, generations=1, timed=6, rounds=1,
        rows={"length_adaptive": settings, "constant_ratio-random": {**settings, "select": "random"}},
    )  # fmt: skip
    first = started(drops.Drops, spec, given)
    assert len(first.train) + len(first.dev) == 60
    first.run([])
    rows = json.loads(first.json.read_text())
    assert set(rows) == {"full", "about", "search", "length_adaptive", "constant_ratio-random"}
    for key in spec.rows:
        dev = {point["dial"]: point for point in rows[key]["dev"]}
        for loss, point in rows[key]["chosen"].items():
            if point is not None:
                assert point in rows[key]["test"]
                assert point["cost"] < 1
                assert 100 * dev[point["dial"]]["score"] >= 100 * rows["full"]["dev"]["score"] - float(loss)
    assert rows["length_adaptive"]["chosen"]["2"] is not None
    assert len(rows["search"]["area"]) == 2  # the start, one generation

    first.clock()
    check_clock(json.loads(first.json.read_text()), first.batch_sizes)


def test_a_second_start_trains_nothing_again(
    scripts: dict[str, ModuleType], given: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    depths, experiment = scripts["depths"], scripts["experiment"]
    few = {"depth_epochs": 1}
    spec = depths.CurveSet(
        "made.train", None, "made.test", 1, rows={"depth_mi": few, "full-2": {}, "depth_mi-2": few},
        dials={"depth_mi": (0.0, 1.0)}, timed=4, rounds=1,
    )  # fmt: skip
    started(depths.Depths, spec, given).run(["depth_mi"])  # the first two layers are fine-tuned for it, but no row yet
    rows = json.loads(started(depths.Depths, spec, given).json.read_text())
    assert set(rows) == {"full", "about", "depth_mi", "depth_mi-2"}
    assert set(rows["depth_mi"]["reported"]) == {"1"}

    monkeypatch.setattr(experiment, "train", lambda *_, **__: pytest.fail("was trained already"))
    again = started(depths.Depths, spec, given)
    again.run([])
    assert {key: again.rows[key] for key in rows if key != "about"} == {k: v for k, v in rows.items() if k != "about"}
    assert "full-2" in again.rows
    again.clock()
    assert set(again.rows["clock"]["methods"]) == {"full", "depth_mi"}  # other encoders are not compared
    assert set(again.rows["clock"]["methods"]["depth_mi"]) >= {"dial 1"}
    other_seed = depths.Depths(*given, "made", spec, given[0] / "runs", 43)
    assert set(other_seed.spec.rows) == {"depth_mi"}  # the first layers alone are measured once


def test_a_dial_that_a_set_is_not_measured_at_is_not_reported(
    scripts: dict[str, ModuleType], given: tuple[Path, str]
) -> None:
    depths = scripts["depths"]
    spec = depths.CurveSet(
        "made.train", None, "made.test", 1, rows={"depth_mi": {"depth_epochs": 1}}, dials={"depth_mi": (0.0, 0.5)}
    )
    found = started(depths.Depths, spec, given)
    found.run([])
    assert found.rows["depth_mi"]["reported"] == {}
    results, point = importlib.import_module("depth_results"), {"score": 0.5, "cost": 0.5, "token_depth": 2.0}
    clock = {size: {"time_gain": 2.0, "tracking": 1.0, "time_gain_vs_huggingface": 3.0} for size in results.SIZES[:3]}
    runs = [
        found.rows,
        {"clock": {"methods": {"full": {}}}},  # the last one timed counts
        {"depth_mi": {"reported": {"1": point}}},  # not timed
        {"depth_mi": {"reported": {"1": point}}, "clock": {"methods": {"depth_mi": {"dial 1": clock}}}},
    ]
    row = results.reported_row(runs, "depth_mi", "1")
    assert row["score"] == "50.00 ± 0.00" and row["tracking 1 / 8 / 15 / 32 / stream"] == "1.00 / 1.00 / 1.00 / – / –"


def test_a_loss_is_counted_from_the_better_of_full_model_and_dial_off(scripts: dict[str, ModuleType]) -> None:
    curves = importlib.import_module("curves")
    found = object.__new__(curves.Curves)
    found.rows = {"full": {"dev": {"score": 0.80}}}

    def points(*pairs: tuple[float, float]) -> list[OperatingPoint]:
        return [OperatingPoint(cost, score, cost, 4.0, {}) for score, cost in pairs]

    dev, test = points((0.90, 1.0), (0.89, 0.6), (0.80, 0.3)), points((0.91, 1.0), (0.88, 0.6), (0.79, 0.3))
    chosen = {loss: point and point["cost"] for loss, point in found.chosen(dev, test).items()}
    assert chosen == {
        "0": None,
        "0.5": None,
        "1": 0.6,
        "2": 0.6,
    }  # 0.3 is as good as full, but 10 below off
    found.rows["full"]["dev"]["score"] = 0.905
    assert found.chosen(dev, test)["1"] is None


def test_a_pretrained_encoder_is_fine_tuned_with_its_gates(
    scripts: dict[str, ModuleType], given: tuple[Path, str]
) -> None:
    data, _ = given
    flags = ["--hidden-size", 32, "--embedding-size", 16, "--num-hidden-layers", 3, "--num-hidden-groups", 3]
    texts = write(data / "corpus.txt", "\n".join(text for (text,) in tiny_reviews(60).texts))
    encoder = data / "alberta"
    pretrained = run("pretrain", texts, encoder, "--vocab-size", 60, *flags, "--max-length", 32, "--max-steps", 2)
    assert pretrained.exit_code == 0, pretrained.stderr
    script = importlib.import_module("pretraining")
    spec = script.CurveSet("made.train", None, "made.test", 1, rows={"alberta": {"gate_epochs": 1}}, timed=4, rounds=1)
    found = started(script.Pretrained, spec, (data, str(encoder)), "sst2")
    found.run([])
    assert found.rows["pretraining"]["steps"] == 2
    assert found.whole().dial == 0  # without early exit, but gated
    ignored, gated = (OperatingPoint(dial, score, 1.0, 3.0, {}) for dial, score in ((-1.0, 0.9), (0.0, 0.8)))
    assert found.score_of_all_layers([ignored, gated]) == 0.8
    found.clock()
    assert found.rows["clock"]["methods"]["full"]["1"]["time_gain_vs_huggingface"] > 0
    assert AdaptiveModel.from_pretrained(found.runs / "alberta").method.config.exit_share == 0  # as published

    results = importlib.import_module("depth_results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "RESULTS", data)
        by_dial = {point["dial"]: point for point in found.rows["alberta"]["test"]}
        shown = f"| {100 * by_dial[0]['score']:.2f} | {100 * by_dial[0.5]['score']:.2f} @ {by_dial[0.5]['cost']:.2f} |"
        assert shown in results.pretraining_tables()


def test_exits_choose_dials_by_cost(scripts: dict[str, ModuleType], given: tuple[Path, str]) -> None:
    exits, experiment = scripts["exits"], scripts["experiment"]
    found = started(exits.Exits, experiment.Set("made.train", None, "made.test", 1), given)
    found.run(["deebert"])
    rows = json.loads(found.json.read_text())
    assert rows["deebert"]["budgets"]
    for budget, point in rows["deebert"]["budgets"].items():
        assert point["cost"] <= float(budget)
        assert point["cost"] == max(p["cost"] for p in rows["deebert"]["sweep"] if p["cost"] <= float(budget))
