"""The one writer: whole or not at all, nothing left behind, leftovers of killed writes removed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from stretto import StrettoError
from stretto.saving import files
from stretto.saving.files import neighbour_of, replacing_file, replacing_folder, write_json, write_tensors, write_text

FULL = OSError(errno.ENOSPC, "No space left on device")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def of_a_dead_process(place: Path) -> Path:
    """The neighbour that a killed process would have left."""
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    return place.with_name(neighbour_of(place).name.replace(f"-{os.getpid()}-", f"-{int(dead.stdout)}-"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FULL, "No space left on device"),
        (SafetensorError("I/O error: No space left"), "I/O error: No space left"),
        (RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"), "PytorchStreamWriter"),
    ],
)
@pytest.mark.parametrize("replacing", [replacing_file, replacing_folder])
def test_a_failed_write_changes_nothing(replacing: object, error: Exception, reason: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if replacing is replacing_file:
        place.write_text("before")
    else:
        place.mkdir()
    wanted = rf"Expected to write '.*place', got: {reason}.* Free some space"
    with pytest.raises(StrettoError, match=wanted), replacing(place):  # type: ignore[operator]
        raise error
    assert names(tmp_path) == ["place"]
    assert place.is_dir() or place.read_text() == "before"


def test_other_errors_keep_their_name(tmp_path: Path) -> None:
    for error in (RuntimeError("shape '[2]' is invalid"), KeyboardInterrupt(), BrokenPipeError()):
        with pytest.raises(type(error)), replacing_file(tmp_path / "file"):
            raise error
    assert names(tmp_path) == []


def test_text_json_and_tensors(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "é\n")
        write_json(tmp_path / "b.json", {"é": [1]})
        write_tensors(tmp_path / "c.safetensors", {"x": torch.eye(2).T})
    finally:
        os.umask(mask)
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "é\n"
    assert (tmp_path / "b.json").read_text(encoding="utf-8") == '{\n  "é": [\n    1\n  ]\n}\n'
    assert torch.equal(load_file(tmp_path / "c.safetensors")["x"], torch.eye(2))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "there" / "file.txt")
    (tmp_path / "model").symlink_to(tmp_path / "there" / "folder")
    write_text(tmp_path / "link.txt", "text")
    for _ in range(2):
        with replacing_folder(tmp_path / "model") as folder:
            (folder / "x").touch()
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "model").is_symlink()
    assert names(tmp_path / "there") == ["file.txt", "folder"]
    assert (tmp_path / "there" / "file.txt").read_text() == "text"


def test_leftovers_of_the_killed_are_removed_and_those_of_the_living_kept(tmp_path: Path) -> None:
    place, other = tmp_path / "out[1].json", tmp_path / "other.json"
    living, elsewhere = neighbour_of(place), place.with_name(f".{place.name}.00000000-1-ab.part")
    kept = [living, elsewhere, of_a_dead_process(other)]
    for path in (*kept, of_a_dead_process(place)):
        path.write_text("half a fi")
    write_text(place, "whole")
    assert names(tmp_path) == sorted([place.name, *(path.name for path in kept)])


def test_what_others_had_in_a_leftover_folder_is_kept(tmp_path: Path) -> None:
    """The process was killed after the folders had changed names, before notes.txt was moved over."""
    place = tmp_path / "model"
    place.mkdir()
    leftover = of_a_dead_process(place)
    leftover.mkdir()
    (leftover / "notes.txt").write_text("mine")
    (leftover / "old.bin").write_text("ours")
    with replacing_folder(place, own=("*.bin",)) as folder:
        (folder / "new.bin").touch()
    assert names(tmp_path) == ["model"]
    assert names(place) == ["new.bin", "notes.txt"]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_kill_while_folders_change_names(in_one_step: bool, tmp_path: Path) -> None:
    """Killed at the first rename or right after the swap: there is a whole folder, and the next write cleans up."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "old.bin").touch()
    no_exchange = "" if in_one_step else "files.ctypes.CDLL = lambda _: None\n"
    when = "files.keep_others = lambda *_: os._exit(9)" if in_one_step else DIE_AT_SECOND_RENAME
    script = f"import os, sys\nfrom pathlib import Path\nfrom stretto.saving import files\n{no_exchange}{when}\n{WRITE}"
    assert subprocess.run([sys.executable, "-c", script, str(place)]).returncode == 9
    assert len(names(tmp_path)) == 2
    with replacing_folder(place) as folder:
        found = names(place) if place.exists() else []
        (folder / "newest.bin").touch()
    assert found == (["new.bin"] if in_one_step else ["old.bin"])
    assert (names(tmp_path), names(place)) == (["model"], ["newest.bin"])


DIE_AT_SECOND_RENAME = """
rename = Path.rename
Path.rename = lambda self, target: rename(self, target) if target.name.endswith(files.OLD) else os._exit(9)
"""
WRITE = """
with files.replacing_folder(Path(sys.argv[1])) as folder:
    (folder / "new.bin").touch()
"""


def test_an_interrupted_swap_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, rename = tmp_path / "model", Path.rename
    place.mkdir()
    (place / "old.bin").touch()

    def interrupted(source: Path, target: Path) -> Path:
        if target == place and not source.name.endswith(files.OLD):
            raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(files.ctypes, "CDLL", lambda _: None)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), replacing_folder(place) as folder:
        (folder / "new.bin").touch()
    assert (names(tmp_path), names(place)) == (["model"], ["old.bin"])
