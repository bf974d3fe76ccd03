"""`stretto compare`, from a suite to the page, on a tiny encoder; a kill in the middle; the choice of rows."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from commands import run
from tiny import tiny_model, tiny_reviews

from stretto.bench import clock as bench_clock
from stretto.bench import rows as bench_rows
from stretto.bench.compare import Comparison, Only
from stretto.bench.results import FULL, HF, HF_SORTED, Point, Results, Row
from stretto.bench.rows import Places
from stretto.bench.suite import Suite
from stretto.bench.summary import hypervolume
from stretto.errors import StrettoError

SUITE = """
name: tiny
about: A tiny suite.
model: tiny
baselines: [huggingface, huggingface_sorted]
int8: true
batch_sizes: [2]
sets:
  made: {train: made.train, test: made.test, epochs: 1, timed: 4, rounds: 1}
recipes:
  full: {}
  deebert: {settings: {exit_epochs: 1}}
  length_adaptive:
    settings: &drop {drop_epochs: 1, random_models: 1}
    search: {limit: 6, iterations: 1, mutations: 1, crossovers: 1, population: 3}
  constant_ratio-saliency: {weights_of: length_adaptive, settings: {<<: *drop, select: saliency}, dials: [1, 0.5]}
  full-2: {start: null, layers: 2}
  depth_mi-2: {start: full-2, layers: 2, settings: {depth_epochs: 1}, dials: [0, 1], reported: [1, 0.5]}
"""
NAMES = ["full", HF, HF_SORTED, "deebert", "length_adaptive", "constant_ratio-saliency", "full-2", "depth_mi-2"]


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with data/, models/tiny and suite.yaml."""
    for split, n, seed in (("train", 60, 0), ("test", 24, 1)):
        data = tiny_reviews(n, seed)
        (tmp_path / "data").mkdir(exist_ok=True)
        with gzip.open(tmp_path / "data" / f"made.{split}.jsonl.gz", "wt") as file:
            file.writelines(
                json.dumps({"text": text, "label": data.label_names[label]}) + "\n"
                for (text,), label in zip(data.texts, data.labels, strict=True)
            )
    model = tiny_model("full")
    model.encoder.base_model.save_pretrained(tmp_path / "models" / "tiny")
    model.tokenizer.save_pretrained(tmp_path / "models" / "tiny")
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path


def comparison(world: Path, only: str | None = None) -> Comparison:
    places = Places(world / "data", world / "models", world / "work")
    return Comparison(
        Suite.load(world / "suite.yaml"), places, world / "work" / "results.json", Only.read(only), say=lambda _: None
    )


def test_from_a_suite_to_the_page(world: Path) -> None:
    flags = ["--data", world / "data", "--models", world / "models", "--output", world / "work"]
    planned = run("compare", world / "suite.yaml", *flags, "--plan")
    assert planned.exit_code == 0, planned.stderr
    assert ", ".join(NAMES) in planned.stdout and not (world / "work").exists()
    done = run("compare", world / "suite.yaml", *flags)
    assert done.exit_code == 0, done.stderr
    found = Results.load(world / "work" / "results.json")
    rows = {row.name: row for row in found.rows}
    assert list(rows) == NAMES

    full, exits = rows["full"], rows["deebert"]
    assert (full.n_train, full.n_dev, full.n_test) == (54, 6, 24)
    assert rows[HF].points[0].metrics == pytest.approx(full.on("test")[0].metrics, abs=1e-4)
    assert rows[HF].points[0].cost >= rows[HF_SORTED].points[0].cost > 1  # padding is paid for
    assert len(exits.on("test")) == len(exits.on("dev")) > 10
    assert {point.dtype for point in exits.points} == {"float32", "int8"}
    assert exits.answers is not None and sum(exits.answers["depth"]) == sum(exits.answers["left"]) == 24
    assert rows["length_adaptive"].search is not None and rows["length_adaptive"].search["examples"] == 6
    assert [point.layers_per_token is not None for point in rows["depth_mi-2"].on("test")] == [False, True]
    assert rows["full-2"].on("test")[0].depth == 2

    page = (world / "work" / "report.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    (part,) = (found.comparison or {})["sets"]
    assert set(part["hypervolume"]) == set(NAMES) - {"full", HF, HF_SORTED}
    assert part["agreement"]["rows"] == [name for name in NAMES if name not in (HF, HF_SORTED)]
    assert all(part["agreement"]["shares"][i][i] == 1 for i in range(6))
    assert part["hardest"][0]["wrong"] >= part["easiest"][0]["wrong"]
    assert "| deebert | " in (world / "work" / "report.md").read_text()

    timed = run("compare", world / "suite.yaml", *flags, "--clock")
    assert timed.exit_code == 0, timed.stderr
    rows = {row.name: row for row in Results.load(world / "work" / "results.json").rows}
    assert {name for name, row in rows.items() if row.clock} >= {"full", HF, HF_SORTED, "deebert", "length_adaptive"}
    assert not rows["depth_mi-2"].clock and not rows["constant_ratio-saliency"].clock
    times = rows["deebert"].times(rows["deebert"].clock[0].dial)
    assert set(times) == {"2", "stream"}
    assert set(times["2"].ratios) == {FULL, HF, HF_SORTED}
    assert times["2"].products_tracking is not None and times["stream"].products_tracking is None
    assert "Score over time" in (world / "work" / "report.html").read_text()
    assert "| deebert, int8 | " in (world / "work" / "report.md").read_text()
    planned = run("compare", world / "suite.yaml", *flags, "--clock", "--plan")
    assert planned.exit_code == 0 and " nothing " in planned.stdout


def test_a_killed_run_resumes(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    train = bench_rows.train

    def killed(model: Any, *rest: Any, **more: Any) -> Any:
        trained.append(model.method.name)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(model, *rest, **more)

    monkeypatch.setattr(bench_rows, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        comparison(world, "method=deebert").run()
    assert [row.name for row in Results.load(world / "work" / "results.json").rows] == ["full"]
    comparison(world, "method=deebert").run()
    assert trained == ["full", "deebert", "deebert"]  # the full model was there
    assert comparison(world, "method=deebert").plan()[0]["rows to do"] == 0

    suite = (world / "suite.yaml").read_text()
    (world / "suite.yaml").write_text(suite.replace("exit_epochs: 1", "exit_epochs: 2"))
    with pytest.raises(StrettoError, match="with the settings of"):
        comparison(world, "method=deebert").run()


def test_a_killed_clock_resumes(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed at one batch size stays; other threads are another clock."""
    suite = (world / "suite.yaml").read_text()
    (world / "suite.yaml").write_text(suite.replace("batch_sizes: [2]", "batch_sizes: [1, 2]"))
    comparison(world, "method=deebert").run()
    sizes: list[int] = []
    interleaved = bench_clock.interleaved

    def killed(contenders: Any, *rest: Any) -> Any:
        sizes.append(len(contenders[0].steps))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return interleaved(contenders, *rest)

    monkeypatch.setattr(bench_clock, "interleaved", killed)
    with pytest.raises(KeyboardInterrupt):
        comparison(world, "method=deebert").clock()
    rows = Results.load(world / "work" / "results.json").rows
    assert {clock.batch for row in rows for clock in row.clock} == {1}
    (line,) = comparison(world, "method=deebert").plan_clock()
    assert line["to time"] == "2, stream" and line["hours"] > 0
    comparison(world, "method=deebert").clock()
    assert sizes == [4, 2, 2, 12]  # 4 texts one by one; in twos, killed and once more; a stream of 24 in twos
    comparison(world, "method=deebert").clock()
    assert len(sizes) == 4
    comparison(world, "method=deebert").clock(retime=True)
    assert len(sizes) == 7
    full, exits = (row for row in Results.load(world / "work" / "results.json").rows if row.clock)
    assert [(clock.batch, clock.stream) for clock in full.clock if clock.dtype == "float32"] == [
        (1, False), (2, False), (2, True)
    ]  # fmt: skip
    assert {clock.dtype for clock in exits.clock} == {"float32", "int8"}


def test_a_model_that_was_trained_otherwise_is_refused(world: Path) -> None:
    """Killed between its training and its row, and the suite changed meanwhile."""
    made = comparison(world, "method=deebert")
    made.run()
    made.results.rows = [row for row in made.results.rows if row.name == "full"]
    made.results.write()
    suite = (world / "suite.yaml").read_text()
    (world / "suite.yaml").write_text(suite.replace("exit_epochs: 1", "exit_epochs: 2"))
    with pytest.raises(StrettoError, match=r"with the settings \{'exit_epochs': 2\} in"):
        comparison(world, "method=deebert").run()


@pytest.mark.parametrize(
    ("only", "message"),
    [("deebert", "parts such as"), ("set=other", "set among made"), ("method=x", "method among"), ("seed=1", "seed")],
)
def test_a_choice_of_nothing_is_refused(world: Path, only: str, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        comparison(world, only).check()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs: 1", "epoch: 1", "sets, made: expected epochs"),
        ("epochs: 1", "epochs: one", "made, epochs: expected a value of type float"),
        ("start: full-2", "start: nobody", "expected one of the recipes"),
        ("made.train", "other.train", None),
        ("  deebert:", "  debert:", "deebert"),
        ("int8: true", "choose: luck", "choose"),
        ("baselines: [huggingface,", "baselines: [me,", "baselines among"),
        ("name: tiny", "name: [", "Expected a suite"),
    ],
)
def test_a_suite_is_checked_before_anything_runs(world: Path, old: str, new: str, message: str | None) -> None:
    path = world / "suite.yaml"
    path.write_text(SUITE.replace(old, new))
    result = run("compare", path, "--data", world / "data", "--models", world / "models", "--output", world / "work")
    assert result.exit_code == 1 and (message or "Name the folder with --data") in result.stderr
    assert not (world / "work").exists()


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(dial, score, cost, 1.0) for dial, (cost, score) in enumerate(pairs)]


def test_hypervolume() -> None:
    assert hypervolume(points((1, 0.9)), 0.9) == 0
    assert hypervolume(points((0.25, 0.9)), 0.9) == pytest.approx(0.75)
    assert hypervolume(points((0.5, 0.9), (0.25, 0.85), (0.3, 0.2)), 0.9) == pytest.approx(0.25 * 0.5 + 0.5)
    assert hypervolume(points((0.1, 0.7)), 0.9) == 0


def test_a_loss_is_counted_from_the_better_of_full_model_and_dial_off() -> None:
    from stretto.bench.report.groups import Group

    about = {"set": "made", "model": "m", "seed": 1, "command": "", "versions": {}}

    def row(name: str, *pairs: tuple[float, float]) -> Row:
        found = points(*pairs)
        return Row(**about, name=name, method=name, points=[dataclasses.replace(p, split="dev") for p in found] + found)

    method = row("deebert", (1.0, 0.90), (0.6, 0.89), (0.3, 0.80))
    group = Group({"full": row("full", (1.0, 0.80)), "deebert": method})
    costs = [point and point.cost for point in (group.within_loss(method, loss) for loss in (0.5, 1.0, 2.0))]
    assert costs == [None, 0.6, 0.6]  # 0.3 is as good as full, but 10 points below off
    better = Group({"full": row("full", (1.0, 0.905)), "deebert": method})
    assert better.within_loss(method, 1.0) is None


TEXTS = """
name: texts
about: Models that start from nothing.
model: scratch:marian
sizes: {d_model: 16, ffn_dim: 16, encoder_layers: 1, decoder_layers: 2, attention_heads: 2, max_positions: 8}
sets:
  pairs: {train: pairs, dev: pairs, test: pairs, task: seq2seq, epochs: 1}
recipes:
  aligned: {method: depth_adaptive, start: null, settings: {mechanism: confidence, thresholds: [[0]]}}
  full: {}
  full-1: {start: null, sizes: {decoder_layers: 1}}
  aligned-confidence:
    method: depth_adaptive
    start: aligned
    settings: {mechanism: confidence, thresholds: []}
    search: {draws: 20, keep: 2}
"""


def test_models_that_start_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(TEXTS)
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"src": f"eins {n}", "tgt": f"one {n}"}) + "\n" for n in range(8))
    done = run("compare", tmp_path / "suite.yaml", "--data", tmp_path, "--output", tmp_path / "work")
    assert done.exit_code == 0, done.stderr
    rows = {row.name: row for row in Results.load(tmp_path / "work" / "results.json").rows}
    assert {name: [point.depth for point in row.on("test")] for name, row in rows.items()} | {
        "aligned-confidence": []
    } == {"aligned": [2.0, 1.0], "full": [2.0], "full-1": [1.0], "aligned-confidence": []}
    assert rows["full-1"].sizes["decoder_layers"] == 1 and rows["full"].metric == "bleu"
    searched = rows["aligned-confidence"]
    assert searched.search == {"examples": 8, "seed": 42, "draws": 20, "keep": 2}
    assert 2 <= len(searched.on("test")) <= 3  # off, and what was found
