"""The results of benchmarks/depths.py and pretraining.py, set in tables. Anything in them may still be missing."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from curves import NOT_METHODS
from depths import FIRST_LAYERS, REPORTED, SETS, Depths
from drop_results import summary
from exit_results import by_batch, clock_note
from names import HF, RESULTS, SET_NAMES, STREAM, metric, title

from stretto.methods.alberta import GATED
from stretto.view.tables import markdown_table

SIZES = (*map(str, Depths.batch_sizes), STREAM)
#: Thresholds of ALBERTa's gates that the table of pretrained encoders shows.
SHOWN_GATES = (0.5, 0.9)

Row = dict[str, Any]
Runs = list[dict[str, Any]]
"""The files of one set and encoder, one per seed."""


def load_depths() -> list[Runs]:
    """By set, in the order of the script; seeds ascend."""
    found: dict[str, Runs] = defaultdict(list)
    for path in sorted(RESULTS.glob("depths-*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        if "full" in rows:
            found[rows["about"]["set"]].append(rows)
    return [sorted(found[name], key=lambda run: run["about"]["seed"]) for name in SETS if name in found]


def mean(values: list[float], digits: int = 2) -> str:
    """With the standard deviation, if there are several."""
    told = f"{statistics.mean(values):.{digits}f}"
    return told if len(values) == 1 else f"{told} ± {statistics.stdev(values):.{digits}f}"


def depth_curves() -> Iterator[tuple[str, str, dict[str, Any], dict[str, list[dict[str, Any]]]]]:
    """Per set, of its first seed: title, metric, the full model's point, and each method's points on the test data."""
    for run, *_ in load_depths():
        curves = {key: row["test"] for key, row in run.items() if key not in NOT_METHODS and "-" not in key}
        yield title(run["about"]), metric(run["about"]), run["full"]["test"], curves


def last_clock(runs: Runs) -> Row:
    """The times of the last seed that was timed: those of several machines have no mean."""
    return next((run["clock"] for run in reversed(runs) if "clock" in run), {})


def reported_dials(runs: Runs, method: str) -> list[str]:
    """Those of any seed, from dear to cheap."""
    points = {dial: point for run in runs if method in run for dial, point in run[method]["reported"].items()}
    return sorted(points, key=lambda dial: -points[dial]["cost"])


def reported_row(runs: Runs, method: str, dial: str) -> Row:
    """One line: a method at a dial that some seeds report."""
    points = [run[method]["reported"][dial] for run in runs if method in run and dial in run[method]["reported"]]
    gains = last_clock(runs).get("methods", {}).get(method, {}).get(f"dial {dial}", {})
    return {
        "method": method,
        "dial": dial,
        "score": mean([100 * point["score"] for point in points]),
        "layers per token": mean([point["token_depth"] for point in points]),
        "FLOPs ÷": mean([1 / point["cost"] for point in points]),
        f"× full {' / '.join(SIZES)}": by_batch(gains, "time_gain", SIZES) or "–",
        f"× HF {' / '.join(SIZES)}": by_batch(gains, HF, SIZES) or "–",
        f"tracking {' / '.join(SIZES)}": by_batch(gains, "tracking", SIZES) or "–",
    }


def chosen_rows(runs: Runs) -> list[Row]:
    """The cheapest dial within half a point and within two on the dev data."""
    rows: list[Row] = []
    for method in REPORTED:
        for loss in ("0.5", "2"):
            points = [run[method]["chosen"][loss] for run in runs if method in run]
            if points and None not in points:  # a mean over the seeds that had luck would be no mean
                rows.append(
                    {
                        "method": method,
                        "dev loss ≤": loss,
                        "dial": mean([point["dial"] for point in points], 3),
                        "score": mean([100 * point["score"] for point in points]),
                        "FLOPs ÷": mean([1 / point["cost"] for point in points]),
                    }
                )
    return rows


def depth_tables() -> str:
    """Per set: every method where its paper reports it, and at the dials chosen on the dev data."""
    parts = []
    for runs in load_depths():
        about = runs[0]["about"]
        rows = [reported_row(runs, method, dial) for method in REPORTED for dial in reported_dials(runs, method)]
        seeds = ", ".join(str(run["about"]["seed"]) for run in runs)
        parts += [
            f"### {title(about)}",
            f"{about['test_examples']} test inputs; score is {metric(about)}, seeds {seeds}. Full model: "
            f"**{mean([100 * run['full']['test']['score'] for run in runs])}**. {clock_note(last_clock(runs), SIZES)}",
            markdown_table(rows) if rows else "No method has been measured yet.",
            markdown_table(chosen) if (chosen := chosen_rows(runs)) else "",
            first_layers_table(runs),
            f"Again: `{about['command']}`" + (", and so on with `--seed`." if len(runs) > 1 else "."),
        ]
    return "\n\n".join(part for part in parts if part) or "Not measured yet."


def first_layers_table(runs: Runs) -> str:
    """The encoder cut to its first layers (with the first seed): the full model, and depths at the dial trained at."""
    run = runs[0]
    rows: list[Row] = []
    for layers in FIRST_LAYERS:
        key = f"depth_mi-{layers}"
        if f"full-{layers}" in run and key in run:
            dial = f"{SETS[run['about']['set']].rows[key].get('training_strength', 1):g}"
            point = run[key]["reported"][dial]
            of_all = run["full"]["test"]["depth"] / layers / point["cost"]
            rows.append(
                {
                    "first layers": layers,
                    "full": f"{100 * run[f'full-{layers}']['test'][0]['score']:.2f}",
                    "depth_mi": f"{100 * point['score']:.2f}",
                    "its dial": dial,
                    "its layers per token": f"{point['token_depth']:.2f}",
                    "its FLOPs ÷ those of the first layers": f"{1 / point['cost']:.2f}",
                    "of all layers": f"{of_all:.2f}",
                }
            )
    return markdown_table(rows) if rows else ""


def depth_summary() -> str:
    """Of the first seed of every set."""
    return summary([runs[0] for runs in load_depths()], REPORTED)


def at(point: Row) -> str:
    """Score @ cost."""
    return f"{100 * point['score']:.2f} @ {point['cost']:.2f}"


def pretraining_tables() -> str:
    """Per set a line for each pretrained encoder: without early exit, where the gates say so, and losing little."""
    sets: dict[str, list[Row]] = defaultdict(list)
    for path in sorted(RESULTS.glob("pretraining-*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "alberta" not in found:
            continue
        by_dial = {point["dial"]: point for point in found["alberta"]["test"]}
        chosen = found["alberta"]["chosen"]["0.5"]
        sets[found["about"]["set"]].append(
            {
                "encoder": found["about"]["encoder"],
                "perplexity": f"{found['pretraining']['perplexity']:.1f}",
                "no early exit": f"{100 * by_dial[GATED]['score']:.2f}",
                **{f"γ = {dial:g}": at(by_dial[dial]) for dial in SHOWN_GATES},
                "dev loss ≤ 0.5": at(chosen) if chosen else "–",
            }
        )
    parts = [part for name, rows in sets.items() for part in (f"**{SET_NAMES[name]}**", markdown_table(rows))]
    return "\n\n".join(parts) or "Not measured yet."
