"""The results of benchmarks/drops.py, set in tables. Anything in them may still be missing."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from curves import LOSSES, NOT_METHODS
from drops import SETS
from exit_results import COLUMNS, by_batch, clock_note, of_products
from names import HF, RESULTS, metric, title

from stretto.view.tables import markdown_table

Row = dict[str, Any]
#: They look at the right answers of the test data, and what that takes is not counted: bounds, not methods.
ORACLES = ("constant_ratio-saliency",)


def load_drops() -> list[dict[str, Any]]:
    """The files that have a full model, in the order of the sets."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("drops-*.json")]
    order = list(SETS)
    return sorted(
        (f for f in found if "full" in f), key=lambda f: (order.index(f["about"]["set"]), f["about"]["encoder"])
    )


def drop_curves() -> Iterator[tuple[str, str, dict[str, Any], dict[str, list[dict[str, Any]]]]]:
    """Per set: title, metric, the full model's point, and each row's points on the test data."""
    for found in load_drops():
        curves = {
            f"{key} (oracle)" if key in ORACLES else key: row["test"]
            for key, row in found.items()
            if key not in NOT_METHODS
        }
        yield title(found["about"]), metric(found["about"]), found["full"]["test"], curves


def row_name(key: str) -> str:
    return f"{key} (oracle)" if key in ORACLES else key


def drop_tables() -> str:
    """One table per set: each row at the dials chosen on the dev data."""
    parts = []
    for found in load_drops():
        about, full = found["about"], found["full"]["test"]
        rows = [row for key in found if key not in NOT_METHODS for row in chosen_rows(found, key)]
        clock = found.get("clock", {})
        told = [
            f"{about['test_examples']} test inputs; score is {metric(about)}. Full model: "
            f"**{100 * full['score']:.2f}** (dev {100 * found['full']['dev']['score']:.2f}). {clock_note(clock)}"
        ]
        if "search" in found:
            search = found["search"]
            told.append(
                f"The search measured {search['tried'][-1]} configurations on {search['examples']} dev inputs; the "
                f"area under its frontier went from {search['area'][0]:.4f} to {search['area'][-1]:.4f}."
            )
        parts += [
            f"### {title(about)}",
            " ".join(told),
            markdown_table(rows) if rows else "No method has been measured yet.",
            f"Again: `{about['command']}` (seed {about['seed']}; stretto {about['stretto']}, torch {about['torch']}, "
            f"transformers {about['transformers']}).",
        ]
    return "\n\n".join(parts) or "Not measured yet."


def drop_summary() -> str:
    return summary(load_drops(), ("length_adaptive", "adapler", "power_bert"))


def summary(files: list[dict[str, Any]], methods: Collection[str]) -> str:
    """One line per set and method: the cheapest dial that loses at most a point on the dev data, if there is one."""
    rows: list[Row] = []
    for found in files:
        full = found["full"]["test"]["score"]
        for key in (name for name in found if name in methods):
            point = found[key]["chosen"]["1"]
            gains = found.get("clock", {}).get("methods", {}).get(key, {}).get("1", {}).get("32")
            rows.append(
                {
                    "set": f"{title(found['about'])} ({metric(found['about'])})",
                    "full model": f"{100 * full:.1f}",
                    "method": key,
                    "dial off": f"{100 * found[key]['test'][0]['score']:.1f}",
                    "score": f"{100 * point['score']:.1f}" if point else "–",
                    "cost": f"{point['cost']:.2f}" if point else "–",
                    "× full": f"{gains['time_gain']:.1f}" if point and gains else "–",
                    "× HF": f"{gains[HF]:.1f}" if point and gains else "–",
                }
            )
    return markdown_table(rows) if rows else "Not measured yet."


def rationale_tables() -> str:
    """Average precision and false-positive rate of each source, at some layers."""
    parts = []
    for path in sorted(RESULTS.glob("rationales-*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        parts.append(
            f"`{found['method']}` at dial {found['dial']:g}, {found['texts'] - found['left_out']} texts; "
            f"{found['marked']:.0%} of their words within the length limit are marked."
        )
        for measure, name in (
            ("average_precision", "average precision"), ("false_positive_rate", "false-positive rate"),
        ):  # fmt: skip
            curves = {source: curve[measure] for source, curve in found["curves"].items() if None not in curve[measure]}
            layers = range(0, max(map(len, curves.values())), 2)
            rows = [
                {name: source, **{f"layer {layer + 1}": f"{curve[layer]:.2f}" for layer in layers}}
                for source, curve in curves.items()
            ]
            parts.append(markdown_table(rows))
    return "\n\n".join(parts) or "Not measured yet."


def chosen_rows(found: dict[str, Any], key: str) -> list[Row]:
    """A row per dial; one that serves several losses is shown for the smallest."""
    rows: list[Row] = []
    shown: set[float] = set()
    for loss in LOSSES:
        point = found[key]["chosen"][f"{loss:g}"]
        if point is None or point["dial"] in shown:
            continue
        shown.add(point["dial"])
        gains = found.get("clock", {}).get("methods", {}).get(key, {}).get(f"{loss:g}", {})
        rows.append(
            {
                "method": row_name(key),
                "dev loss ≤": f"{loss:g}",
                "score": f"{100 * point['score']:.2f}",
                "against full": f"{100 * (point['score'] - found['full']['test']['score']):+.2f}",
                "against dial off": f"{100 * (point['score'] - found[key]['test'][0]['score']):+.2f}",
                "cost": f"{point['cost']:.3f}",
                "FLOPs ÷": "–" if key in ORACLES else f"{1 / point['cost']:.2f}",
                f"× full {COLUMNS}": by_batch(gains, "time_gain"),
                f"× HF {COLUMNS}": by_batch(gains, HF),
                f"tracking {COLUMNS}": by_batch(gains, "tracking"),
                "products 32": of_products(gains),
            }
        )
    return rows
