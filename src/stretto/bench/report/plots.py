"""The plots of score over cost: one panel per set and encoder, one curve per row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.bench.report.drops import row_name
from stretto.bench.report.exits import curve, lines_of
from stretto.bench.report.groups import Group, by_set
from stretto.bench.results import Point
from stretto.methods import METHODS
from stretto.view.plots import COLOURS, MARKERS

DRAWING = 4  # raise it when the look of the plots changes, so that --check asks for new ones

#: {title: {metric, full, curves: {row: [[cost, score], …]}}}
Panels = dict[str, dict[str, Any]]


def exit_panels(groups: Sequence[Group]) -> Panels:
    return {g.title: panel(g, {line: curve(g, line) for line in lines_of([g])}) for g in groups}


def curve_panels(groups: Sequence[Group]) -> Panels:
    """Of the first seed of each set; encoders cut to their first layers are not compared with the full one."""
    firsts = [seeds[0] for seeds in by_set(groups)]
    return {g.title: panel(g, {row_name(row): row.on("test") for row in g.methods if not row.layers}) for g in firsts}


def panel(group: Group, curves: dict[str, list[Point]]) -> dict[str, Any]:
    return {
        "metric": group.metric,
        "full": round(100 * group.full_score, 4),
        "curves": {
            name: [[round(p.cost, 4), round(100 * p.score, 4)] for p in points]
            for name, points in curves.items()
            if points
        },
    }


def digest(panels: Panels) -> str:
    return hashlib.sha256(json.dumps([DRAWING, panels]).encode()).hexdigest()


def draw(panels: Panels, path: Path) -> None:
    """The digest of what is drawn goes into the file."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.1 * columns, 3.2 * lines + 0.5), layout="constrained")
    drawn = {method_of(name) for panel in panels.values() for name in panel["curves"]}
    names = [name for name in METHODS if name in drawn]
    looks = {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for index, (title, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, index + 1)
        handles["full model"] = axes.axhline(panel["full"], color="0.4", linewidth=1, linestyle="--", zorder=0)
        for name, points in panel["curves"].items():
            colour, marker = looks[method_of(name)]
            style = ":" if name == "static_depth" else "-" if name in looks else "--"  # a variant is dashed
            (handles[name],) = axes.plot(
                *zip(*points, strict=True), color=colour, marker=marker, markersize=7 if style == ":" else 3,
                linewidth=1.2, linestyle=style, label=name,
            )  # fmt: skip
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("cost (fraction of the full model's FLOPs)", fontsize=8)
        axes.set_ylabel(panel["metric"], fontsize=8)
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, 1.02)
        best = max([panel["full"], *(score for curve in panel["curves"].values() for _, score in curve)])
        axes.set_ylim(panel["full"] - 10, best + 1)  # what falls further is of no use
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(3 * columns, 8), frameon=False, fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Source": digest(panels), "Software": None})


def method_of(line: str) -> str:
    """'deebert' of 'deebert (cls)', 'constant_ratio' of 'constant_ratio-random'."""
    return line.replace("-", " ").split()[0]


def drawn_digest(path: Path) -> str | None:
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get("Source")
