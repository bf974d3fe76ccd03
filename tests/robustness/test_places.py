"""One run at a time on an output, and a finished result is replaced only with --overwrite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import QUICK, run
from tiny import tiny_model

from stretto import AdaptiveModel, StrettoError
from stretto.saving.place import HELD, locked

HOLD = """
import sys, time
from stretto.saving.place import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """A process of its own that works on `out`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_two_runs_on_one_output(holder: subprocess.Popen[str], shared: Path, tmp_path: Path) -> None:
    commands = {
        "train": ["train", shared / "train.jsonl", "--model", shared / "encoder", "--output", tmp_path / "out"],
        "pretrain": ["pretrain", shared / "train.jsonl", tmp_path / "out", "--vocab-size", 60],
        "search": ["search", shared / "adaptive", shared / "test.jsonl", "--output", tmp_path / "out"],
    }
    for args in commands.values():
        result = run(*args)
        assert result.exit_code == 1
        assert f"Expected to be the only process that writes '{tmp_path / 'out'}', got process {holder.pid} on" in (
            result.stderr
        )
        assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out.lock"]
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / "out.lock").read_text())["process"] == holder.pid  # left behind, and recognised
    with locked(tmp_path / "out"):
        assert json.loads((tmp_path / "out.lock").read_text())["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_locks_in_one_process(tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder" / "out"
    with locked(place):
        with locked(f"{place}/"):  # a command and the function it calls
            assert len(HELD) == 1
        assert place.with_name("out.lock").exists()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StrettoError, match="no"), locked(place):
        raise StrettoError("no")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.lock").write_text("{")  # cut short by a kill
    with locked(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_made(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("train", shared / "train.jsonl", "--model", shared / "encoder", "--output", tmp_path / "file" / "out")
    assert result.exit_code == 1
    assert "File exists" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_finished_model_beside_an_unfinished_run(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced with --overwrite alone; other settings need --restart."""
    out, work = tmp_path / "out", tmp_path / "out.work"
    args = ["train", shared / "train.jsonl", "--model", shared / "encoder", "--output", out, *QUICK]

    def fail(*_: object, **__: object) -> None:
        raise StrettoError("Expected a disk, got none. Buy one.")

    with monkeypatch.context() as patch:
        patch.setattr("stretto.training.run.set_default", fail)
        stopped = run(*args)
    assert stopped.stderr.endswith(
        f"Buy one. The work so far is in '{work}': the same command resumes it, --restart discards it.\n"
    )
    tiny_model("full").save_pretrained(out)
    before = (out / "model.safetensors").read_bytes()
    refused = run(*args)
    assert refused.exit_code == 1
    assert "which holds a finished model. Choose another, or add --overwrite." in refused.stderr
    assert (out / "model.safetensors").read_bytes() == before
    other = run(*args, "--overwrite", "--learning-rate", "1e-4")
    assert other.exit_code == 1
    assert "got another config learning_rate: 0.0001, before " in other.stderr
    assert "add --restart to start again" in other.stderr
    assert other.stderr.count("--restart") == 1
    assert run(*args, "--overwrite").exit_code == 0
    assert not work.exists()
    assert (out / "model.safetensors").read_bytes() != before


def test_a_diverged_run_is_restarted_with_other_settings(shared: Path, tmp_path: Path) -> None:
    args = ["train", shared / "train.jsonl", "--model", shared / "encoder", "--output", tmp_path / "out", *QUICK]
    diverged = run(*args, "--learning-rate", "1e30", "--max-grad-norm", "0")
    assert diverged.exit_code == 1
    assert "training has diverged" in diverged.stderr
    assert "--restart discards it" in diverged.stderr
    again = run(*args, "--restart")
    assert again.exit_code == 0, again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_finished_run_left_behind(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between saving the model and removing its work folder: the folder is removed by the next run."""
    out, work = tmp_path / "out", tmp_path / "out.work"
    args = ["train", shared / "train.jsonl", "--model", shared / "encoder", "--output", out, *QUICK]

    save = AdaptiveModel.save_pretrained

    def save_and_die(model: AdaptiveModel, path: Path) -> None:
        save(model, path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AdaptiveModel, "save_pretrained", save_and_die)
        assert run(*args).exit_code == 130
    assert work.exists()
    assert "holds a finished model" in run(*args).stderr
    again = run(*args, "--overwrite", "--learning-rate", "1e-4")  # the work folder does not hold it back
    assert again.exit_code == 0, again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_search_beside_another_model(shared: Path, tmp_path: Path) -> None:
    """A search that wrote its output itself resumes; another model there is not its own."""
    small = ["--iterations", 1, "--population", 2, "--mutations", 1, "--crossovers", 1]
    args = ["search", shared / "adaptive", shared / "test.jsonl", "--output", tmp_path / "out", *small]
    stopped = run(*args, "--max-seconds", 0)
    assert stopped.exit_code == 0, stopped.stderr
    assert (tmp_path / "out.search").exists()
    tiny_model("full").save_pretrained(tmp_path / "out")
    refused = run(*args)
    assert refused.exit_code == 1
    assert "which holds a finished model" in refused.stderr
    assert run(*args, "--overwrite", "--max-seconds", 0).exit_code == 0
    resumed = run(*args)
    assert resumed.exit_code == 0, resumed.stderr
    assert "resuming the unfinished search" in resumed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
