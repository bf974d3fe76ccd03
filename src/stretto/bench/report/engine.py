"""Tables of `stretto bench engine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.bench.report.groups import NOT_MEASURED
from stretto.bench.results import HF, HF_SORTED, ONNX, Clock, Row
from stretto.view.tables import markdown_table

GEMM = "gemm"
SHAPE, MIX = "bert-base", "ag_news"
BATCHES = (1, 8, 32)


def engine_table(rows: Sequence[Row]) -> list[dict[str, str]]:
    """One line per measured cell, ready to print. × columns: how many times faster than that baseline."""
    lines = []
    for row, clock in timings(rows):
        lines.append(
            {
                "shape": row.model,
                "mix": row.set,
                "batch": str(clock.batch),
                "dtype": clock.dtype,
                "contender": row.name,
                "FLOPs ÷": f"{clock.flops_ratio:.2f}",
                "ms/text": number(clock.ms_per_text),
                "spread": f"{number(clock.fastest_ms)}–{number(clock.slowest_ms)}",
                "× HF padded": number(clock.ratios.get(HF)),
                "× HF sorted": number(clock.ratios.get(HF_SORTED)),
                "× ONNX Runtime": number(clock.ratios.get(ONNX)),
                "GEMM limit": number(clock.ratios.get(GEMM)),
                "tracking": number(tracking(row, clock)),
            }
        )
    return lines


def timings(rows: Sequence[Row]) -> list[tuple[Row, Clock]]:
    return [(row, clock) for row in rows for clock in row.clock]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def tracking(row: Row, clock: Clock) -> float | None:
    """Only a scripted run saves FLOPs."""
    return clock.tracking if row.name == "exit" or row.name.startswith("drop_") else None


def cells(rows: Sequence[Row]) -> dict[tuple[str, str, int, str], dict[str, tuple[Row, Clock]]]:
    """(shape, mix, batch, dtype) -> {contender: its row and clock}, in the order of measuring."""
    found: dict[tuple[str, str, int, str], dict[str, tuple[Row, Clock]]] = {}
    for row, clock in timings(rows):
        found.setdefault((row.model, row.set, clock.batch, clock.dtype), {})[row.name] = (row, clock)
    return found


def summary_table(rows: Sequence[Row]) -> str:
    """BERT-base on AG News lengths, a column per batch size."""
    measured = cells(rows)
    questions = (
        ("full model, float32: × Hugging Face padded", "float32", "full", lambda c: c.ratios.get(HF)),
        ("full model, float32: × Hugging Face sorted by length", "float32", "full", lambda c: c.ratios.get(HF_SORTED)),
        ("full model, float32: time ÷ that of its matrix products alone", "float32", "full", over_limit),
        ("full model, int8: × ONNX Runtime int8", "int8", "full", lambda c: c.ratios.get(ONNX)),
        ("tracking: half of the sequences exit", "float32", "exit", lambda c: c.tracking),
        *(
            (f"tracking: tokens dropped, FLOPs ÷ {n}", "float32", f"drop_{n}x", lambda c: c.tracking)
            for n in (2, 4, 10)
        ),
    )
    lines = []
    for name, dtype, contender, ask in questions:
        line: dict[str, Any] = {"": name}
        for batch in BATCHES:
            found = measured.get((SHAPE, MIX, batch, dtype), {}).get(contender)
            line[f"batch {batch}"] = number(ask(found[1])) if found else ""
        lines.append(line)
    if not any((SHAPE, MIX, batch, "float32") in measured for batch in BATCHES):
        return NOT_MEASURED
    return f"{markdown_table(lines)}\n\n{facts(rows)}"


def over_limit(clock: Clock) -> float | None:
    return 1 / clock.ratios[GEMM] if GEMM in clock.ratios else None


def facts(rows: Sequence[Row]) -> str:
    row = next(row for row in rows if (row.model, row.set) == (SHAPE, MIX))
    clock = row.clock[0]
    made = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    return (
        f"BERT-base shape, AG-News-like lengths, medians of {clock.rounds} interleaved rounds, {clock.threads} "
        f"threads, {clock.cpu}; {made}."
    )


def cell_table(rows: Sequence[Row]) -> str:
    """A line per shape, mix, batch and dtype; everything else is in the JSON."""
    lines: list[dict[str, Any]] = []
    for (shape, mix, batch, dtype), found in cells(rows).items():
        against = found["full"][1].ratios
        tracked = {name: tracking(*cell) for name, cell in found.items()}
        lines.append(
            {
                "shape": shape,
                "mix": mix,
                "batch": batch,
                "dtype": dtype,
                "full × HF padded": against.get(HF),
                "× HF sorted": against.get(HF_SORTED),
                "× ONNX Runtime": against.get(ONNX),
                "time / GEMM limit": 1 / against[GEMM] if GEMM in against else None,
                "tracking: exit": tracked.get("exit"),
                **{f"drop {n}×": tracked.get(f"drop_{n}x") for n in (2, 4, 10)},
            }
        )
    return markdown_table(lines, dict.fromkeys(lines[0], ".2f")) if lines else NOT_MEASURED
