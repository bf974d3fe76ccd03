"""Tables and plots from results that are only partly there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import run

from stretto.bench.report import depths, engine, exits, texts
from stretto.bench.report.groups import groups_of
from stretto.bench.report.pages import Pages
from stretto.bench.report.plots import digest, draw, drawn_digest, exit_panels
from stretto.bench.results import FULL, HF, Clock, Point, Results, Row


def row(name: str, points: list[Point], **more: Any) -> Row:
    about = {"set": "trec", "model": "gte-small", "task": "classification", "metric": "accuracy", "n_test": 9}
    return Row(
        **{**about, "seed": 42, "command": "stretto compare x.yaml", "versions": {"torch": "2"}, **more},
        name=name, method=name.partition("-")[0], points=points,
    )  # fmt: skip


def point(dial: float, score: float, cost: float) -> Point:
    return Point(dial, score, cost, 12 * cost)


def clock(batch: int, dial: float, **more: Any) -> Clock:
    return Clock(batch, 2.5, {FULL: 2.0, HF: 3.0}, 9, 5, 2, dial=dial, **more)


CURVE = [point(0, 0.91, 1.01), point(0.2, 0.905, 0.4), point(0.9, 0.6, 0.1)]
ROWS = [
    row("full", [point(0, 0.91, 1)]),
    row("deebert", CURVE, clock=[clock(1, 0.2), clock(32, 0.2)]),
    row("deebert-cls", CURVE[:1]),
    row("static_depth-3", [point(12, 0.5, 1), point(3, 0.7, 0.25)]),
    row("static_depth-6", [point(12, 0.5, 1), point(6, 0.8, 0.49)]),
    row("full", [point(0, 0.88, 1)], set="stsb", task="regression", metric="pearson"),
]


def test_exits(tmp_path: Path) -> None:
    groups = groups_of(ROWS)
    table = exits.summary_table(groups)
    assert "| deebert | 90.5 @ 0.40 |  |" in table  # not for regression
    assert "| static_depth | 80.0 @ 0.49 | – |" in table  # the deeper of two that fit; none yet
    assert "are 2.0–2.0 times as fast as the full model" in table
    assert "| deebert | 0.5 | 90.50 | 0.400 | 4.80 | 0.2 | 2.00 / – / 2.00 / – |" in exits.set_tables(groups)
    assert "| deebert (cls) | 91.00 @ 1.01 |" in exits.cheapest_table(groups)
    assert "batch 32: a median of 0.80 of the FLOPs gain became" in exits.tracking_note(groups)
    assert "(0.80–0.80; 2 rows)" in exits.tracking_note(groups)  # at two budgets
    assert "add 1.0 to 1.0 %" in exits.tracking_note(groups)
    assert exits.gains_table(groups) == exits.summary_table([]) == "Not measured yet."  # no stream
    panels = exit_panels(groups)
    draw(panels, tmp_path / "plot.png")
    assert drawn_digest(tmp_path / "plot.png") == digest(panels)
    assert drawn_digest(tmp_path / "none.png") is None


def test_depths_of_several_seeds() -> None:
    reported = Point(1.0, 0.5, 0.5, 6.0, layers_per_token=2.0)
    rows = []
    for seed, timed in ((42, ()), (43, (clock(1, 1.0), clock(8, 1.0))), (44, ())):
        full = row("full", [point(0, 0.9, 1)], seed=seed, clock=[clock(1, 0.0)] if timed else [])
        rows += [full, row("depth_mi", [point(0, 0.9, 1), reported], seed=seed, clock=list(timed))]
    (line,) = depths.reported_rows(groups_of(rows), "depth_mi")
    assert line["score"] == "50.00 ± 0.00"
    assert line["tracking 1 / 8 / 15 / 32 / stream"] == "0.80 / 0.80 / – / – / –"  # of the last seed timed


def test_engine() -> None:
    full = Clock(8, 1.0, {FULL: 1.0, HF: 1.5, "gemm": 0.5}, 9, 9, 2, cpu="some")
    rows = [Row("ag_news", "bert-base", "full", "full", 0, "c", {"torch": "2"}, clock=[full])]
    assert "| full model, float32: × Hugging Face padded |  | 1.50 |  |" in engine.summary_table(rows)
    assert "matrix products alone |  | 2.00 |  |" in engine.summary_table(rows)
    assert "| bert-base | ag_news | 8 | float32 | 1.50 |" in engine.cell_table(rows)
    assert engine.summary_table([]) == "Not measured yet."


def test_pages_are_checked_and_written(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "results.md"
    page.write_text("before\n<!-- cheapest:begin -->\nold\n<!-- cheapest:end -->\nafter\n")
    Results("exits", ROWS, tmp_path / "benchmarks" / "results" / "exits.json").write()
    assert run("bench", "report", tmp_path, "--check").exit_code == 1
    assert "old" in page.read_text()
    assert run("bench", "report", tmp_path).exit_code == 0
    assert "| deebert | 90.50 @ 0.40 |" in page.read_text() and page.read_text().endswith("after\n")
    assert (tmp_path / "docs" / "images" / "pareto.png").exists()
    assert run("bench", "report", tmp_path, "--check").exit_code == 0
    page.write_text("<!-- nothing:begin -->\n<!-- nothing:end -->")
    assert "got 'nothing'" in run("bench", "report", tmp_path).stderr
    with pytest.raises(Exception, match=r"Expected README.md or docs"):
        Pages(tmp_path / "benchmarks")


def test_translations() -> None:
    measured = Point(0.5, 0.3, 0.7, 2.5, {"bleu": 0.3, "chrf": 0.5, "average_exit": 2.25, "mflops_per_token": 1.5})
    more = {
        "set": "multi30k",
        "model": "scratch:marian",
        "metric": "bleu",
        "n_train": 100,
        "sizes": {"decoder_layers": 6},
    }
    trained = row("aligned", [measured], settings={"num_train_epochs": 2}, **more)
    assert "| aligned | 8 | 42 | 6 | 0.5 | 2.25 | 30.00 | 50.00 | 0.700 | 1.50 |" in texts.score_table([trained])
    assert "| full | – |" in texts.score_table([row("full", [measured], **more)])
    assert texts.score_table([]) == texts.speed_table([]) == "Not measured yet."
