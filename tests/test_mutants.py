"""The list of mutants (`tests/mutants`): it fits the source, and survivors are explained. `make mutants` runs them."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / "mutants")]

from listed import ROOT, SOURCE, SUMMARY, Mutant, mutants  # noqa: E402

LISTED = mutants()
#: What the list must speak of.
FOLDERS = {"methods", "engine", "budget", "training", "tasks"}


@pytest.mark.parametrize("mutant", LISTED, ids=[mutant.key for mutant in LISTED])
def test_a_mutant_changes_the_source(mutant: Mutant) -> None:
    """Its fragment occurs once, the changed file is Python, and the tests it names are there."""
    assert mutant.old.split() != mutant.new.split()
    ast.parse(mutant.apply(SOURCE))
    files = [argument for argument in mutant.tests if argument.startswith("tests/")]
    assert files and all((ROOT / file.partition("::")[0]).exists() for file in files)


def test_the_list_is_long_and_spread() -> None:
    assert len({mutant.key for mutant in LISTED}) == len(LISTED) >= 60
    assert {mutant.file.partition("/")[0] for mutant in LISTED} >= FOLDERS


def test_every_survivor_is_explained() -> None:
    """The summary is of mutants in the list; those that it lacks have not been run yet."""
    rows = {row["mutant"]: row for row in json.loads(SUMMARY.read_text(encoding="utf-8"))["mutants"]}
    assert set(rows) <= {mutant.key for mutant in LISTED}
    assert {row["result"] for row in rows.values()} <= {"killed", "timeout", "survived"}
    survivors = {key for key, row in rows.items() if row["result"] == "survived"}
    assert survivors == {mutant.key for mutant in LISTED if mutant.explained}


def test_a_fragment_that_is_gone_is_an_error() -> None:
    gone = Mutant("errors.py", "gone", "no such line", "", ())
    with pytest.raises(ValueError, match=r"once in errors\.py, got it 0 times"):
        gone.apply(SOURCE)
