"""The one check that a run is resumed with the plan it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import StrettoError
from stretto.saving.same_run import check_same, hold_to

PLAN = {"method": "deebert", "sizes": (3, 4), "arguments": {"seed": 1, "optim": "adamw"}}


def test_the_first_run_writes_and_the_same_one_passes(tmp_path: Path) -> None:
    path = tmp_path / "work" / "plan.json"
    hold_to(path, PLAN, what="the training", place=path.parent, write=False)
    assert not path.exists()
    for _ in range(2):
        hold_to(path, PLAN, what="the training", place=path.parent)
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_differences_are_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    hold_to(path, PLAN, what="the training", place=tmp_path)
    before = path.read_text()
    other = {**PLAN, "arguments": {"seed": 2, "optim": "adamw"}, "sizes": (3, 5)}
    with pytest.raises(StrettoError) as caught:
        hold_to(path, other, what="the training", place=tmp_path)
    assert str(caught.value) == (
        f"Expected to resume the training in '{tmp_path}' with the same plan, got another sizes: [3, 5], before "
        f"[3, 4]; arguments seed: 2, before 1. Use the same settings, choose another output, or add --restart "
        f"to start again (in Python: delete '{tmp_path}')."
    )
    assert path.read_text() == before


def test_stages_are_compared_one_by_one(tmp_path: Path) -> None:
    first, second = {"name": "backbone", "rate": 5e-5}, {"name": "exits", "rate": 1e-3}
    with pytest.raises(StrettoError, match=r"got another stages 2 rate: 0\.1, before 0\.001\. Use"):
        check_same({"stages": [first, second]}, {"stages": [first, {**second, "rate": 0.1}]}, what="it", place=tmp_path)
    with pytest.raises(StrettoError, match=r"got another stages: \[.*\], before \[.*…\. Use"):
        check_same({"stages": [first, second]}, {"stages": [first]}, what="it", place=tmp_path)


def test_many_differences_and_what_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"a: 1, before null; b: 1, before null; c: 1, before null and 2 more\. "):
        check_same({}, dict.fromkeys("abcde", 1), what="it", place=tmp_path)
    with pytest.raises(StrettoError, match="another"):
        check_same([1], {"a": 1}, what="it", place=tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(StrettoError, match=r"to be readable, got .* Add --restart to start again"):
        hold_to(tmp_path / "plan.json", PLAN, what="it", place=tmp_path)
