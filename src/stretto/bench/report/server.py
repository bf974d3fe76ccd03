"""Tables of `stretto bench server`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.bench.report.groups import NOT_MEASURED
from stretto.bench.results import Load, Row
from stretto.view.tables import markdown_table

LABELS = {
    "stretto": "stretto", "wait_for_batch": "stretto, wait for the batch", "stretto_int8": "stretto, int8",
    "huggingface": "FastAPI + Hugging Face", "onnx_int8": "FastAPI + ONNX Runtime, int8",
}  # fmt: skip


def load_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line per server and load."""
    return [
        {
            "data": row.set,
            "server": LABELS[row.name],
            "load": load.name,
            "requests/s": "" if load.rate is None else f"{load.rate:.0f}",
            "answers/s": f"{load.throughput:.1f}",
            "p50 ms": number(load.p50_ms),
            "p95 ms": number(load.p95_ms),
            "p99 ms": number(load.p99_ms),
            "answered": percent(load.answered, load.offered),
            "refused": load.refused,
            "lost": load.lost,
            "wrong": load.wrong,
            "MB": f"{load.memory_mb:.0f}",
        }
        for row in rows
        for load in row.load
    ]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def load_table(rows: Sequence[Row]) -> str:
    return markdown_table(load_rows(rows)) if rows else NOT_MEASURED


def summary_table(rows: Sequence[Row]) -> str:
    """What the scheduling gains, what the server gains, and what an overload does; a column for each kind of texts."""
    if not rows:
        return NOT_MEASURED
    lines: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row.set for row in rows):
        found = {row.name: row for row in rows if row.set == name}
        for question, answer in answers(found):
            lines.setdefault(question, {"": question})[name] = answer
    return f"{markdown_table(list(lines.values()))}\n\n{facts(rows)}"


def answers(found: dict[str, Row]) -> list[tuple[str, str]]:
    """Questions and figures, for the servers of one kind of texts."""
    lines = []
    ours, waits, int8 = (found.get(name) for name in ("stretto", "wait_for_batch", "stretto_int8"))
    for share in ("50 %", "80 %", "120 %"):
        if ours and waits:
            a, b = at(ours, share), at(waits, share)
            for quantile in ("p50_ms", "p95_ms"):
                latency = getattr(a, quantile) / getattr(b, quantile)
                name = f"{quantile[:3]} at {share} load ÷ that of waiting for the batch"
                lines.append((name, f"{latency:.2f}"))
    for name, mine in (("huggingface", ours), ("huggingface", int8), ("onnx_int8", int8)):
        if mine and name in found:
            gain = at(mine, "capacity").throughput / at(found[name], "capacity").throughput
            lines.append((f"capacity of {LABELS[mine.name]} ÷ that of {LABELS[name]}", f"{gain:.1f}"))
    lines += [
        (f"score of {LABELS[name]}", f"{100 * row.points[0].score:.1f}")
        for name, row in found.items()
        if row.points and name != "wait_for_batch"
    ]
    if ours:
        burst = at(ours, "burst")
        lines += [
            ("10× overload: wrong answers; accepted, but not answered", f"{burst.wrong}; {burst.unanswered}"),
            ("10× overload: refused, p99 of the time it took", f"{burst.refused}, {number(burst.refusal_p99_ms)} ms"),
            ("memory at 80 % load, at 10× overload", f"{at(ours, '80 %').memory_mb:.0f}, {burst.memory_mb:.0f} MB"),
        ]
        for load in ours.load:
            if load.name == "malformed":
                lines.append(("malformed requests, refused", f"{load.offered}, {load.refused}"))
    return lines


def at(row: Row, name: str) -> Load:
    return next(load for load in row.load if load.name == name)


def facts(rows: Sequence[Row]) -> str:
    row = rows[0]
    made = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    return (
        f"{row.settings['seconds']:g} s per load, each server on {row.settings['threads']} core of {row.machine}, the "
        f"client on another; {made}."
    )
