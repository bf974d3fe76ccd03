"""Apply each mutant to a copy of the source and run the tests that should notice it (`make mutants`; about an hour).

Not part of the tests. The lists are *.yaml; the result is summary.json beside this file: killed (a test failed),
timeout (the tests did not end in time), not run (no test was chosen) or survived. It is written after every mutant.
Mutants whose file and tests have not changed since are not run again (--all: start afresh). Exits 1 if a mutant
survived that the list does not explain.

Tests run in children of this process, which has loaded torch and transformers already but no module of stretto. The
mutants of one list of tests share a child that has loaded those (`swap.py`).
"""

from __future__ import annotations

import argparse
import compileall
import fcntl
import hashlib
import importlib
import json
import os
import py_compile
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).parent)]

from listed import ROOT, SUMMARY, Mutant, mutants  # noqa: E402
from swap import swap  # noqa: E402

#: Loaded once, not by every child.
PRELOADED = (
    "accelerate", "datasets", "hypothesis", "scipy.stats", "seqeval.metrics.sequence_labeling", "sklearn.metrics",
    "transformers.models.bert.modeling_bert", "transformers.trainer", "typer.testing", "mapie.risk_control",
)  # fmt: skip
#: Hypothesis has been loaded before pytest could rewrite it.
OPTIONS = ("-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
#: Seconds of processor time, and of any time, after which the tests of a mutant are stopped.
LONGEST, LONGEST_WAIT = 150, 1500


class FirstFailure:
    """Writes the name of the first test that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(report.nodeid, encoding="utf-8")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(f"{report.nodeid} (collection)", encoding="utf-8")


class Several(FirstFailure):
    """Loads and collects tests once. Runs them in a child without a mutant, and, if they pass, in one for each mutant,
    whose code is exchanged there."""

    def __init__(self, path: Path, group: Sequence[Mutant], source: Path, listed: Sequence[Mutant]) -> None:
        super().__init__(path)
        self.group, self.source, self.listed = group, source, listed

    def pytest_runtestloop(self, session: Any) -> bool | None:
        for mutant in (None, *self.group):
            began = time.monotonic()
            self.path.unlink(missing_ok=True)
            if (child := os.fork()) == 0:
                resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
                if mutant is None or swap(mutant, self.source):
                    return None  # the tests run
                os._exit(0)
            outcome, failed = outcome_of(child, self.path)
            if mutant is None and outcome != "passed":
                raise session.Failed(f"{outcome} without a mutant")
            if mutant is not None and outcome in ("failed", "timeout"):
                row = row_of(mutant, outcome, failed, began, digest_of(mutant, self.source.parent))
                write(self.listed, {mutant.key: row})
        self.path.unlink(missing_ok=True)
        return True


def in_child(source: Path, tests: Sequence[str], log: Path, plugin: FirstFailure) -> tuple[str, str]:
    """Run tests on a source folder: 'passed', 'failed', 'timeout' or 'not run', and the first test that failed."""
    plugin.path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setpgid(0, 0)
            if not isinstance(plugin, Several):
                resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
            stream = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for number in (1, 2):
                os.dup2(stream, number)
            os.chdir(source.parent)
            sys.path[:0] = [str(source)]
            os.environ["PYTHONPATH"] = str(source)
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some take seconds to load
            code = int(pytest.main([*OPTIONS, *tests], plugins=[plugin]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    outcome, failed = outcome_of(child, plugin.path)
    if outcome == "not run":
        failed = " ".join(log.read_text(encoding="utf-8")[-300:].split())
    return outcome, failed


def outcome_of(child: int, failure: Path) -> tuple[str, str]:
    """How a child ended that runs tests."""
    until = time.monotonic() + LONGEST_WAIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(ended[1])
    if code <= 0:
        return "passed" if code == 0 else "timeout", ""
    if failure.exists():
        return "failed", failure.read_text(encoding="utf-8")
    return "not run", ""  # no test was chosen, or pytest itself failed


def digest_of(mutant: Mutant, root: Path) -> str:
    """What a result depends on: the mutant, its file, its tests."""
    files = [root / argument.partition("::")[0] for argument in mutant.tests]
    texts = [mutant.apply(root / "src"), *mutant.tests]
    for path in files:
        some = sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.is_file() else []
        texts += [file.read_text(encoding="utf-8") for file in some]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def try_out(mutant: Mutant, source: Path, place: Path) -> dict[str, Any]:
    """Apply a mutant to the copy, run its tests on a fresh import, restore the copy."""
    path, digest = source / "stretto" / mutant.file, digest_of(mutant, source.parent)
    before, changed = path.read_text(encoding="utf-8"), mutant.apply(source)
    began = time.monotonic()
    path.write_text(changed, encoding="utf-8")
    try:
        outcome, failed = in_child(source, mutant.tests, place / "mutant.log", FirstFailure(place / "failed"))
    finally:
        path.write_text(before, encoding="utf-8")
    return row_of(mutant, outcome, failed, began, digest)


def row_of(mutant: Mutant, outcome: str, failed: str, began: float, digest: str) -> dict[str, Any]:
    result = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
    return {
        "mutant": mutant.key,
        "result": result,
        **({"by": failed} if failed else {}),
        **({"explained": mutant.explained} if result == "survived" and mutant.explained else {}),
        "seconds": round(time.monotonic() - began, 1),
        "digest": digest,
    }


def is_known(mutant: Mutant, root: Path) -> bool:
    return known().get(mutant.key, {}).get("digest") == digest_of(mutant, root)


def known() -> dict[str, dict[str, Any]]:
    """The rows of the summary."""
    if not SUMMARY.exists():
        return {}
    return {row["mutant"]: row for row in json.loads(SUMMARY.read_text(encoding="utf-8"))["mutants"]}


def write(listed: Sequence[Mutant], new: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add rows to the summary, in the order of the list; several processes may do so."""
    folder = os.open(SUMMARY.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        found = {**known(), **new}
        rows = {mutant.key: found[mutant.key] for mutant in listed if mutant.key in found}
        counts = json.dumps(Counter(row["result"] for row in rows.values()))
        lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows.values())
        unfinished = SUMMARY.with_suffix(".part")
        unfinished.write_text(f'{{"counts": {counts},\n "mutants": [\n  {lines}\n]}}\n', encoding="utf-8")
        unfinished.replace(SUMMARY)
    finally:
        os.close(folder)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=[""], help="mutants whose file or name contains one of these")
    parser.add_argument("--all", action="store_true", help="forget the summary: run also those that have not changed")
    options = parser.parse_args()
    if options.all:
        SUMMARY.unlink(missing_ok=True)
    listed = mutants()
    wanted = [mutant for mutant in listed if any(part in mutant.key for part in options.only)]
    wanted = [mutant for mutant in wanted if not is_known(mutant, ROOT)]
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in wanted:
        groups.setdefault(mutant.tests, []).append(mutant)
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        importlib.import_module(name)
    failing = []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(wanted), unit="mutant") as bar:
        place, source = Path(folder), Path(folder) / "src"
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy(ROOT / "pyproject.toml", place)
        # by content: a mutant may have the size and the second of the file before
        compileall.compile_dir(source, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        for tests, group in groups.items():
            bar.set_description(group[0].file)
            plugin = Several(place / "failed", group, source, listed)
            outcome, failed = in_child(source, tests, place / "several.log", plugin)
            if outcome == "passed":
                for mutant in [each for each in group if not is_known(each, place)]:
                    write(listed, {mutant.key: try_out(mutant, source, place)})
            else:  # they tell nothing of a mutant
                failing.append(f"{' '.join(tests)} ({outcome}: {failed})")
            bar.update(len(group))
    rows = write(listed, {})
    print(f"{len(rows)} of {len(listed)} mutants: {dict(Counter(row['result'] for row in rows.values()))}")
    unexplained = [key for key, row in rows.items() if row["result"] == "survived" and not row.get("explained")]
    if unexplained or failing:
        sys.exit(f"Survived, and not explained: {unexplained or 'none'}. Tests that fail: {failing or 'none'}.")


if __name__ == "__main__":
    main()
