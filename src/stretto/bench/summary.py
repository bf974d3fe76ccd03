"""What follows from the rows of a comparison taken together: hypervolumes, agreement, hard and easy texts, a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.bench.page import page
from stretto.bench.report.groups import Group, by_batch, by_set, groups_of, mean
from stretto.bench.results import FULL, HF, HF_SORTED, ONNX_INT8, Clock, Point, Results, Row
from stretto.bench.suite import BASELINES, Suite
from stretto.saving.files import write_text
from stretto.view.tables import markdown_table

#: Points below the full model's score at which a curve counts nothing.
FLOOR = 10.0
#: How many hard and easy texts are named.
NAMED = 10

Answers = Mapping[tuple[str, str, str, int], dict[str, Any]]


def hypervolume(points: Sequence[Point], full: float) -> float:
    """The area that a curve dominates: over cost from 0 to 1, the best score within that cost, counted from `FLOOR`
    below the full model's and divided by `FLOOR`. The full model's score at cost c is worth 1 - c."""
    area, best, before = 0.0, 0.0, 0.0
    for point in sorted(points, key=lambda p: p.cost):
        if point.cost >= 1:
            break
        area += best * (point.cost - before)
        before = point.cost
        best = max(best, (100 * (point.score - full) + FLOOR) / FLOOR)
    return area + best * (1 - before)


def compared(rows: Sequence[Row], answers: Answers) -> dict[str, Any]:
    """Per set and encoder; of several seeds the means."""
    sets = []
    for seeds in by_set(groups_of(rows)):
        first = seeds[0]
        volumes: dict[str, list[float]] = {}
        for group in seeds:
            for row in group.methods:
                if row.name not in BASELINES and row.on("test"):
                    volumes.setdefault(row.name, []).append(round(hypervolume(row.on("test"), group.full_score), 4))
        sets.append(
            {
                "set": first.any.set,
                "model": first.any.model,
                "seeds": [group.any.seed for group in seeds],
                "hypervolume": volumes,
                "agreement": agreement(seeds, answers),
                **named_texts(first, answers),
            }
        )
    return {"sets": sets}


def agreement(seeds: Sequence[Group], answers: Answers) -> dict[str, Any]:
    """The share of the test inputs that two rows answer alike, each at its default dial."""
    names = [name for name in seeds[0].rows if seeds[0].rows[name].key in answers]

    def share(a: str, b: str) -> float:
        shares = []
        for group in seeds:
            keys = [group.rows[name].key for name in (a, b) if name in group.rows]
            if len(keys) == 2 and all(key in answers for key in keys):
                one, other = (answers[key]["answer"] for key in keys)
                shares.append(sum(x == y for x, y in zip(one, other, strict=True)) / len(one))
        return round(statistics.mean(shares), 4)

    return {"rows": names, "shares": [[share(a, b) for b in names] for a in names]}


def named_texts(group: Group, answers: Answers) -> dict[str, list[dict[str, Any]]]:
    """The numbers of the test inputs that most rows get wrong (or that cost most), and of those that none does."""
    given = [answers[row.key] for row in group.rows.values() if row.key in answers]
    if not given:
        return {"hardest": [], "easiest": []}
    judged = [answer for answer in given if answer["right"] is not None]
    lines = []
    for place in range(len(given[0]["answer"])):
        wrong = sum(not answer["right"][place] for answer in judged)
        cost = statistics.mean(answer["cost"][place] for answer in given)
        lines.append({"input": place, "wrong": wrong, "of": len(judged), "cost": round(cost, 4)})
    ordered = sorted(lines, key=lambda line: (line["wrong"], line["cost"]))
    return {"hardest": ordered[: -NAMED - 1 : -1], "easiest": ordered[:NAMED]}


def table(results: Results) -> str:
    """Markdown: per set a line for each row, at the cheapest dial within a point on the dev data."""
    parts = []
    volumes = {(part["set"], part["model"]): part["hypervolume"] for part in (results.comparison or {}).get("sets", [])}
    for seeds in by_set(groups_of(results.rows)):
        first = seeds[0]
        names = dict.fromkeys(name for group in seeds for name in group.rows)
        lines = [
            each
            for name in names
            for each in lines_of(name, seeds, volumes.get((first.any.set, first.any.model), {}).get(name))
        ]
        trained = ", ".join(dict.fromkeys(str(group.full.n_train) for group in seeds))
        parts += [
            f"## {first.title}",
            f"{trained} training and {first.full.n_test} test inputs, seeds "
            f"{', '.join(str(group.any.seed) for group in seeds)}; score is {first.metric}. Full model: "
            f"**{mean([100 * group.full_score for group in seeds])}**.",
            markdown_table(lines),
        ]
    return "\n\n".join(parts)


def lines_of(name: str, seeds: Sequence[Group], volume: Sequence[float] | None) -> list[dict[str, Any]]:
    """A row of the results in the table, and once more in int8 if it was measured so."""
    lines = [line(name, seeds, volume)]
    rows = [group.rows[name] for group in seeds if name in group.rows]
    if name not in BASELINES and all(row.on("test", "int8") for row in rows):
        lines.append(int8_line(name, rows))
    return lines


def int8_line(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """At the default dial (the cheapest within a point of the dial off), if there is another than off."""
    off, *chosen = zip(*(row.on("test", "int8")[:2] for row in rows), strict=False)
    timed = next((row for row in rows if any(clock.dtype == "int8" for clock in row.clock)), None)
    shown = chosen[0] if chosen else off
    times = {} if timed is None else timed.times(shown[rows.index(timed)].dial, "int8")
    return {
        "row": f"{name}, int8",
        "dial off": mean([100 * point.score for point in off]),
        "within a point on dev": "–" if shown is off else mean([100 * point.score for point in shown]),
        "cost": mean([point.cost for point in shown], 3),
        "hypervolume": "–",
        **time_columns(times),
    }


def time_columns(times: dict[str, Clock]) -> dict[str, str]:
    return {
        f"× {title} 1 / 8 / 32 / stream": by_batch(times, what) or "–"
        for title, what in (("full", FULL), ("HF", HF), ("HF sorted", HF_SORTED), ("ONNX int8", ONNX_INT8))
    }


def line(name: str, seeds: Sequence[Group], volume: Sequence[float] | None) -> dict[str, Any]:
    """One row of the table; a row without a dial that saves anything is shown as it is with the dial off."""
    rows = [(group, group.rows[name]) for group in seeds if name in group.rows]
    off = [row.on("test", dtype_of(name))[0] for _, row in rows]
    found = [group.within_loss(row, 1.0) for group, row in rows if name not in (*BASELINES, "full")]
    chosen = [point for point in found if point is not None]
    is_complete = bool(chosen) and len(chosen) == len(rows)
    timed = next((row for _, row in rows if row.clock), None)
    dial = timed.clock[0].dial if timed and name in (*BASELINES, "full") else None
    if timed and is_complete:
        dial = next(point.dial for point, (_, row) in zip(chosen, rows, strict=True) if row is timed)
    times = timed.times(dial, dtype_of(name)) if timed and dial is not None else {}
    return {
        "row": name,
        "dial off": mean([100 * point.score for point in off]),
        "within a point on dev": mean([100 * point.score for point in chosen]) if is_complete else "–",
        "cost": mean([point.cost for point in (chosen if is_complete else off)], 3),
        "hypervolume": mean(volume, 3) if volume else "–",
        **time_columns(times),
    }


def dtype_of(name: str) -> str:
    return "int8" if name == ONNX_INT8 else "float32"


def write_report(
    suite: Suite, results: Results, answers: Answers, texts: Callable[[str, int], list[str]], folder: Path
) -> None:
    """`report.md` and `report.html`."""
    groups = groups_of(results.rows)
    if not groups:
        return
    named: dict[str, dict[int, str]] = {}
    for part in (results.comparison or {})["sets"]:
        wanted = [line["input"] for line in (*part["hardest"], *part["easiest"])]
        every = texts(part["set"], part["seeds"][0]) if wanted else []
        named[part["set"]] = {place: every[place] for place in wanted}
    write_text(folder / "report.md", f"# {suite.name}\n\n{suite.about}\n\n{table(results)}\n")
    write_text(folder / "report.html", page(suite, groups, results.comparison or {}, named))
