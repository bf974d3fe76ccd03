"""The command line: help, what there is, and training."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import QUICK, run, stretto
from forked import Piped
from sources import write
from typer.main import get_command

from stretto import AdaptiveModel, __version__
from stretto.cli import app
from stretto.methods import METHODS
from stretto.training.trainer import StageTrainer

VERBS = [
    f"{name} {inner}".strip()
    for name, verb in get_command(app).commands.items()  # type: ignore[attr-defined]
    for inner in getattr(verb, "commands", [""])
]


# ---- help --------------------------------------------------------------------------------------------------


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys, stretto.cli; print([m for m in ('torch', 'transformers', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(verb: str) -> None:
    result = run(*verb.split(), "--help")
    assert result.exit_code == 0
    assert f"Examples:\n    stretto {verb}" in result.stdout


def test_version_and_module() -> None:
    assert run("--version").stdout == f"stretto {__version__}\n"
    assert stretto("--version").stdout == f"stretto {__version__}\n"


@pytest.mark.parametrize(
    "args", [["trian"], ["evaluate"], ["predict", "m", "--batch-size", "0"], ["train", "--model", "m"]]
)
def test_usage_errors_exit_with_2(args: list[str]) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
    assert result.stdout == ""


# ---- methods and backbones ---------------------------------------------------------------------------------


def test_methods_are_listed_and_described() -> None:
    listed = run("methods").stdout
    assert all(f"\n{name} " in listed for name in METHODS)
    for name, method in METHODS.items():
        told = run("methods", name).stdout
        assert "Differs from the paper" in told
        for setting in vars(method.Config()):
            flag = f"--{setting.replace('_', '-')}"
            (line,) = (line for line in told.splitlines() if line.startswith(f"{flag} "))
            assert len(line.split()) > 3, f"{name} {flag} has no help"
    described = json.loads(run("methods", "--json").stdout)["methods"]
    assert [method["name"] for method in described] == list(METHODS)
    assert all(method["dial"]["name"] and method["summary"] for method in described)
    assert json.loads(run("methods", "--json", "deebert").stdout)["name"] == "deebert"
    result = run("methods", "debert")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: Expected a method among full" in result.stderr
    assert "Did you mean 'deebert'" in result.stderr


def test_backbones_are_listed() -> None:
    assert "distilbert" in run("backbones").stdout
    assert "bert" in json.loads(run("backbones", "--json").stdout)["backbones"]


# ---- train -------------------------------------------------------------------------------------------------


def test_train_from_a_run_file_and_flags(encoder: Path, data: Path, tmp_path: Path) -> None:
    config = write(
        tmp_path / "run.yaml",
        f"data: {data.with_name('train.jsonl')}\nmodel: {encoder}\nmethod: shallow_deep\nexit-epochs: 3\n"
        "learning_rate: 1e-3\nnum_train_epochs: 1\ndropout: 0.2\n",
    )
    out = tmp_path / "out"
    result = run("train", "--config", config, "--exit-epochs", "1", "--output", out, "--dropout=0.3", "--seed", "5")
    assert result.exit_code == 0, result.stderr
    assert "no --dev: measuring on 6 of 64 examples, held out from training" in result.stderr
    assert "Operating points on the dev data" in result.stdout
    assert "Default dial: confidence" in result.stdout
    assert f"stretto evaluate {out}" in result.stdout
    saved = AdaptiveModel.from_pretrained(out)
    assert vars(saved.method.config) | {"exit_epochs": 1.0, "dropout": 0.3, "learning_rate": 1e-3} == vars(
        saved.method.config
    )
    assert saved.task.label_names == ["bad", "good"]
    assert saved.provenance["seed"] == 5

    again = run("train", "--config", config, "--output", out)
    assert again.exit_code == 1
    assert "holds a finished model. Choose another, or add --overwrite" in again.stderr


def test_train_only_the_exits_of_a_model_that_knows_the_task(model: Path, data: Path, tmp_path: Path) -> None:
    source, out = data.with_name("train.jsonl"), tmp_path / "out"
    args = ["train", source, "--dev", data, "--model", model, "--skip", "backbone", "--exit-epochs", 1, "--output", out]
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    before, after = AdaptiveModel.from_pretrained(model), AdaptiveModel.from_pretrained(out)
    assert after.provenance["dev examples"] == 40
    assert all((b == a).all() for b, a in zip(before.encoder.parameters(), after.encoder.parameters(), strict=True))
    assert run(*args, "--overwrite").exit_code == 0


def test_training_without_dev_scores(model: Path, data: Path, tmp_path: Path) -> None:
    args = ["train", data, "--model", model, "--skip", "backbone", "--output", tmp_path / "out", *QUICK]
    result = run(*args, "--eval-strategy", "no")
    assert result.exit_code == 0, result.stderr
    assert AdaptiveModel.from_pretrained(tmp_path / "out").operating_points


def test_an_output_with_a_slash_behind_it(model: Path, data: Path, tmp_path: Path) -> None:
    args = ["--model", model, "--skip", "backbone", "--exit-epochs", 1, "--output", f"{tmp_path}/out/"]
    result = run("train", data, *args)
    assert result.exit_code == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_train_regression(encoder: Path, tmp_path: Path) -> None:
    data = write(
        tmp_path / "d.csv", "text,label\n" + "".join(f"{'good ' * (i % 5)}film,{i % 5}.5\n" for i in range(30))
    )
    args = ["train", data, "--model", encoder, "--method", "lte", "--task", "regression", "--output", tmp_path / "out"]
    result = run(*args, *QUICK, "--report-to", "none")
    assert result.exit_code == 0, result.stderr
    assert "pearson" in result.stdout
    refused = run(*args[:6], "--task", "regression", "--output", tmp_path / "other", "--method", "deebert")
    assert refused.exit_code == 1
    assert "a task that deebert can do" in refused.stderr


def test_an_interrupted_training_goes_on(
    encoder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["train", data, "--model", encoder, "--output", tmp_path / "out", *QUICK]

    def stop(self: StageTrainer, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "compute_loss", stop)
        result = run(*args)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[-1] == (
        f"interrupted. The work so far is in '{tmp_path / 'out'}.work': the same command resumes it, "
        "--restart discards it."
    )
    assert not (tmp_path / "out").exists()

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        result = run(*args)
    assert result.exit_code == 1
    assert f"error: Expected to write '{tmp_path / 'out'}" in result.stderr
    assert "No space left on device" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]

    result = run(*args)
    assert result.exit_code == 0, result.stderr
    assert "resuming the unfinished run" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--exit-epoch", "2"], "Did you mean --exit-epochs?"),
        (["--method", "debert"], "Did you mean 'deebert'?"),
        (["--exit-epochs", "two"], "a number for --exit-epochs, got 'two'"),
        (["--optim", "adam"], "TrainingArguments accepts, got: adam is not a valid"),
        (["--eval-strategy", "steps"], "requires the save and eval strategy to match"),
        (["--eval-strategy", "no", "--load-best-model-at-end"], "requires the save and eval strategy to match"),
        (["--per-device-train-batch-size", "0"], "Expected --per-device-train-batch-size of at least 1, got 0"),
        (["--seed", "-1"], "Expected a --seed from 0 to 2**32 - 1, got -1"),
        (["--report-to", "tensorbord"], "TrainingArguments accepts, got: tensorbord is not supported"),
        (["--label", "stars"], "expected a column 'stars'"),
        (["--skip", "exit"], "Expected stages of deebert (backbone, exits) to skip, got exit"),
        (["--dev", "nowhere.csv"], "file not found"),
        (["--config", "nowhere.yaml"], "Expected a YAML file after --config"),
    ],
)
def test_training_is_refused_before_it_begins(
    flags: list[str], answer: str, encoder: Path, data: Path, tmp_path: Path
) -> None:
    result = run("train", data, "--model", encoder, "--output", tmp_path / "out", *flags)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert answer in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("- a\n- b\n", "expected lines such as 'model:"),
        ("a: [\n", "Expected a YAML file"),
        ("model: 3\noutput: o\ndata: d\n", "Expected text for 'model', got 3"),
        ("model: m\noutput: o\ndata: d\noverwrite: 3\n", "Expected true or false for 'overwrite', got 3"),
        ("model: .\noutput: o\ndata: d\nsede: 3\n", "Did you mean --seed?"),
        ("model: .\noutput: o\ndata: d\nmax_steps: {a: 1}\n", "Expected a single value for --max-steps"),
    ],
)
def test_bad_run_files(text: str, answer: str, tmp_path: Path) -> None:
    result = run("train", "--config", write(tmp_path / "run.yaml", text))
    assert result.exit_code == 1
    assert answer in result.stderr


def test_two_nodes_and_one_voice(encoder: Path, data: Path, tmp_path: Path) -> None:
    """As on two machines, which find each other by address: each process gets what torchrun tells it. (Processes that
    torchrun itself starts: tests/training/test_training.py.)"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                Piped("train", data, "--model", encoder, "--output", tmp_path / "out", *QUICK, environment=each)
            )
            for each in (place | {"RANK": str(rank), "LOCAL_WORLD_SIZE": "1"} for rank in range(2))
        ]
        said = [(node.stdout.read(), node.stderr.read()) for node in nodes]
        assert [node.wait() for node in nodes] == [0, 0], said
    assert [stdout.count("Default dial") for stdout, _ in said] == [1, 0]
    assert [stderr.count("no --dev") for _, stderr in said] == [1, 0]
    assert AdaptiveModel.from_pretrained(tmp_path / "out").operating_points
