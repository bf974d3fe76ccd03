"""The generated parts of the documentation: tables from results, tables from the code, plots.

A block of a page stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; `blocks` says what goes into it. Rows
that have not been measured yet are left out or shown as a dash.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stretto.bench.report import depths, drops, engine, exits, guarantees, registry, server, texts
from stretto.bench.report.groups import groups_of
from stretto.bench.report.plots import Panels, curve_panels, digest, draw, drawn_digest, exit_panels
from stretto.bench.results import Row, load_all
from stretto.bench.suite import Suite
from stretto.errors import StrettoError
from stretto.saving.files import write_text
from stretto.training.plan import DEFAULTS
from stretto.training.pretraining import DEFAULTS as PRETRAINING_DEFAULTS

MARKED = re.compile(r"(<!-- ([\w-]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


class Pages:
    """The documentation of a checkout: README.md, docs/*.md and docs/images."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.results = load_all(root / "benchmarks" / "results")
        self.pages = [path for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if path.exists()]
        if not self.pages:
            raise StrettoError(f"Expected README.md or docs/*.md in '{root}', got none. Name the root of a checkout.")

    def rows(self, suite: str) -> list[Row]:
        return self.results[suite].rows if suite in self.results else []

    def blocks(self) -> dict[str, Callable[[], str]]:
        of_exits, of_drops, of_depths = (groups_of(self.rows(suite)) for suite in ("exits", "drops", "depths"))
        of_engine = self.rows("engine")
        suites = self.root / "benchmarks" / "suites"
        return {
            "results": partial(exits.summary_table, of_exits),
            "gains": partial(exits.gains_table, of_exits),
            "sets": partial(exits.set_tables, of_exits),
            "cheapest": partial(exits.cheapest_table, of_exits),
            "tracking": partial(exits.tracking_note, of_exits),
            "drops": partial(drops.drop_tables, of_drops),
            "drops-summary": partial(drops.loss_summary, of_drops, ("length_adaptive", "adapler", "power_bert")),
            "rationales": partial(drops.rationale_tables, of_drops),
            "depths": partial(depths.depth_tables, of_depths),
            "depths-summary": partial(drops.loss_summary, [g for g in of_depths if g.any.seed == 42], depths.METHODS),
            "combinations": partial(drops.drop_tables, groups_of(self.rows("combinations"))),
            "pretraining": partial(depths.pretraining_tables, groups_of(self.rows("pretraining"), with_full=False)),
            "engine": partial(engine.summary_table, of_engine),
            "engine-cells": partial(engine.cell_table, of_engine),
            "decoder": partial(texts.speed_table, self.rows("decoder")),
            "translation": partial(texts.score_table, self.rows("translation")),
            "guarantee": partial(guarantees.study_table, self.rows("guarantee")),
            "server": partial(server.summary_table, self.rows("server")),
            "server-loads": partial(server.load_table, self.rows("server")),
            "recipes": lambda: registry.recipe_table(Suite.load(suites / "exits.yaml")),
            "methods": registry.method_table,
            "method-sections": registry.method_sections,
            "defaults": partial(registry.defaults_table, DEFAULTS),
            "pretraining-defaults": partial(registry.defaults_table, PRETRAINING_DEFAULTS),
            "backbones": registry.backbone_table,
        }

    def plots(self) -> dict[str, tuple[Panels, Callable[[Panels, Path], None]]]:
        """By file in docs/images: what is drawn, and who draws it."""
        return {
            "pareto.png": (exit_panels(groups_of(self.rows("exits"))), draw),
            "drops.png": (curve_panels(groups_of(self.rows("drops"))), draw),
            "depths.png": (curve_panels(groups_of(self.rows("depths"))), draw),
            "guarantee.png": (guarantees.study_panels(self.rows("guarantee")), guarantees.draw_studies),
        }

    def rewritten(self, text: str) -> str:
        """A page with all its blocks as they should be."""
        blocks = self.blocks()

        def filled(match: re.Match[str]) -> str:
            if match[2] not in blocks:
                raise StrettoError(
                    f"Expected a block called {', '.join(blocks)}; got '{match[2]}'. Correct its marks in the page."
                )
            return f"{match[1]}\n{blocks[match[2]]()}\n\n{match[3]}"

        return MARKED.sub(filled, text)

    def stale(self, *, write: bool = False) -> list[Path]:
        """The files that are out of date; with `write` they are brought up to date."""
        stale = []
        for page in self.pages:
            text = page.read_text(encoding="utf-8")
            wanted = self.rewritten(text)
            if wanted != text:
                stale.append(page)
                if write:
                    write_text(page, wanted)
        for name, (drawn, drawer) in self.plots().items():
            path = self.root / "docs" / "images" / name
            if drawn and drawn_digest(path) != digest(drawn):
                stale.append(path)
                if write:
                    drawer(drawn, path)
        return stale
