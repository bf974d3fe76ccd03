"""Writes what the documentation says in figures: tables from benchmarks/results, tables from the registry, the plot.

    python benchmarks/report.py            # write every generated block and the plots in docs/images
    python benchmarks/report.py --check    # write nothing; exit 1 if anything is out of date

A block stands in a page between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; `BLOCKS` says who writes it. Rows that
have not been measured yet are left out or shown as a dash, so the script can run at any time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from depth_results import depth_summary, depth_tables, pretraining_tables
from drop_results import drop_summary, drop_tables, rationale_tables
from exit_results import BATCHES, Row, cheapest_table, readme_results, set_tables, tracking_note
from exits import RECIPES, static_recipes
from names import RESULTS
from pareto import depth_panels, digest, draw, drawn_digest, drop_panels, exit_panels

from stretto.backbones import BACKBONES
from stretto.bench.report import Target, engine_targets
from stretto.cli.describe import describe, flag
from stretto.methods import METHODS, Shape
from stretto.tasks import Classification
from stretto.training.plan import DEFAULTS
from stretto.training.pretraining import DEFAULTS as PRETRAINING_DEFAULTS
from stretto.view.tables import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PLOTS = {"pareto.png": exit_panels, "drops.png": drop_panels, "depths.png": depth_panels}  # in docs/images
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md")


# ---- the engine benchmark ----------------------------------------------------------------------------------


def load_engine() -> dict[str, Any] | None:
    path = RESULTS / "engine.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def target_table() -> str:
    """What was asked of the engine and what was measured, a column per batch size."""
    engine = load_engine()
    if engine is None:
        return "Not measured yet."
    rows: dict[str, Row] = {}
    for target in engine_targets(engine):
        row = rows.setdefault(target.name, {"": target.name, **{f"batch {size}": "" for size in BATCHES}})
        row[f"batch {target.batch}"] = told(target)
    return f"{markdown_table(list(rows.values()))}\n\n{engine_facts(engine)}"


def told(target: Target) -> str:
    if target.measured is None:
        return "not measured"
    if target.wanted is None:
        return f"{target.measured:.2f}"
    return f"{target.measured:.2f} ({target.bound} {target.wanted:g}: {target.verdict})"


def engine_facts(engine: dict[str, Any]) -> str:
    made = ", ".join(f"{name} {version}" for name, version in engine["versions"].items() if version)
    return (
        f"BERT-base shape, AG-News-like lengths, medians of {engine['rounds']} interleaved rounds, "
        f"{engine['threads']} threads, {engine['cpu']}; {made}."
    )


def engine_table() -> str:
    """A row per shape, mix, batch and dtype; every cell is in the JSON."""
    engine = load_engine()
    if engine is None:
        return "Not measured yet."
    rows: list[Row] = []
    for group in engine["groups"]:
        cells = {cell["contender"]: cell for cell in group["cells"]}
        against = cells["full"]["vs"]
        tracked = {name: cell["tracking"] for name, cell in cells.items() if cell["tracking"] is not None}
        rows.append(
            {
                **{name: group[name] for name in ("shape", "mix", "batch", "dtype")},
                "full × HF padded": against.get("hf_padded"),
                "× HF sorted": against.get("hf_sorted"),
                "× ONNX Runtime": against.get("onnx"),
                "time / GEMM limit": 1 / against["gemm"] if "gemm" in against else None,
                "tracking: exit": tracked.get("exit"),
                **{f"drop {n}×": tracked.get(f"drop_{n}x") for n in (2, 4, 10)},
            }
        )
    return markdown_table(rows, dict.fromkeys(rows[0], ".2f") if rows else None)


# ---- the registry ------------------------------------------------------------------------------------------


def stages_of(method: Any) -> list[Any]:
    return method(method.Config(), Shape(d=8, n_layers=12, n_labels=2), Classification(["no", "yes"])).stages()


def method_table() -> str:
    rows = []
    for method in METHODS.values():
        told = describe(method)
        rows.append(
            {
                "method": f"`{told['name']}`",
                "in a line": told["summary"],
                "dial (off)": f"{told['dial']['name']} ({told['dial']['off']})",
                "stages": " → ".join(stage.name for stage in stages_of(method)),
                "tasks": ", ".join(told["tasks"]),
            }
        )
    return markdown_table(rows)


def method_sections() -> str:
    """Every method in the words of its own file, with its stages and settings."""
    parts = []
    for method in METHODS.values():
        told = describe(method)
        stages = [
            f"{stage.name} ({stage.epochs:g} epochs{'' if stage.trains_backbone else ', backbone frozen'})"
            for stage in stages_of(method)
        ]
        settings = [
            {"flag": f"`{flag(setting)}`", "default": str(setting["default"]), "what it does": setting["help"]}
            for setting in told["settings"]
        ]
        parts += [f"### {told['name']}", told["doc"], f"Stages: {' → '.join(stages)}.", markdown_table(settings)]
    return "\n\n".join(parts)


def recipe_table() -> str:
    """What each row of benchmarks/exits.py starts from and trains."""
    rows: list[Row] = []
    for key, (start, skip, settings) in {**RECIPES, **static_recipes(12)}.items():
        trained = [stage.name for stage in stages_of(METHODS[key.split("-")[0]]) if stage.name not in skip]
        rows.append(
            {
                "row": key,
                "starts from": start,
                "stages of its own": " → ".join(trained) or "none",
                "settings": ", ".join(f"{name} {value}" for name, value in settings.items()),
            }
        )
    return markdown_table(rows)


def defaults_table(ours: dict[str, Any]) -> str:
    """Our defaults where they are not those of `TrainingArguments`."""
    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    rows = [
        {"setting": f"`{name}`", "here": plain(value), "Hugging Face": plain(theirs[name])}
        for name, value in ours.items()
        if plain(value) != plain(theirs[name])
    ]
    return markdown_table(rows)


def plain(value: Any) -> str:
    return str(getattr(value, "value", value))  # an enumeration's value


def backbone_table() -> str:
    files: dict[str, list[str]] = {}
    for name, cls in BACKBONES.items():
        files.setdefault(cls.__module__.rpartition(".")[2], []).append(f"`{name}`")
    return markdown_table(
        [
            {"`model_type`": ", ".join(names), "file": f"`src/stretto/backbones/{file}.py`"}
            for file, names in files.items()
        ]
    )


# ---- pages -------------------------------------------------------------------------------------------------

BLOCKS: dict[str, Callable[[], str]] = {
    "results": readme_results,
    "sets": set_tables,
    "drops": drop_tables,
    "drops-summary": drop_summary,
    "rationales": rationale_tables,
    "depths": depth_tables,
    "depths-summary": depth_summary,
    "pretraining": pretraining_tables,
    "recipes": recipe_table,
    "cheapest": cheapest_table,
    "tracking": tracking_note,
    "engine": target_table,
    "engine-cells": engine_table,
    "methods": method_table,
    "method-sections": method_sections,
    "defaults": partial(defaults_table, DEFAULTS),
    "pretraining-defaults": partial(defaults_table, PRETRAINING_DEFAULTS),
    "backbones": backbone_table,
}
MARKED = re.compile(r"(<!-- ([\w-]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """A page with all its blocks as they should be."""
    return MARKED.sub(lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n\n{match[3]}", text)


def stale_files(*, write: bool = False) -> list[Path]:
    """The files that are out of date; with `write` they are brought up to date."""
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wanted = rewritten(text)
        if wanted != text:
            stale.append(page)
            if write:
                page.write_text(wanted, encoding="utf-8")
    for name, panels in PLOTS.items():
        path, drawn = ROOT / "docs" / "images" / name, panels()
        if drawn and drawn_digest(path) != digest(drawn):
            stale.append(path)
            if write:
                draw(drawn, path)
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is out of date")
    check = parser.parse_args().check
    stale = stale_files(write=not check)
    for path in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
    if check and stale:
        sys.exit("Run: python benchmarks/report.py")


if __name__ == "__main__":
    main()
