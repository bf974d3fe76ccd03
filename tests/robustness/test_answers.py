"""Nothing is answered that the model cannot answer: inputs of another form, weights and logits that are not numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK, run
from safetensors.torch import load_file, save_file
from sources import jsonl, write
from tiny import tiny_model

from stretto import AdaptiveModel, StrettoError
from stretto.tasks import Classification, Regression

TEXTS = [{"text": "a good film", "label": "good"}, {"text": "dull", "label": "bad"}]
PAIRS = [{"text_a": "a film", "text_b": "it was good", "label": "good"}, {"text_a": "", "text_b": "", "label": "bad"}]
COMMANDS = ["predict MODEL DATA", "evaluate MODEL DATA", "bench model MODEL DATA", "search MODEL DATA"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int | None, Path]:
    """By the number of texts that a folder remembers; None is a folder from before it did."""
    places: dict[int | None, Path] = {}
    for n_texts in (1, 2, None):
        places[n_texts] = tmp_path_factory.mktemp("models") / f"{n_texts}"
        task = Classification(["bad", "good"], n_texts)
        tiny_model("length_adaptive", task=task).save_pretrained(places[n_texts])
    return places


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("n_texts", "rows"), [(1, PAIRS), (2, TEXTS)])
def test_inputs_of_another_form(
    n_texts: int, rows: list[dict[str, str]], command: str, models: dict[int | None, Path], tmp_path: Path
) -> None:
    data = write(tmp_path / "d.jsonl", jsonl(*rows))
    names = {"MODEL": models[n_texts], "DATA": data}
    result = run(*(names.get(word, word) for word in command.split()))
    expected, came = ("single texts", "pairs of texts")[:: 1 if n_texts == 1 else -1]
    assert result.exit_code == 1
    assert f"error: Expected {expected}, as in the training of the model, got {came}. Name" in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == [data]


def test_explaining_inputs_of_another_form(models: dict[int | None, Path]) -> None:
    assert "Expected pairs of texts" in run("explain", models[2], "a film").stderr
    assert "Expected single texts" in run("explain", models[1], "a film", "--text-b", "good").stderr
    assert run("explain", models[1], "a film").exit_code == 0


def test_the_right_form_and_old_folders(models: dict[int | None, Path]) -> None:
    for n_texts, texts in ((1, ["a"]), (2, [("a", "b")]), (None, ["a"]), (None, [("a", "b")])):
        assert AdaptiveModel.from_pretrained(models[n_texts]).predict(texts)
    assert "n_texts" not in json.loads((models[None] / "stretto.json").read_text())["task"]


@pytest.mark.parametrize(("rows", "n_texts"), [(TEXTS, 1), (PAIRS, 2)])
def test_training_remembers_the_form(rows: list[Any], n_texts: int, shared: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", jsonl(*rows * 8))
    out = tmp_path / "out"
    result = run("train", data, "--model", shared / "encoder", "--method", "full", "--output", out, *QUICK[:2])
    assert result.exit_code == 0, result.stderr
    assert json.loads((out / "stretto.json").read_text())["task"] == {"name": "classification", "n_texts": n_texts}
    other = write(tmp_path / "other.jsonl", jsonl(*(PAIRS if n_texts == 1 else TEXTS) * 8))
    again = run("train", other, "--model", out, "--skip", "backbone", "--output", tmp_path / "b")
    assert again.exit_code == 1
    assert "as in the training of the model" in again.stderr


@pytest.mark.parametrize("n_texts", [0, 3, "1", 1.5])
def test_a_damaged_form(n_texts: Any, models: dict[int | None, Path], tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"Expected 1 \(texts\) or 2 \(pairs\)"):
        Regression(n_texts=n_texts)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        ("model.safetensors", "bert.encoder.layer.1.output.dense.weight"),
        ("stretto.safetensors", "exits"),
    ],
)
def test_weights_that_are_not_numbers(file: str, tensor: str, value: float, tmp_path: Path) -> None:
    tiny_model("deebert").save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / file
    weights = load_file(path)
    tensor = next(name for name in sorted(weights) if name.startswith(tensor))
    weights[tensor].view(-1)[0] = value
    save_file(weights, path, metadata={"format": "pt"})
    result = run("predict", tmp_path / "m", stdin="a good film\n")
    assert result.exit_code == 1
    assert f"Expected finite weights in '{tmp_path / 'm'}', got {value} in" in result.stderr
    assert tensor in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("task", [Classification(["a", "b"]), Regression()])
def test_logits_that_are_not_numbers(task: Any) -> None:
    """Finite weights may still give infinite logits."""
    model = tiny_model("full", task=task)
    with torch.no_grad():
        model.encoder.classifier.weight.fill_(3e38)
    with pytest.raises(StrettoError, match=r"Expected finite logits, got -?(inf|nan) for example 0\. The weights are"):
        model.predict(["a good film"])
