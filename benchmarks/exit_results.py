"""The results of benchmarks/exits.py, read and set in tables. Anything in them may still be missing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from names import HF, RESULTS, SET_NAMES, STREAM, metric, title

from stretto.methods import METHODS
from stretto.tasks import TASKS
from stretto.view.tables import markdown_table

BUDGETS = ("0.75", "0.5", "0.35")
README_BUDGET = "0.5"
README_LOSS = 2  # points: what has lost more may be as fast as it likes
BATCHES = ("1", "8", "32")
TIMES = (*BATCHES, STREAM)
COLUMNS = " / ".join(TIMES)
SLACK = 0.6  # points of score a curve may lose and still count as the full model's
ENCODERS = ("gte-small",)  # shown first
ADAPTIVE = [name for name, method in METHODS.items() if method.uses_exits]

Point = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """One file of benchmarks/exits.py; anything in it may still be missing."""

    rows: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        return self.rows["about"]

    @property
    def title(self) -> str:
        return title(self.about)

    @property
    def metric(self) -> str:
        return metric(self.about)

    @property
    def full(self) -> Point:
        return self.rows["full"][0]

    def keys(self, line: str) -> list[str]:
        """The rows behind a line of the tables: one, or for static_depth one per depth."""
        return [key for key in self.rows if line_of(key) == line]

    def at(self, line: str, budget: str) -> tuple[str, Point] | None:
        """The row and operating point for a budget; of several rows the dearest that fits."""
        found = [(key, point) for key in self.keys(line) if (point := self.rows[key]["budgets"].get(budget))]
        return max(found, key=lambda pair: pair[1]["cost"], default=None)

    def curve(self, line: str) -> list[Point]:
        """Operating points to draw, from cheap to dear. Of static_depth only the depth each row was trained for."""
        found: list[Point] = []
        for key in self.keys(line):
            points = self.rows[key]["sweep"]
            found += [min(points, key=cost)] if line == "static_depth" else points
        return sorted(found, key=cost)

    @property
    def has_stream(self) -> bool:
        return STREAM in self.rows.get("clock", {}).get("methods", {}).get("full", {})

    def clock(self, key: str, budget: str) -> dict[str, dict[str, float]]:
        """{batch size: gains} of a row, empty where time has not been measured."""
        return self.rows.get("clock", {}).get("methods", {}).get(key, {}).get(budget, {})


def line_of(key: str) -> str | None:
    """The line of the tables a row belongs to: 'deebert', 'deebert (cls)' for deebert-cls; None if it is no method."""
    method, _, variant = key.partition("-")
    if method not in ADAPTIVE:
        return None
    return method if not variant or method == "static_depth" else f"{method} ({variant})"


def lines_of(results: list[Results]) -> list[str]:
    """Every method, and behind it its variants."""
    found = {line for r in results for key in r.rows if (line := line_of(key))} | set(ADAPTIVE)
    return sorted(found, key=lambda line: (ADAPTIVE.index(line.split()[0]), line))


def able(line: str, results: Results) -> bool:
    """Whether the method is for the set's task."""
    task = next(name for name, task in TASKS.items() if task.main_metric == results.about["main_metric"])
    return METHODS[line.split()[0]].needs.met_by(TASKS[task])


def cost(point: Point) -> float:
    return point["cost"]


def load_results() -> list[Results]:
    """The files that have a full model, in the order they are shown."""
    everything = [Results(json.loads(path.read_text(encoding="utf-8"))) for path in RESULTS.glob("exits-*.json")]

    def place(results: Results) -> tuple[Any, ...]:
        encoder, name = results.about["encoder"], results.about["set"]
        return encoder not in ENCODERS, encoder, list(SET_NAMES).index(name)

    return sorted((r for r in everything if "full" in r.rows and "about" in r.rows), key=place)


def measured(
    results: list[Results], budget: str | None = None, most_lost: float = float("inf")
) -> Iterator[dict[str, dict[str, float]]]:
    """The gains in time of every row (at one budget, or at all) that loses at most so many points."""
    for found in results:
        for line in lines_of(results):
            for each in BUDGETS if budget is None else (budget,):
                chosen = found.at(line, each)
                if chosen is None or 100 * (found.full["score"] - chosen[1]["score"]) > most_lost:
                    continue
                if gains := found.clock(chosen[0], each):
                    yield gains


def readme_results() -> str:
    """One row per method, one column per set, at one budget."""
    results = load_results()
    if not results:
        return "Not measured yet."
    rows: list[Row] = [
        {"method": "full model", **{f"{r.title} ({r.metric})": f"{100 * r.full['score']:.1f}" for r in results}}
    ]
    for line in lines_of(results):
        row: Row = {"method": line}
        for found in results:
            chosen = found.at(line, README_BUDGET)
            row[f"{found.title} ({found.metric})"] = short(chosen[1]) if chosen else absent(line, found)
        rows.append(row)
    lines = [
        f"Test score @ cost, each method at the dearest dial with cost ≤ {README_BUDGET} (– : no such dial, or not "
        "measured; empty: not for this task).",
        "",
        markdown_table(rows),
    ]
    times = list(measured(results, README_BUDGET, README_LOSS))
    if times:
        full = spread([gain["32"]["time_gain"] for gain in times])
        other = spread([gain["32"][HF] for gain in times])
        lines += [
            "",
            f"In batches of 32 those that lose at most {README_LOSS} points run {full} times as fast as the full model "
            f"on the same engine, and {other} times as fast as Hugging Face on padded batches.",
        ]
    streams = [gain[STREAM] for gain in measured(results) if STREAM in gain]
    if streams:
        kept = [gain["tracking"] for gain in streams]
        lines += [
            "",
            "In a stream of such batches, as `stretto predict` takes a file, a median of "
            f"{statistics.median(kept):.2f} of the gain in FLOPs is a gain in time ({min(kept):.2f}–{max(kept):.2f}; "
            f"{len(kept)} rows of {len([r for r in results if r.has_stream])} sets).",
        ]
    return "\n".join(lines)


def absent(line: str, results: Results) -> str:
    return "–" if able(line, results) else ""


def short(point: Point) -> str:
    return f"{100 * point['score']:.1f} @ {point['cost']:.2f}"


def spread(values: list[float]) -> str:
    return f"{min(values):.1f}–{max(values):.1f}"


def set_tables() -> str:
    """One table per set: every method at every budget, with wall-clock gains."""
    parts = []
    for results in load_results():
        about, clock = results.about, results.rows.get("clock", {})
        rows: list[Row] = []
        for line in lines_of([results]):
            for budget in BUDGETS:
                chosen = results.at(line, budget)
                if chosen is None:
                    continue
                key, point = chosen
                gains = results.clock(key, budget)
                rows.append(
                    {
                        "method": line,
                        "cost ≤": budget,
                        "score": f"{100 * point['score']:.2f}",
                        "cost": f"{point['cost']:.3f}",
                        "depth": f"{point['depth']:.2f}",
                        "dial": f"{point['dial']:g}",
                        f"× full {COLUMNS}": by_batch(gains, "time_gain"),
                        f"× HF {COLUMNS}": by_batch(gains, HF),
                        f"tracking {COLUMNS}": by_batch(gains, "tracking"),
                        "products 32": of_products(gains),
                    }
                )
        parts += [
            f"### {results.title}",
            f"{about['test_examples']} test inputs; score is {results.metric}. Full model: "
            f"**{100 * results.full['score']:.2f}**. {clock_note(clock)}",
            markdown_table(rows) if rows else "No method has been measured yet.",
            f"Again: `{about['command']}` (seed {about['seed']}; stretto {about['stretto']}, torch {about['torch']}, "
            f"transformers {about['transformers']}).",
        ]
    return "\n\n".join(parts) or "Not measured yet."


def clock_note(clock: dict[str, Any], sizes: Sequence[str] = TIMES) -> str:
    """What was timed, where (if it is known), and the full model against Hugging Face."""
    if not clock:
        return "Time: not measured yet."
    where = f", {clock['cpu']}" if "cpu" in clock else ""
    streamed = f" ({clock['streamed']} in a stream)" if "streamed" in clock else ""
    return (
        f"Time: {clock['sequences']} test inputs{streamed}, median of {clock['rounds']} rounds, "
        f"{clock['threads']} threads{where}. "
        f"The full model on the packed engine × HF: {by_batch(clock['methods'].get('full', {}), HF, sizes)}."
    )


def by_batch(gains: dict[str, dict[str, float]], name: str, sizes: Sequence[str] = TIMES) -> str:
    return " / ".join(f"{gains[size][name]:.2f}" if size in gains else "–" for size in sizes) if gains else ""


def of_products(gains: dict[str, dict[str, float]]) -> str:
    """The tracking of a row's matrix products alone, in the largest batches."""
    if not gains:
        return ""
    share = gains[BATCHES[-1]].get("tracking_of_products")
    return "–" if share is None else f"{share:.2f}"


def cheapest_table() -> str:
    """Where each curve still answers as well as the full model, read off the test curve."""
    results = load_results()
    rows: list[Row] = []
    for line in lines_of(results):
        row: Row = {"method": line}
        for found in results:
            least = 100 * found.full["score"] - SLACK
            good = [point for point in found.curve(line) if 100 * point["score"] >= least - 1e-9]
            best = min(good, key=cost, default=None)
            row[found.title] = f"{100 * best['score']:.2f} @ {best['cost']:.2f}" if best else absent(line, found)
        rows.append(row)
    return markdown_table(rows) if results else "Not measured yet."


def tracking_note() -> str:
    """How much of the FLOPs gain became a gain in time, and what the dial costs when it is off."""
    results = load_results()
    lines = []
    for size in TIMES:
        batches = "batches of 32 in a stream" if size == STREAM else f"batch {size}"
        gains = [gain[size] for gain in measured(results) if size in gain]
        for what, name in (("", "tracking"), (", the matrix products alone", "tracking_of_products")):
            shares = [gain[name] for gain in gains if name in gain]
            if shares:
                good = sum(share >= 0.9 for share in shares)
                lines.append(
                    f"- {batches}{what}: {good} of {len(shares)} rows keep at least 0.9 of the FLOPs gain as a gain "
                    f"in time (lowest {min(shares):.2f}, median {statistics.median(shares):.2f}, highest "
                    f"{max(shares):.2f})"
                )
    curves = [r.curve(line) for r in results for line in lines_of(results) if line != "static_depth"]
    off = [points[-1]["cost"] for points in curves if points]
    if off:
        lines.append(
            f"- dial off: exits that are asked but not taken add {100 * (min(off) - 1):.1f} to "
            f"{100 * (max(off) - 1):.1f} % to the full model's FLOPs"
        )
    return "\n".join(lines) or "Not measured yet."
