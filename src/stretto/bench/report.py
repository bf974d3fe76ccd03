"""From the results of `stretto bench engine` to a table, and to verdicts on the targets set for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Cell = dict[str, Any]
Question = Callable[[Cell], float | None]
Bound = Literal["≥", "≤"]

TARGET_SHAPE, TARGET_MIX = "bert-base", "ag_news"


def engine_table(results: dict[str, Any]) -> list[dict[str, str]]:
    """One row per measured cell, ready to print. × columns: how many times faster than that baseline."""
    rows = []
    for group in results["groups"]:
        texts = group["batch"] * group["batches"]
        for cell in group["cells"]:
            rows.append(
                {
                    "shape": group["shape"],
                    "mix": group["mix"],
                    "batch": str(group["batch"]),
                    "dtype": group["dtype"],
                    "contender": cell["contender"],
                    "FLOPs ÷": f"{cell['flops_ratio']:.2f}",
                    "ms/text": f"{1000 * cell['seconds'] / texts:.2f}",
                    "spread": f"{1000 * cell['fastest'] / texts:.2f}–{1000 * cell['slowest'] / texts:.2f}",
                    "× HF padded": ratio(cell["vs"].get("hf_padded")),
                    "× HF sorted": ratio(cell["vs"].get("hf_sorted")),
                    "× ONNX Runtime": ratio(cell["vs"].get("onnx")),
                    "GEMM limit": ratio(cell["vs"].get("gemm")),
                    "tracking": ratio(cell["tracking"]),
                }
            )
    return rows


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@dataclass(frozen=True)
class Target:
    """One demand on the engine (BERT-base, AG News lengths), and what was measured."""

    name: str
    batch: int
    bound: Bound
    wanted: float | None
    """None: only reported."""
    measured: float | None
    """None: not measured."""

    @property
    def missed_by(self) -> float | None:
        """0 if reached; else how far from it, as a fraction of what was wanted."""
        if self.wanted is None or self.measured is None:
            return None
        gap = self.wanted - self.measured if self.bound == "≥" else self.measured - self.wanted
        return max(gap / self.wanted, 0.0)

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        if self.missed_by is None:
            return "reported"
        return "reached" if self.missed_by == 0 else f"missed by {100 * self.missed_by:.1f} %"


def faster_than(baseline: str) -> Question:
    return lambda cell: cell["vs"].get(baseline)


def over_limit(cell: Cell) -> float | None:
    return 1 / cell["vs"]["gemm"] if "gemm" in cell["vs"] else None


def tracking(cell: Cell) -> float | None:
    return cell["tracking"]


#: name, dtype, contender, what is asked of its cell, bound, {batch: wanted}
TARGETS: tuple[tuple[str, str, str, Question, Bound, dict[int, float | None]], ...] = (
    ("full fp32 × HF padded", "float32", "full", faster_than("hf_padded"), "≥", {1: 1.2, 8: 1.25, 32: 1.45}),
    ("full fp32 × HF sorted", "float32", "full", faster_than("hf_sorted"), "≥", {8: 1.05, 32: 1.05}),
    ("tracking, exit", "float32", "exit", tracking, "≥", {1: 0.85, 8: 0.85, 32: 0.85}),
    ("tracking, drop 2×", "float32", "drop_2x", tracking, "≥", {1: None, 8: 0.75, 32: 0.85}),
    ("tracking, drop 4×", "float32", "drop_4x", tracking, "≥", {1: None, 8: 0.65, 32: 0.8}),
    ("tracking, drop 10×", "float32", "drop_10x", tracking, "≥", {1: None, 8: 0.5, 32: 0.7}),
    ("full fp32 time / GEMM limit", "float32", "full", over_limit, "≤", {1: 1.3, 8: 1.3, 32: 1.25}),
    ("full int8 × ONNX Runtime int8", "int8", "full", faster_than("onnx"), "≥", {1: 0.75, 8: 1.0, 32: 1.4}),
)  # fmt: skip


def engine_targets(results: dict[str, Any]) -> list[Target]:
    """Every target with what was measured for it."""
    found = {
        (group["batch"], group["dtype"], cell["contender"]): cell
        for group in results["groups"]
        if (group["shape"], group["mix"]) == (TARGET_SHAPE, TARGET_MIX)
        for cell in group["cells"]
    }
    targets = []
    for name, dtype, contender, ask, bound, wanted in TARGETS:
        for batch, value in wanted.items():
            cell = found.get((batch, dtype, contender))
            targets.append(Target(name, batch, bound, value, None if cell is None else ask(cell)))
    return targets
