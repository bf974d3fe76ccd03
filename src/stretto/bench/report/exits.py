"""Tables of the suite `exits`: each method at given costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from stretto.bench.report.groups import (
    NOT_MEASURED,
    STREAM,
    TIMES,
    Group,
    clock_note,
    of_products,
    short,
    time_columns,
)  # fmt: skip
from stretto.bench.results import FULL, HF, ONNX_INT8, Clock, Point, Row
from stretto.budget.choose import COSTS, within_cost
from stretto.methods import METHODS
from stretto.tasks import TASKS
from stretto.view.tables import markdown_table

SUMMARY_BUDGET = 0.5
SUMMARY_LOSS = 2  # points: what has lost more may be as fast as it likes
GAINS_LOSS = 1.0
#: The most rows per set in the README.
GAINS_ROWS = 2
SLACK = 0.6  # points of score a curve may lose and still count as the full model's
ADAPTIVE = [name for name, method in METHODS.items() if method.uses_exits]


def line_of(row: Row) -> str | None:
    """The line of the tables a row belongs to: 'deebert', 'deebert (cls)' for deebert-cls; None if it has no exits."""
    if row.method not in ADAPTIVE:
        return None
    variant = row.name.partition("-")[2]
    return row.method if not variant or row.method == "static_depth" else f"{row.method} ({variant})"


def lines_of(groups: Sequence[Group]) -> list[str]:
    """Every method, and behind it its variants."""
    found = {line for group in groups for row in group.methods if (line := line_of(row))} | set(ADAPTIVE)
    return sorted(found, key=lambda line: (ADAPTIVE.index(line.split()[0]), line))


def rows_of(group: Group, line: str) -> list[Row]:
    """The rows behind a line: one, or for static_depth one per depth."""
    return [row for row in group.methods if line_of(row) == line]


def at(group: Group, line: str, budget: float) -> tuple[Row, Point] | None:
    """The row and operating point for a budget; of several rows the most expensive that fits."""
    found = [(row, point) for row in rows_of(group, line) if (point := within_cost(row.on("test"), budget))]
    return max(found, key=lambda pair: pair[1].cost, default=None)


def curve(group: Group, line: str) -> list[Point]:
    """Operating points from cheap to expensive. Of static_depth only the depth each row was trained for."""
    found: list[Point] = []
    for row in rows_of(group, line):
        points = row.on("test")
        found += [min(points, key=lambda p: p.cost)] if line == "static_depth" else points
    return sorted(found, key=lambda p: p.cost)


def absent(line: str, group: Group) -> str:
    return "–" if METHODS[line.split()[0]].needs.met_by(TASKS[group.any.task or ""]) else ""


def timed(
    groups: Sequence[Group], budget: float | None = None, most_lost: float = float("inf")
) -> Iterator[dict[str, Clock]]:
    """The times of every row (at one budget, or at all) that loses at most so many points."""
    for group in groups:
        for line in lines_of(groups):
            for each in COSTS if budget is None else (budget,):
                chosen = at(group, line, each)
                if chosen is None or 100 * (group.full_score - chosen[1].score) > most_lost:
                    continue
                if times := chosen[0].times(chosen[1].dial):
                    yield times


def summary_table(groups: Sequence[Group]) -> str:
    """One row per method, one column per set, at one budget."""
    if not groups:
        return NOT_MEASURED
    rows: list[dict[str, Any]] = [
        {"method": "full model", **{f"{g.title} ({g.metric})": f"{100 * g.full_score:.1f}" for g in groups}}
    ]
    for line in lines_of(groups):
        row: dict[str, Any] = {"method": line}
        for group in groups:
            chosen = at(group, line, SUMMARY_BUDGET)
            row[f"{group.title} ({group.metric})"] = short(chosen[1], 1) if chosen else absent(line, group)
        rows.append(row)
    parts = [
        f"Test score @ cost, each method at its most expensive dial with cost ≤ {SUMMARY_BUDGET} (– : no such dial, or "
        "not measured; empty: the method does not support the task).",
        markdown_table(rows),
    ]
    times = list(timed(groups, SUMMARY_BUDGET, SUMMARY_LOSS))
    if times:
        full, other = (spread([found["32"].ratios[what] for found in times]) for what in (FULL, HF))
        parts.append(
            f"In batches of 32, the rows that lose at most {SUMMARY_LOSS} points are {full} times as fast as the full "
            f"model on the same engine, and {other} times as fast as Hugging Face on padded batches."
        )
    kept = [found[STREAM].tracking for found in timed(groups) if STREAM in found]
    if kept:
        streamed = [group for group in groups if any(clock.stream for clock in group.full.clock)]
        parts.append(
            "In a stream of such batches, as `stretto predict` does with a file, a median of "
            f"{statistics.median(kept):.2f} of the FLOPs gain became a gain in time ({min(kept):.2f}–{max(kept):.2f}; "
            f"{len(kept)} rows of {len(streamed)} sets)."
        )
    return "\n\n".join(parts)


def gains_table(groups: Sequence[Group]) -> str:
    """For the README: the best methods of each set at half the cost, where a stream of batches was timed."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        found: list[tuple[float, dict[str, Any]]] = []
        for line in lines_of([group]):
            chosen = at(group, line, SUMMARY_BUDGET)
            if chosen is None or 100 * (group.full_score - chosen[1].score) > GAINS_LOSS:
                continue
            row, point = chosen
            clock = row.times(point.dial).get(STREAM)
            if clock is not None:
                against = clock.ratios.get(ONNX_INT8)
                about = {
                    "set": group.title,
                    "method": line,
                    f"score ({group.any.metric})": f"{100 * point.score:.1f}",
                    "full model": f"{100 * group.full_score:.1f}",
                    "cost": f"{point.cost:.2f}",
                    "× full": f"{clock.ratios[FULL]:.1f}",
                    "× Hugging Face": f"{clock.ratios[HF]:.1f}",
                    "× ONNX Runtime int8": "–" if against is None else f"{against:.1f}",
                }
                found.append((point.score, about))
        lines += [about for _, about in sorted(found, key=lambda each: each[0], reverse=True)[:GAINS_ROWS]]
    if not lines:
        return NOT_MEASURED
    others = "and with Hugging Face on padded batches."
    if all(line["× ONNX Runtime int8"] == "–" for line in lines):
        lines = [{name: value for name, value in line.items() if name != "× ONNX Runtime int8"} for line in lines]
    else:
        others = "with Hugging Face on padded batches, and with ONNX Runtime int8 (– : not measured)."
    note = (
        "×: how many times faster in a stream of batches of 32, compared with the full model on the same engine, "
        f"{others} The {GAINS_ROWS} rows with the best scores of each set; [all](docs/results.md)."
    )
    return f"{markdown_table(lines)}\n\n{note}"


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.1f}–{max(values):.1f}"


def set_tables(groups: Sequence[Group]) -> str:
    """One table per set: every method at every budget, with times."""
    parts = []
    for group in groups:
        rows: list[dict[str, Any]] = []
        for line in lines_of([group]):
            for budget in COSTS:
                chosen = at(group, line, budget)
                if chosen is None:
                    continue
                row, point = chosen
                times = row.times(point.dial)
                rows.append(
                    {
                        "method": line,
                        "cost ≤": f"{budget:g}",
                        "score": f"{100 * point.score:.2f}",
                        "cost": f"{point.cost:.3f}",
                        "depth": f"{point.depth:.2f}",
                        "dial": f"{point.dial:g}",
                        **time_columns(times),
                        "products 32": of_products(times),
                    }
                )
        parts += [
            f"### {group.title}",
            f"{group.full.n_test} test inputs; score is {group.metric}. Full model: "
            f"**{100 * group.full_score:.2f}**. {clock_note(group.full)}",
            markdown_table(rows) if rows else "No method has been measured yet.",
            reproduce(group),
        ]
    return "\n\n".join(parts) or NOT_MEASURED


def reproduce(group: Group) -> str:
    row = group.full
    made = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    return f"Reproduce: `{row.command}` (seed {row.seed}; {made})."


def cheapest_table(groups: Sequence[Group]) -> str:
    """Where each curve still answers as well as the full model, read off the test curve."""
    rows: list[dict[str, Any]] = []
    for line in lines_of(groups):
        row: dict[str, Any] = {"method": line}
        for group in groups:
            least = 100 * group.full_score - SLACK
            good = [point for point in curve(group, line) if 100 * point.score >= least - 1e-9]
            best = min(good, key=lambda point: point.cost, default=None)
            row[group.title] = short(best) if best else absent(line, group)
        rows.append(row)
    return markdown_table(rows) if groups else NOT_MEASURED


def tracking_note(groups: Sequence[Group]) -> str:
    """How much of the FLOPs gain became a gain in time, and what the dial costs when it is off."""
    lines = []
    for size in TIMES:
        batches = "batches of 32 in a stream" if size == STREAM else f"batch {size}"
        found = [times[size] for times in timed(groups) if size in times]
        tracked = [clock.tracking for clock in found]
        products = [clock.products_tracking for clock in found if clock.products_tracking is not None]
        for what, shares in (("", tracked), (", the matrix products alone", products)):
            if shares:
                lines.append(
                    f"- {batches}{what}: a median of {statistics.median(shares):.2f} of the FLOPs gain became a gain "
                    f"in time ({min(shares):.2f}–{max(shares):.2f}; {len(shares)} rows)"
                )
    curves = [curve(group, line) for group in groups for line in lines_of(groups) if line != "static_depth"]
    off = [points[-1].cost for points in curves if points]
    if off:
        lines.append(
            f"- dial off: exits that are computed but not taken add {100 * (min(off) - 1):.1f} to "
            f"{100 * (max(off) - 1):.1f} % to the full model's FLOPs"
        )
    return "\n".join(lines) or NOT_MEASURED
