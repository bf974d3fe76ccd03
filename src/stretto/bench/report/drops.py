"""Tables of the suite `drops`, and what they share with `depths`: each row at the dials chosen on the dev data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from stretto.bench.report.exits import reproduce
from stretto.bench.report.groups import LOSSES, NOT_MEASURED, Group, clock_note, of_products, time_columns
from stretto.bench.results import FULL, HF, Row
from stretto.view.tables import markdown_table


def is_oracle(row: Row) -> bool:
    """It looks at the right answers of the test data, and that pass is not counted: a bound, not a method."""
    return row.settings.get("select") == "saliency"


def row_name(row: Row) -> str:
    return f"{row.name} (oracle)" if is_oracle(row) else row.name


def drop_tables(groups: Sequence[Group]) -> str:
    """One table per set: each row at the dials chosen on the dev data."""
    parts = []
    for group in groups:
        rows = [line for row in group.methods for line in chosen_rows(group, row)]
        notes = [
            f"{group.full.n_test} test inputs; score is {group.metric}. Full model: **{100 * group.full_score:.2f}** "
            f"(dev {100 * group.full.on('dev')[0].score:.2f}). {clock_note(group.full)}"
        ]
        for row in group.methods:
            if row.search:
                tried, area = row.search["tried"], row.search["area"]
                notes.append(
                    f"The search measured {tried[-1]} configurations on {row.search['examples']} dev inputs; the "
                    f"area under its frontier went from {area[0]:.4f} to {area[-1]:.4f}."
                )
        parts += [
            f"### {group.title}",
            " ".join(notes),
            markdown_table(rows) if rows else "No method has been measured yet.",
            reproduce(group),
        ]
    return "\n\n".join(parts) or NOT_MEASURED


def chosen_rows(group: Group, row: Row) -> list[dict[str, Any]]:
    """A line per dial; one that serves several losses is shown for the smallest."""
    lines: list[dict[str, Any]] = []
    shown: set[float] = set()
    for loss in LOSSES:
        point = group.within_loss(row, loss)
        if point is None or point.dial in shown:
            continue
        shown.add(point.dial)
        times = row.times(point.dial)
        lines.append(
            {
                "method": row_name(row),
                "dev loss ≤": f"{loss:g}",
                "score": f"{100 * point.score:.2f}",
                "against full": f"{100 * (point.score - group.full_score):+.2f}",
                "against dial off": f"{100 * (point.score - row.on('test')[0].score):+.2f}",
                "cost": f"{point.cost:.3f}",
                "FLOPs ÷": "–" if is_oracle(row) else f"{1 / point.cost:.2f}",
                **time_columns(times),
                "products 32": of_products(times),
            }
        )
    return lines


def loss_summary(groups: Sequence[Group], methods: Collection[str], loss: float = 1.0) -> str:
    """One line per set and method: the cheapest dial that loses at most a point on the dev data, if there is one."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        for row in (row for row in group.methods if row.name in methods):
            point = group.within_loss(row, loss)
            clock = row.times(point.dial).get("32") if point else None
            lines.append(
                {
                    "set": f"{group.title} ({group.metric})",
                    "full model": f"{100 * group.full_score:.1f}",
                    "method": row.name,
                    "dial off": f"{100 * row.on('test')[0].score:.1f}",
                    "score": f"{100 * point.score:.1f}" if point else "–",
                    "cost": f"{point.cost:.2f}" if point else "–",
                    "× full": f"{clock.ratios[FULL]:.1f}" if clock else "–",
                    "× HF": f"{clock.ratios[HF]:.1f}" if clock else "–",
                }
            )
    return markdown_table(lines) if lines else NOT_MEASURED


def rationale_tables(groups: Sequence[Group]) -> str:
    """Average precision and false-positive rate of each source, at some layers."""
    parts = []
    for row in (row for group in groups for row in group.methods if row.rationales):
        found = row.rationales
        assert found is not None
        parts.append(
            f"`{row.method}` at dial {found['dial']:g}, {found['texts'] - found['left_out']} texts; "
            f"{found['marked']:.0%} of their words within the length limit are marked."
        )
        for measure, name in (
            ("average_precision", "average precision"), ("false_positive_rate", "false-positive rate"),
        ):  # fmt: skip
            curves = {source: curve[measure] for source, curve in found["curves"].items() if None not in curve[measure]}
            layers = range(0, max(map(len, curves.values())), 2)
            lines = [
                {name: source, **{f"layer {layer + 1}": f"{curve[layer]:.2f}" for layer in layers}}
                for source, curve in curves.items()
            ]
            parts.append(markdown_table(lines))
    return "\n\n".join(parts) or NOT_MEASURED
