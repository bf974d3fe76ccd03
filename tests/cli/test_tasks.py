"""The command line on tags and on answer spans: train, evaluate, predict and bench, from a plain encoder to answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import question_rows, run, tagging_rows
from sources import jsonl, write
from tiny import tiny_model, tiny_questions, tiny_tagging
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from stretto import AdaptiveModel
from stretto.tasks import Span, Tokens

ONE_EPOCH = ["--num-train-epochs", "1", "--per-device-train-batch-size", "16"]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """names.jsonl, with a tagging model beside it."""
    folder = tmp_path_factory.mktemp("names")
    tiny_model("length_adaptive", task=Tokens(tiny_tagging(1).label_names)).save_pretrained(folder / "model")
    return write(folder / "names.jsonl", jsonl(*tagging_rows(tiny_tagging(24))))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """questions.jsonl, with a model that answers them beside it; its windows are short."""
    folder = tmp_path_factory.mktemp("questions")
    model = tiny_model("length_adaptive", task=Span(stride=4))
    model.tokenizer.model_max_length = 24
    model.save_pretrained(folder / "model")
    return write(folder / "questions.jsonl", jsonl(*question_rows(tiny_questions(24, longest=40))))


def test_tagging_from_encoder_to_answers(encoder: Path, names: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["train", names, "--task", "tokens", "--model", encoder, "--method", "full", "--output", out, *ONE_EPOCH]
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    assert f"stretto predict {out} TEXTS.jsonl" in result.stdout
    model = AdaptiveModel.from_pretrained(out)
    assert (model.task.name, model.task.main_metric) == ("tokens", "f1")
    plain = AutoModelForTokenClassification.from_pretrained(out)
    assert list(plain.config.label2id) == model.task.label_names
    card = (out / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card
    assert "AutoModelForTokenClassification" in card

    result = run("evaluate", out, names, "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(result.stdout)["points"][0]["metrics"]) == {"f1", "precision", "recall", "accuracy"}

    result = run("predict", out, names)
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in tagging_rows(tiny_tagging(24))]
    assert all(len(row["tags"]) == len(row["scores"]) == len(row["tokens"]) for row in rows)
    assert set(rows[0]) == {"tokens", "words", "tags", "scores", "entities", "depth", "cost"}


def test_attention_dropout_comes_from_the_flag_or_the_run_file(
    encoder: Path, names: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []
    monkeypatch.setattr(
        "stretto.training.run.train", lambda *_, attention_dropout, **__: seen.append(attention_dropout)
    )
    monkeypatch.setattr("stretto.cli.train.show_result", lambda *_: None)
    start = ["train", names, "--task", "tokens", "--method", "full", "--model", encoder, "--output", tmp_path / "out"]
    config = tmp_path / "run.yaml"
    config.write_text("attention_dropout: 0.25")
    for more in ([], ["--attention-dropout", "0"], ["--config", config]):
        result = run(*start, *more)
        assert result.exit_code == 0, result.stderr
    assert seen == [None, 0.0, 0.25]
    assert run(*start, "--attention-dropout", "2").exit_code == 2


def test_questions_from_encoder_to_answers(encoder: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["train", questions, "--task", "span", "--model", encoder, "--method", "full", "--output", out, *ONE_EPOCH]
    result = run(*args, "--max-length", 24, "--stride", 6)
    assert result.exit_code == 0, result.stderr
    model = AdaptiveModel.from_pretrained(out)
    assert model.task.settings() == {"no_answer": False, "null_threshold": 0.0, "stride": 6, "n_best": 5}
    assert model.max_length == 24
    assert AutoModelForQuestionAnswering.from_pretrained(out).config.num_labels == 2

    result = run("evaluate", out, questions)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split()[:3] == ["dial", "f1", "exact_match"]

    result = run("predict", out, questions, "--output", tmp_path / "answers.jsonl", "--batch-size", 5)
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    for row in rows:
        assert row["context"][row["start"] : row["end"]] == row["answer"]
        assert row["best"][0] == {name: row[name] for name in ("score", "start", "end")} | {"text": row["answer"]}


def test_words_come_as_text_too(names: Path) -> None:
    model = names.with_name("model")
    result = run("predict", model, stdin='how many city\n{"tokens": ["how", "many city"]}\n\n')
    assert result.exit_code == 1  # the first line settles that the column is 'text'
    assert "stdin:2" in result.stderr
    result = run("predict", model, stdin="how many city\n\n")
    assert result.exit_code == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["text"], first["words"]) == ("how many city", ["how", "many", "city"])
    assert second["tags"] == []


def test_long_inputs_are_told_or_windowed(names: Path, questions: Path, tmp_path: Path) -> None:
    long = write(tmp_path / "long.jsonl", jsonl({"tokens": ["city"] * 100, "tags": ["O"] * 100}))
    result = run("evaluate", names.with_name("model"), long, "--dials", "1")
    assert result.exit_code == 0, result.stderr
    assert "truncated to 64 tokens: 1 of 1 text\n" in result.stderr
    row = {"question": "how many ?", "context": "one city " * 100}
    result = run("predict", questions.with_name("model"), write(tmp_path / "q.jsonl", jsonl(row)))
    assert result.exit_code == 0, result.stderr
    assert "cut" not in result.stderr


def test_a_plain_model_learns_from_the_data_that_there_may_be_no_answer(tmp_path: Path) -> None:
    plain = tiny_model("full", task=Span())
    plain.encoder.save_pretrained(tmp_path / "plain")
    plain.tokenizer.save_pretrained(tmp_path / "plain")
    data = write(tmp_path / "q.jsonl", jsonl(*question_rows(tiny_questions(24, no_answer=True))))
    args = ["--model", tmp_path / "plain", "--method", "length_adaptive", "--task", "span", "--skip", "backbone"]
    result = run("train", data, *args, "--drop-epochs", 1, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert AdaptiveModel.from_pretrained(tmp_path / "out").task.settings()["no_answer"]


def test_a_context_in_windows_is_not_called_cut(questions: Path, names: Path) -> None:
    told = run("explain", questions.with_name("model"), "how many ?", "--text-b", "one city " * 30, "--json")
    assert "the context was read in" in told.stderr and "cut" not in told.stderr
    assert json.loads(told.stdout)["windows"] > 1


@pytest.mark.parametrize("data", ["names", "questions"])
def test_bench_model(data: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(data)
    args = ["--dials", "0.6", "--batch-sizes", "4", "--sequences", 6, "--rounds", 1, "--json"]
    result = run("bench", "model", path.with_name("model"), path, *args)
    assert result.exit_code == 0, result.stderr
    full, short = json.loads(result.stdout)["rows"]
    assert full["cost"] == 1.0 > short["cost"]


def test_what_is_refused(encoder: Path, names: Path, questions: Path, data: Path, tmp_path: Path) -> None:
    start = ["--model", encoder, "--output", tmp_path / "out"]
    for args, answer in (
        (
            ["train", names, "--task", "tokens", "--method", "deebert", *start],
            "(classification), got tokens. Methods that can do it: full",
        ),
        (["train", names, "--task", "tags", *start], "Expected a task among classification, regression, tokens"),
        (
            ["train", data, "--task", "span", "--method", "full", *start],
            "expected a column 'question', got",
        ),
        (
            ["train", names, "--task", "tokens", "--stride", 3, *start],
            "Expected --stride only for a new task with windows",
        ),
        (["predict", names.with_name("model"), names, "--output", tmp_path / "a.csv"], "hold lists, which .csv cannot"),
        (["predict", names.with_name("model"), names, "--probabilities"], "Expected probabilities of a model that"),
        (
            [
                "train",
                names,
                *start[2:],
                "--model",
                names.with_name("model"),
                "--method",
                "full",
                "--task",
                "span",
                "--skip",
                "backbone",
            ],
            "Expected the task of MODEL (tokens) with --skip backbone, got --task span",
        ),
        (["predict", questions.with_name("model"), names], "expected a column 'question'"),
        (["evaluate", names.with_name("model"), questions], "known to hold the words, got none"),
        (["demo", "--data", names, "--task", "tokens"], "such as classification or regression, got 'tokens'"),
    ):
        result = run(*args)
        assert (result.exit_code, result.stdout) == (1, ""), args
        assert answer in result.stderr
    assert list(tmp_path.iterdir()) == []
