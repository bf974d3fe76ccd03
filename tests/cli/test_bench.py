"""`stretto bench`: rows, files, and every architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run
from tiny import tiny_model


def test_bench_model(model: Path, data: Path, tmp_path: Path) -> None:
    args = ["bench", "model", model, data, "--batch-sizes", "1,4", "--sequences", 8, "--rounds", 1]
    result = run(*args, "--json", tmp_path / "b.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split()[:3] == ["batch", "dial", "ms/text"]
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [(row["batch_size"], row["dial"]) for row in rows] == [
        (b, d) for b in (1, 4) for d in (None, 0.97, 0.95, 1.0)
    ]
    shallow = rows[3]
    assert 3 < shallow["flops_gain"] < 4
    assert shallow["tracking"] == pytest.approx(shallow["time_gain"] / shallow["flops_gain"])
    assert rows[0]["time_gain"] == rows[0]["cost"] == 1
    assert not any(row["stream"] for row in rows)
    streamed = json.loads(run(*args, "--dials", "1", "--stream", "--json").stdout)["rows"]
    assert [row["stream"] for row in streamed] == [True] * 4
    assert streamed[3]["flops_gain"] == pytest.approx(shallow["flops_gain"])  # the same work, in other company
    assert "whole numbers from 1" in run(*args[:4], "--batch-sizes", "0").stderr


@pytest.mark.parametrize("model_type", ["distilbert", "roberta", "mpnet"])
def test_bench_model_knows_every_architecture(model_type: str, tmp_path: Path) -> None:
    from stretto.bench.model import bench_model

    rows = bench_model(tiny_model("full", model_type), [("a good film",)] * 3, [], (2,), rounds=1)
    assert [row["sequences"] for row in rows] == [3]


def test_bench_engine(tmp_path: Path) -> None:
    args = ["bench", "engine", "--shapes", "tiny", "--mixes", "sst", "--batch-sizes", 2, "--rounds", 1, "--threads", 1]
    args += ["--no-onnx", "--dtypes", "float32", "--json", tmp_path / "e.json"]
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    assert "drop_2x" in result.stdout
    assert json.loads((tmp_path / "e.json").read_text())["rows"]
    assert "Expected to write" in run(*args[:-1], tmp_path / "nowhere" / "e.json").stderr
    assert not (tmp_path / "nowhere").exists()
    assert "Expected a model shape" in run("bench", "engine", "--shapes", "huge", "--no-onnx").stderr
