"""Plots: score over cost, anything over layers, histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError
from stretto.saving.files import replacing_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stretto.saving.points import OperatingPoint

#: The colours of Okabe and Ito, safe for colour-blind readers; markers differ too, for print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
#: A single mark above everything else, whole also at the edge of the axes.
ALONE: dict[str, Any] = {"linestyle": "", "clip_on": False, "zorder": 3}
SUFFIXES = (".png", ".svg", ".pdf")


def pareto_plot(
    curves: Mapping[str, Sequence[OperatingPoint]],
    path: str | Path,
    *,
    full: OperatingPoint | None = None,
    default: OperatingPoint | None = None,
    standing: str = "",
    metric: str = "score",
    title: str = "",
) -> None:
    """Draw one curve of operating points per name; `full` is the full model, a star and a horizontal line.

    `default` gets a ring, and the legend says whether it is guaranteed or an estimate (`standing`)."""
    from matplotlib.figure import Figure  # no pyplot: it keeps global state and looks for a display

    path = check_plot_path(path)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curves.items()):
        ordered = sorted(points, key=lambda point: point.cost)
        axes.plot(
            [point.cost for point in ordered], [point.score for point in ordered], label=name, linewidth=1.6,
            color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)], markersize=4,
        )  # fmt: skip
    if full is not None:
        axes.axhline(full.score, color="0.6", linewidth=0.8, linestyle="--", zorder=0)
        axes.plot([full.cost], [full.score], marker="*", markersize=12, color="0.25", label="full model", **ALONE)
    if default is not None:
        axes.plot(
            [default.cost], [default.score], marker="o", markersize=11, markerfacecolor="none",
            markeredgewidth=1.6, color=COLOURS[1], label=f"default dial ({standing})", **ALONE,
        )  # fmt: skip
    axes.set_xlabel("cost (fraction of the full model's FLOPs)")
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_xlim(left=0)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    save(figure, path)


def layer_plot(panels: Mapping[str, Mapping[str, Sequence[float | None]]], path: str | Path) -> None:
    """One panel above the other, each with a line per name; values are by layer, from 1. A gap where there is None."""
    from matplotlib.figure import Figure

    path = check_plot_path(path)
    figure = Figure(figsize=(6.4, 3.2 * len(panels)), layout="constrained")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for name, values in lines.items():
            number = names.index(name)
            axes.plot(
                range(1, len(values) + 1), [float("nan") if value is None else value for value in values], label=name,
                color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)], markersize=4,
                linewidth=1.6,
            )  # fmt: skip
        axes.set_ylabel(title)
        axes.grid(color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("layer")
    all_axes[-1].legend(frameon=False)
    save(figure, path)


def depth_histograms(
    values: Sequence[float], depths: Sequence[int], n_layers: int, path: str | Path, *, measure: str
) -> None:
    """How many words have which value (above) and which depth (below)."""
    import numpy as np
    from matplotlib.figure import Figure

    path = check_plot_path(path)
    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1)
    above.hist(values, bins=50, color=COLOURS[0], log=True)
    above.set_xlabel(measure)
    below.bar(range(1, n_layers + 1), np.bincount(depths, minlength=n_layers + 1)[1:], color=COLOURS[1])
    below.set_xlabel("depth")
    below.set_xticks(range(1, n_layers + 1))
    for axes in (above, below):
        axes.set_ylabel("words")
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write the file in one step."""
    with replacing_file(path) as unfinished:
        figure.savefig(unfinished, dpi=160, format=path.suffix[1:].lower())


def check_plot_path(path: str | Path) -> Path:
    """Refuse an unknown ending before anything is computed."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise StrettoError(f"Expected a plot name ending in {', '.join(SUFFIXES)}, got '{path}'. Rename it.")
    return path
