"""Tables of models that write texts: `stretto bench decoder`, and the suite `translation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stretto.bench.report.groups import NOT_MEASURED
from stretto.bench.results import CT2, FULL, HF, Clock, Row
from stretto.view.tables import markdown_table


def decoder_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """One line per measured cell, ready to print. × columns: how many times faster than that baseline."""
    return [
        {
            "shape": row.model,
            "batch": str(clock.batch),
            "dtype": clock.dtype,
            "contender": row.name,
            "ms/token": f"{ms_per_token(clock):.3f}",
            "FLOPs ÷": f"{clock.flops_ratio:.2f}",
            "× full": f"{clock.ratios[FULL]:.2f}",
            "× HF": f"{clock.ratios[HF]:.2f}",
            "× CTranslate2": f"{clock.ratios[CT2]:.2f}" if CT2 in clock.ratios else "",
            "tracking": f"{clock.tracking:.2f}" if row.name.startswith("exit_") else "",
        }
        for row in rows
        for clock in row.clock
    ]


def ms_per_token(clock: Clock) -> float:
    return (clock.ms_per_text or 0) * clock.sequences / (clock.tokens or 1)


def speed_table(rows: Sequence[Row]) -> str:
    """A line per shape, dtype and batch: our decoder at full depth against others, and what scripted exits gain."""
    cells: dict[tuple[str, str, int], dict[str, Clock]] = {}
    for row in rows:
        for clock in row.clock:
            cells.setdefault((row.model, clock.dtype, clock.batch), {})[row.name] = clock
    lines: list[dict[str, Any]] = []
    for (shape, dtype, batch), found in sorted(cells.items(), key=lambda cell: (cell[0][0] != "opus-mt", cell[0])):
        full = found[FULL]
        line: dict[str, Any] = {
            "shape": shape, "dtype": dtype, "batch": batch, "ms per token": f"{ms_per_token(full):.2f}",
            "× `generate` (float32)": f"{full.ratios[HF]:.2f}",
            "× CTranslate2": f"{full.ratios[CT2]:.2f}" if CT2 in full.ratios else "–",
        }  # fmt: skip
        for name, clock in found.items():
            if name.startswith("exit_"):
                title = f"exit {name.removeprefix('exit_')} of 6: FLOPs ÷, × full, tracking"
                line[title] = f"{clock.flops_ratio:.2f}, {clock.ratios[FULL]:.2f}, {clock.tracking:.2f}"
        lines.append(line)
    if not lines:
        return NOT_MEASURED
    row = next(row for row in rows if row.clock)
    clock = row.clock[0]
    made = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    tokens = (clock.tokens or 0) // clock.sequences
    note = (
        f"Greedy, {tokens} new tokens each, medians of the ratios of {clock.rounds} interleaved rounds, "
        f"{clock.threads} threads, {clock.cpu}; {made}. Reproduce: `{row.command}`."
    )
    return f"{markdown_table(lines)}\n\n{note}"


def steps_of(row: Row) -> int:
    """Training steps of the row's own: of its model, or of its mechanism on the weights of another row."""
    epochs = row.settings.get("num_train_epochs", row.settings.get("exit_epochs", 0))
    return round(epochs * math.ceil((row.n_train or 0) / row.batch))


def score_table(rows: Sequence[Row]) -> str:
    """A line per row and dial, on the test data."""
    lines = [
        {
            "row": row.name,
            "steps": steps_of(row) or "–",
            "seed": row.seed,
            "decoder blocks": row.sizes.get("decoder_layers", ""),
            "dial": f"{point.dial:g}",
            "average exit": f"{point.metrics.get('average_exit', point.depth):.2f}",
            "BLEU": f"{100 * point.metrics['bleu']:.2f}",
            "chrF": f"{100 * point.metrics['chrf']:.2f}",
            "cost": f"{point.cost:.3f}",
            "MFLOPs per token": f"{point.metrics['mflops_per_token']:.2f}",
        }
        for row in rows
        for point in row.on("test")
    ]
    if not lines:
        return NOT_MEASURED
    row = rows[0]
    note = (
        f"{row.n_train} training and {row.n_test} test pairs; a step is {row.batch} pairs. Cost is a fraction of the "
        "same model with the dial off. Reproduce: `stretto compare benchmarks/suites/translation.yaml`."
    )
    return f"{markdown_table(lines)}\n\n{note}"
