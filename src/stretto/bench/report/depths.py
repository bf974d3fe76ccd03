"""Tables of the suites `depths` and `pretraining`: rows at the dials their papers report and at those chosen on dev."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.bench.report.exits import reproduce
from stretto.bench.report.groups import (
    NOT_MEASURED,
    SET_NAMES,
    STREAM,
    Group,
    by_set,
    clock_note,
    mean,
    short,
    time_columns,
)  # fmt: skip
from stretto.bench.results import Point, Row
from stretto.view.tables import markdown_table

METHODS = ("depth_mi", "depth_reconstruction", "token_halting", "alberta")
SIZES = ("1", "8", "15", "32", STREAM)  # 15 is the largest of the paper
#: Thresholds of ALBERTa's gates that the table of pretrained encoders shows.
SHOWN_GATES = (0.5, 0.9)


def last_timed(groups: Sequence[Group]) -> Group | None:
    """The last seed that was timed: times of several machines have no mean."""
    return next((group for group in reversed(groups) if group.full.clock), None)


def reported(row: Row | None) -> list[Point]:
    """The points at which the papers report are those that count layers per token."""
    return [] if row is None else [point for point in row.on("test") if point.layers_per_token is not None]


def reported_rows(groups: Sequence[Group], method: str) -> list[dict[str, Any]]:
    """A line per dial that any seed reports, from expensive to cheap."""
    found: dict[float, list[Point]] = {}
    for group in groups:
        for point in reported(group.rows.get(method)):
            found.setdefault(point.dial, []).append(point)
    timed = last_timed(groups)
    row = timed.rows.get(method) if timed else None
    lines = []
    for dial, points in sorted(found.items(), key=lambda pair: -pair[1][-1].cost):
        times = row.times(dial) if row else {}
        lines.append(
            {
                "method": method,
                "dial": f"{dial:g}",
                "score": mean([100 * point.score for point in points]),
                "layers per token": mean([point.layers_per_token or 0 for point in points]),
                "FLOPs ÷": mean([1 / point.cost for point in points]),
                **{name: value or "–" for name, value in time_columns(times, SIZES).items()},
            }
        )
    return lines


def chosen_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The cheapest dial within half a point and within two on the dev data."""
    lines: list[dict[str, Any]] = []
    for method in METHODS:
        for loss in (0.5, 2.0):
            points = [group.within_loss(group.rows[method], loss) for group in groups if method in group.rows]
            found = [point for point in points if point is not None]
            if found and len(found) == len(points):  # a mean over the seeds that had luck would be no mean
                lines.append(
                    {
                        "method": method,
                        "dev loss ≤": f"{loss:g}",
                        "dial": mean([point.dial for point in found], 3),
                        "score": mean([100 * point.score for point in found]),
                        "FLOPs ÷": mean([1 / point.cost for point in found]),
                    }
                )
    return lines


def depth_tables(groups: Sequence[Group]) -> str:
    """Per set: every method where its paper reports it, and at the dials chosen on the dev data."""
    parts = []
    for seeds in by_set(groups):
        first = seeds[0]
        lines = [line for method in METHODS for line in reported_rows(seeds, method)]
        timed = last_timed(seeds)
        parts += [
            f"### {first.title}",
            f"{first.full.n_test} test inputs; score is {first.metric}, seeds "
            f"{', '.join(str(group.full.seed) for group in seeds)}. Full model: "
            f"**{mean([100 * group.full_score for group in seeds])}**. "
            f"{clock_note(timed.full if timed else None, SIZES)}",
            markdown_table(lines) if lines else "No method has been measured yet.",
            markdown_table(chosen) if (chosen := chosen_rows(seeds)) else "",
            first_layers_table(first),
            reproduce(first),
        ]
    return "\n\n".join(part for part in parts if part) or NOT_MEASURED


def first_layers_table(group: Group) -> str:
    """The encoder cut to its first layers: the full model, and depths at the dial trained at."""
    lines: list[dict[str, Any]] = []
    shallow = sorted(
        (row for row in group.methods if row.layers and row.method == "depth_mi"), key=lambda r: r.layers or 0
    )
    for row in shallow:
        full = group.rows.get(f"full-{row.layers}")
        dial = float(row.settings.get("training_strength", 1))
        point = row.at(dial)
        if full is not None and point is not None and point.layers_per_token is not None and row.layers:
            of_all = group.full.on("test")[0].depth / row.layers / point.cost
            lines.append(
                {
                    "first layers": row.layers,
                    "full": f"{100 * full.on('test')[0].score:.2f}",
                    "depth_mi": f"{100 * point.score:.2f}",
                    "its dial": f"{dial:g}",
                    "its layers per token": f"{point.layers_per_token:.2f}",
                    "its FLOPs ÷ those of the first layers": f"{1 / point.cost:.2f}",
                    "of all layers": f"{of_all:.2f}",
                }
            )
    return markdown_table(lines) if lines else ""


def pretraining_tables(groups: Sequence[Group]) -> str:
    """Per set a line for each pretrained encoder: without early exit, where the gates say so, and losing little."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for group in sorted(groups, key=lambda group: (group.any.model, group.any.set)):
        for row in (row for row in group.rows.values() if row.pretraining):
            by_dial = {point.dial: point for point in row.on("test")}
            chosen = group.within_loss(row, 0.5)
            assert row.pretraining is not None
            sets.setdefault(row.set, []).append(
                {
                    "encoder": row.model,
                    "perplexity": f"{row.pretraining['perplexity']:.1f}",
                    "no early exit": f"{100 * by_dial[0.0].score:.2f}",
                    **{f"γ = {dial:g}": short(by_dial[dial]) for dial in SHOWN_GATES},
                    "dev loss ≤ 0.5": short(chosen) if chosen else "–",
                }
            )
    parts = [part for name, lines in sets.items() for part in (f"**{SET_NAMES[name]}**", markdown_table(lines))]
    return "\n\n".join(parts) or NOT_MEASURED
