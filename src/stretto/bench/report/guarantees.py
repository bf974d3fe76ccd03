"""How often guarantees held over random draws, and what they cost: the table and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.bench.guarantee import QUANTILES
from stretto.bench.report.plots import Panels, digest
from stretto.bench.results import Row
from stretto.view.plots import COLOURS
from stretto.view.tables import markdown_table

CHOOSERS = ("guaranteed", "uncorrected")


def study_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    lines = []
    for row in rows:
        found = row.guarantee
        if found is None:
            continue
        right, wrong, splits = found["guaranteed"], found["uncorrected"], found["splits"]
        lines.append(
            {
                "set": row.set,
                "row": row.name,
                "allowed": f"{100 * found['allowed']:g} %",
                "texts": f"{found['calibration']} + {found['test']}",
                "broken": f"{right['violations']} of {splits}",
                "may be": f"≤ {found['most_violations']}",
                "uncorrected": f"{wrong['violations']} of {splits}",
                "on test part": f"{right['violations_on_test']} / {wrong['violations_on_test']}",
                "cost": f"{right['cost']:.3f}",
                "oracle": f"{found['oracle']['cost']:.3f}",
                "full model kept": str(right["full_model"]),
            }
        )
    return lines


def study_table(rows: Sequence[Row]) -> str:
    lines = study_rows(rows)
    return markdown_table(lines) if lines else "Not measured yet."


def study_panels(rows: Sequence[Row]) -> Panels:
    """For each row the distribution of the risk of the chosen dials: [[percent, share of draws], …]."""
    return {
        f"{row.set}: {row.name}": {
            "allowed": 100 * found["allowed"],
            "confidence": found["confidence"],
            "curves": {name: curve(found[name]["quantiles"]) for name in CHOOSERS},
        }
        for row, found in ((row, row.guarantee) for row in rows)
        if found is not None
    }


def curve(quantiles: Sequence[float]) -> list[list[float]]:
    return [[round(100 * risk, 4), share] for risk, share in zip(quantiles, QUANTILES, strict=True)]


def draw_studies(panels: Panels, path: Path) -> None:
    """A curve that passes above the crossing of the two lines keeps its guarantee."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.1 * columns, 3.0 * lines + 0.5), layout="constrained")
    for index, (title, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, index + 1)
        allowed = axes.axvline(panel["allowed"], color="0.4", linewidth=1, linestyle="--")
        sure = axes.axhline(panel["confidence"], color="0.4", linewidth=1, linestyle=":")
        handles = {"allowed loss": allowed, "confidence": sure}
        for number, (name, curve) in enumerate(panel["curves"].items()):
            (handles[name],) = axes.plot(*zip(*curve, strict=True), color=COLOURS[number], linewidth=1.6)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("risk of the chosen dial (%)", fontsize=8)
        axes.set_ylabel("share of draws with at most this risk", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, 2.2 * panel["allowed"])
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Source": digest(panels), "Software": None})
