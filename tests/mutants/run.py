"""Apply each mutant to a copy of the source and run the tests that should notice it (`make mutants`; about an hour).

Not part of the tests. The lists are *.yaml; the result is summary.json beside this file: killed (a test failed),
timeout (the tests did not end in time), not run (no test was chosen) or survived. It is written after every mutant.
Mutants whose file and tests have not changed since are not run again (--all: run all). Exits 1 if a mutant survived
that the list does not explain.

Each mutant runs in a child of this process, which has loaded torch and transformers already but no module of stretto.
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

from listed import ROOT, SOURCE, SUMMARY, Mutant, mutants  # noqa: E402

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


def in_child(source: Path, tests: Sequence[str], log: Path) -> tuple[str, str]:
    """Run tests on a source folder: 'passed', 'failed', 'timeout' or 'not run', and the first test that failed."""
    failure = log.with_suffix(".failed")
    failure.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 3
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
            stream = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            for number in (1, 2):
                os.dup2(stream, number)
            os.chdir(ROOT)
            sys.path[:0] = [str(source)]
            os.environ["PYTHONPATH"] = str(source)
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some take seconds to load
            code = int(pytest.main([*OPTIONS, *tests], plugins=[FirstFailure(failure)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + LONGEST_WAIT
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    if code <= 0:
        return "passed" if code == 0 else "timeout", ""
    if not failure.exists():  # no test was chosen, or pytest itself failed
        return "not run", " ".join(log.read_text(encoding="utf-8")[-300:].split())
    return "failed", failure.read_text(encoding="utf-8")


def digest_of(mutant: Mutant) -> str:
    """What a result depends on: the mutant, its file, its tests."""
    files = [ROOT / argument.partition("::")[0] for argument in mutant.tests]
    texts = [mutant.apply(SOURCE), *mutant.tests]
    for path in files:
        some = sorted(path.rglob("test_*.py")) if path.is_dir() else [path] if path.is_file() else []
        texts += [file.read_text(encoding="utf-8") for file in some]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def pass_unchanged(tests: Sequence[str], source: Path, place: Path) -> bool:
    """Tests that do not pass without a mutant tell nothing of one."""
    outcome, failed = in_child(source, tests, place / "unchanged.log")
    if outcome != "passed":
        tqdm.write(f"{outcome} without a mutant: {' '.join(tests)} ({failed})")
    return outcome == "passed"


def try_out(mutant: Mutant, source: Path, place: Path) -> dict[str, Any]:
    """Apply a mutant to the copy, run its tests, restore the copy."""
    path = source / "stretto" / mutant.file
    before, changed = path.read_text(encoding="utf-8"), mutant.apply(source)
    began = time.monotonic()
    path.write_text(changed, encoding="utf-8")
    try:
        outcome, failed = in_child(source, mutant.tests, place / "mutant.log")
    finally:
        path.write_text(before, encoding="utf-8")
    result = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
    return {
        "mutant": mutant.key,
        "result": result,
        **({"by": failed} if failed else {}),
        **({"explained": mutant.explained} if result == "survived" and mutant.explained else {}),
        "seconds": round(time.monotonic() - began, 1),
        "digest": digest_of(mutant),
    }


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
    parser.add_argument("--all", action="store_true", help="run also those that have not changed")
    options = parser.parse_args()
    listed, before = mutants(), known()
    wanted = [mutant for mutant in listed if any(part in mutant.key for part in options.only)]
    if not options.all:
        wanted = [mutant for mutant in wanted if before.get(mutant.key, {}).get("digest") != digest_of(mutant)]
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        importlib.import_module(name)
    passing: dict[tuple[str, ...], bool] = {}
    with tempfile.TemporaryDirectory() as folder, tqdm(wanted, unit="mutant") as bar:
        place, source = Path(folder), Path(folder) / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        # by content: a mutant may have the size and the second of the file before
        compileall.compile_dir(source, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        for mutant in bar:
            bar.set_description(mutant.key[:60])
            if mutant.tests not in passing:
                passing[mutant.tests] = pass_unchanged(mutant.tests, source, place)
            if passing[mutant.tests]:
                row = try_out(mutant, source, place)
                write(listed, {mutant.key: row})
                if row["result"] == "survived":
                    tqdm.write(f"survived: {mutant.key}")
    rows = write(listed, {})
    print(f"{len(rows)} of {len(listed)} mutants: {dict(Counter(row['result'] for row in rows.values()))}")
    unexplained = [key for key, row in rows.items() if row["result"] == "survived" and not row.get("explained")]
    failing = [" ".join(tests) for tests, passed in passing.items() if not passed]
    if unexplained or failing:
        sys.exit(f"Survived, and not explained: {unexplained or 'none'}. Tests that fail: {failing or 'none'}.")


if __name__ == "__main__":
    main()
