"""`stretto compare SUITE.yaml`: every row of a suite on every set, trained or loaded, measured, and compared.

Each row is written to the results as soon as it is finished, and a killed run resumes. Times are measured separately
(`clock`), on an idle machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.bench.clock import TimedSet, with_clocks
from stretto.bench.plan import plan_clocks, plan_rows
from stretto.bench.results import Results, Row
from stretto.bench.rows import Bench, Places, plain
from stretto.bench.suite import FULL_ROW, Suite
from stretto.bench.summary import compared, write_report
from stretto.errors import StrettoError
from stretto.saving.files import write_text

FILTERS = ("set", "method", "seed")


@dataclass(frozen=True)
class Only:
    """Which rows are wanted; an empty choice wants all."""

    choices: dict[str, frozenset[str]]

    @classmethod
    def read(cls, text: str | None) -> Only:
        """'set=trec,set=sst2,method=deebert,seed=42'."""
        choices: dict[str, set[str]] = {name: set() for name in FILTERS}
        for part in (text or "").split(",") if text else []:
            name, equals, value = part.strip().partition("=")
            if not equals or not value or name not in choices:
                raise StrettoError(
                    f"Expected --only with parts such as set=trec, method=deebert or seed=42, got '{part}'. "
                    "Separate several by commas."
                )
            choices[name].add(value)
        return cls({name: frozenset(values) for name, values in choices.items()})

    def wants(self, name: str, value: object) -> bool:
        return not self.choices[name] or str(value) in self.choices[name]


@dataclass(frozen=True)
class Comparison:
    """A suite and where it is run."""

    suite: Suite
    places: Places
    results_file: Path
    only: Only
    model: str | None = None
    """An encoder instead of the suite's."""
    say: Callable[[str], object] = print

    @cached_property
    def results(self) -> Results:
        return Results.start(self.suite.name, self.results_file)

    def check(self) -> None:
        """Refuse choices that choose nothing."""
        known = {
            "set": set(self.suite.sets),
            "method": {*self.suite.recipes, *self.suite.baselines},
            "seed": set(map(str, self.suite.seeds)),
        }
        for name, values in self.only.choices.items():
            if unknown := sorted(values - known[name]):
                raise StrettoError(
                    f"Expected {name} among {', '.join(sorted(known[name]))}; got {', '.join(unknown)}. "
                    "Name those of the suite."
                )

    def benches(self) -> Iterator[Bench]:
        """Seed by seed, so that every set has its first rows early."""
        for seed in self.suite.seeds:
            for name, spec in self.suite.sets.items():
                if self.only.wants("set", name) and self.only.wants("seed", seed) and seed in (spec.seeds or [seed]):
                    model = self.model or spec.model or self.suite.model
                    yield Bench(self.suite, self.places, name, seed, model)

    def rows(self, bench: Bench) -> list[str]:
        """The rows of a set, baselines after the full model they need; and what the wanted ones start from."""
        names = self.suite.rows_on(bench.spec, bench.seed, Path(bench.model).name)
        wanted = [name for name in names if self.only.wants("method", name)]
        for name in wanted:  # it grows during the loop
            recipe = bench.recipe(name)
            wanted += [n for n in (recipe.start, recipe.weights_of) if n is not None and n not in wanted]
        baselines = [name for name in self.suite.baselines if self.only.wants("method", name)]
        if baselines and FULL_ROW not in wanted:
            wanted.append(FULL_ROW)
        ordered = [name for name in names if name in wanted]
        after_full = ordered.index(FULL_ROW) + 1 if FULL_ROW in ordered else 0
        return [*ordered[:after_full], *baselines, *ordered[after_full:]]

    def missing(self, bench: Bench) -> list[str]:
        """The rows that are not in the results. Those that are must be of the same recipe."""
        todo = []
        for name in self.rows(bench):
            row = self.row(bench, name)
            if row is None:
                todo.append(name)
            elif name in self.suite.recipes and row.settings != plain(bench.recipe(name).settings):
                raise StrettoError(
                    f"Expected {name} on {bench.set} with the settings of '{self.results_file}' ({row.settings}), got "
                    f"{bench.recipe(name).settings}. Choose another --output, or delete that row."
                )
        return todo

    def row(self, bench: Bench, name: str) -> Row | None:
        return self.results.get(bench.set, Path(bench.model).name, name, bench.seed)

    def plan(self) -> list[dict[str, Any]]:
        return plan_rows([(bench, self.missing(bench)) for bench in self.benches()])

    def run(self) -> None:
        """Train and measure what is missing."""
        for bench in self.benches():
            for name in self.missing(bench):
                self.say(f"{bench.set}, {bench.model}, seed {bench.seed}: {name}")
                if name in self.suite.baselines:
                    row = bench.baseline(name)
                else:
                    row, answers = bench.make(name)
                    self.keep_answers(row, answers)
                self.results.put(row)
                self.report()

    def timed_sets(self) -> Iterator[TimedSet]:
        """What has been trained, to be timed."""
        for bench in self.benches():
            rows = {name: row for name in self.rows(bench) if (row := self.row(bench, name)) is not None}
            if rows:
                yield TimedSet(bench, rows)

    def plan_clock(self, retime: bool = False) -> list[dict[str, Any]]:
        return plan_clocks([(timed, self.untimed(timed, retime)) for timed in self.timed_sets()])

    def untimed(self, timed: TimedSet, retime: bool) -> list[tuple[int, bool]]:
        return [each for each in timed.passes if retime or not timed.is_done(*each)]

    def clock(self, retime: bool = False) -> None:
        """Time what has been trained, and not been timed yet (`retime`: all)."""
        for timed in self.timed_sets():
            bench = timed.bench
            for size, stream in self.untimed(timed, retime):
                how = f"a stream of batches of {size}" if stream else f"batches of {size}"
                self.say(f"{bench.set}, {bench.model}, seed {bench.seed}: timing {how}")
                found = timed.time(size, stream)
                for name in timed.rows:
                    row = self.row(bench, name)
                    assert row is not None
                    self.results.replace(with_clocks(row, size, stream, found[name]))
                self.results.write()
            self.report()

    # ---- reports

    def answers_file(self, row: Row) -> Path:
        return self.places.work / "answers" / f"{row.set}-{row.model}-{row.seed}-{row.name}.json"

    def keep_answers(self, row: Row, answers: dict[str, Any]) -> None:
        path = self.answers_file(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(answers))

    def report(self) -> None:
        """Bring the comparison in the results, the table and the page up to date."""
        answers = {}
        for row in self.results.rows:
            path = self.answers_file(row)
            if path.exists():
                answers[row.key] = json.loads(path.read_text(encoding="utf-8"))
        self.results.comparison = compared(self.results.rows, answers)
        self.results.write()
        write_report(self.suite, self.results, answers, self.texts, self.places.work)

    def texts(self, name: str, seed: int) -> list[str]:
        """The test inputs of a set, in order."""
        if (name, seed) not in self._texts:
            bench = Bench(self.suite, self.places, name, seed, self.suite.sets[name].model or self.suite.model)
            inputs = bench.parts["test"].texts
            self._texts[name, seed] = [" | ".join(parts) if len(parts) < 3 else " ".join(parts) for parts in inputs]
        return self._texts[name, seed]

    @cached_property
    def _texts(self) -> dict[tuple[str, int], list[str]]:
        return {}
