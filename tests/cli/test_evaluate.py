"""`stretto evaluate`: tables, JSON, plots, and what cannot be evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run
from sources import write
from tiny import tiny_model

from stretto.methods import METHODS


def test_evaluate_prints_a_table_and_writes_json_and_a_plot(model: Path, data: Path, tmp_path: Path) -> None:
    files = [tmp_path / "points.json", tmp_path / "curve.png"]
    result = run("evaluate", model, data, "--dials", "0,0.97, 1", "--json", files[0], "--plot", files[1])
    assert result.exit_code == 0, result.stderr
    table = result.stdout.splitlines()
    assert table[0] == "deebert on 40 examples; the dial is entropy"
    assert table[1].split() == ["dial", "accuracy", "macro_f1", "mcc", "ece", "cost", "depth"]
    assert [line.split()[0] for line in table[2:]] == ["0", "0.97", "1"]
    assert ["default (not measured)" in line for line in table[2:]] == [False, True, False]
    assert "\x1b" not in result.stdout
    content = json.loads(files[0].read_text())
    assert [point["dial"] for point in content["points"]] == [0, 0.97, 1]
    assert content["points"][2]["depth"] == 1
    assert content["examples"] == 40
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_evaluate_json_is_all_there_is_on_stdout(model: Path, data: Path) -> None:
    content = json.loads(run("evaluate", model, data, "--json").stdout)
    assert len(content["points"]) == len(METHODS["deebert"].dial.sweep)
    assert json.loads(run("evaluate", model, data, "--dials", "0", "--json", "-").stdout)["points"][0]["dial"] == 0


def test_a_plain_hugging_face_model_can_be_evaluated(encoder: Path, tmp_path: Path) -> None:
    numbered = write(tmp_path / "n.csv", "text,label\ngood,1\nbad,0\n")
    result = run("evaluate", encoder, numbered)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("full on 2 examples")


@pytest.mark.parametrize(
    ("content", "flags", "answer"),
    [
        ("text,label\na,terrible\n", [], "d.csv:2: expected one of the labels 'bad', 'good', got 'terrible'"),
        ("text,label\na,good\nb,\n", [], "d.csv:3: expected a label in 'label', got none"),
        ("text,id\na,1\n", [], "expected one column known to hold the label"),
        ("words,label\na,good\n", [], "Name it with --text"),
        ("text,label\na,good\n", ["--text", "words"], "expected a column 'words'"),
        ("text,label\n", [], "expected at least one row"),
        ("text,label\na,good\n", ["--dials", "0,x"], "Expected numbers separated by commas after --dials, got '0,x'"),
        ("text,label\na,good\n", ["--dials", "3"], "the dial 'entropy' between 0 and 1, got 3"),
        ("text,label\na,good\n", ["--plot", "p.doc"], "ending in .png, .svg, .pdf"),
        ("text,label\na,good\n", ["--dtype", "int4"], "float32, int8"),
        ("text,label\na,good\n", ["--split", "test"], "Leave the split out"),
    ],
)
def test_what_cannot_be_evaluated(content: str, flags: list[str], answer: str, model: Path, tmp_path: Path) -> None:
    result = run("evaluate", model, write(tmp_path / "d.csv", content), *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert answer in result.stderr


@pytest.mark.parametrize("verb", ["evaluate", "predict", "bench model"])
def test_what_is_not_a_model(verb: str, data: Path, tmp_path: Path) -> None:
    for folder, answer in ((tmp_path, "without one"), (tmp_path / "nowhere", "neither a folder here nor")):
        result = run(*verb.split(), folder, data)
        assert (result.exit_code, result.stdout) == (1, "")
        assert answer in result.stderr


@pytest.mark.parametrize("file", ["model.safetensors", "stretto.safetensors", "stretto.json", "config.json"])
def test_a_truncated_checkpoint(file: str, data: Path, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    result = run("predict", tmp_path / "saved", data)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: Expected")
