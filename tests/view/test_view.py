"""Tables suit where they are printed; plots are files; reports hold everything."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from commands import Terminal

from stretto import OperatingPoint, StrettoError
from stretto.training.progress import log_line
from stretto.view.plots import pareto_plot
from stretto.view.report import Report
from stretto.view.tables import html_table, markdown_table, plain_table, show_table

ROWS = [
    {"name": "full", "accuracy": 0.9, "cost": 1.0, "note": None},
    {"name": "a|b <i> [red]x", "accuracy": 0.87654, "cost": 0.5, "note": "default"},
]
FORMATS = {"accuracy": ".3f"}


def points(*pairs: tuple[float, float]) -> list[OperatingPoint]:
    return [OperatingPoint(i / 10, score, cost, 3.0, {"accuracy": score}) for i, (cost, score) in enumerate(pairs)]


def test_plain_text_is_aligned() -> None:
    assert plain_table(ROWS, FORMATS).splitlines() == [
        "name            accuracy  cost  note",
        "full               0.900     1",
        "a|b <i> [red]x     0.877   0.5  default",
    ]
    assert plain_table([]) == "(none)"


def test_a_pipe_gets_plain_text_and_a_terminal_a_drawn_table() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    show_table(ROWS, FORMATS, title="Results", file=pipe)
    show_table(ROWS, FORMATS, title="Results", file=terminal)
    assert pipe.getvalue() == f"Results\n{plain_table(ROWS, FORMATS)}\n"
    assert "─" in terminal.getvalue()
    assert "a|b <i> [red]x" in terminal.getvalue()  # a label is not markup


def test_markdown_and_html_escape_what_they_must() -> None:
    assert markdown_table(ROWS, FORMATS).splitlines()[1:3] == ["| --- | ---: | ---: | --- |", "| full | 0.900 | 1 |  |"]
    assert "a\\|b" in markdown_table(ROWS)
    assert "a|b &lt;i&gt;" in html_table(ROWS)
    assert html_table(ROWS).count("<tr>") == 3


def test_plots_are_written(tmp_path: Path) -> None:
    curves = {"deebert": points((1.0, 0.9), (0.4, 0.8), (0.7, 0.9)), "pabee": points((1.0, 0.9), (0.5, 0.85))}
    full, default = curves["deebert"][:2]
    pareto_plot(curves, tmp_path / "a.png", full=full, default=default, metric="macro_f1", title="reviews")
    pareto_plot(curves, tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(StrettoError, match=r"\.png, \.svg, \.pdf, got"):
        pareto_plot(curves, tmp_path / "a.doc")


def test_full_model_and_default_dial_are_marked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the edge of the axes, where marks are clipped otherwise."""
    figures: list[Any] = []
    monkeypatch.setattr("stretto.view.plots.save", lambda figure, path: figures.append(figure))
    (full, default), name = points((1.0, 0.9), (0.4, 0.8)), "deebert"
    pareto_plot({name: [full, default]}, tmp_path / "a.png", full=full, default=default, standing="estimate")
    (axes,) = figures[0].axes
    marks = {line.get_label(): line for line in axes.get_lines()}
    star, ring = marks["full model"], marks["default dial (estimate)"]
    assert (star.get_marker(), ring.get_marker()) == ("*", "o")
    assert not star.get_clip_on() and not ring.get_clip_on()
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (0.4, 0.8)
    pareto_plot({name: [full]}, tmp_path / "a.png")
    assert [line.get_label() for line in figures[1].axes[0].get_lines()] == [name]


def test_a_report_is_one_page_with_everything(tmp_path: Path) -> None:
    plot = tmp_path / "p.png"
    plot.write_bytes(b"\x89PNG")
    tables = {"": (ROWS, FORMATS), "Answers": ([{"text": "<b>"}], {})}
    report = Report("The title", "The lead & more.", tables, plot, "The notes.", ["stretto methods"])
    for text in ("The title", "The notes.", "Answers", "stretto methods"):
        assert text in report.markdown()
        assert text in report.html()
    assert "![the plot](p.png)" in report.markdown()
    assert "data:image/png;base64,iVBORw==" in report.html()
    assert "&lt;b&gt;" in report.html()
    assert "The lead &amp; more." in report.html()


def test_log_lines_say_what_matters() -> None:
    assert log_line({"loss": 0.5, "learning_rate": 1e-5, "epoch": 1.0}) == "  epoch 1: loss 0.5000"
    assert (
        log_line({"eval_loss": 0.4, "eval_score": "0.9", "epoch": 2.5})
        == "  epoch 2.5: dev loss 0.4000, dev score 0.9000"
    )
    assert log_line({"train_runtime": 3.0, "epoch": 2}) == ""
