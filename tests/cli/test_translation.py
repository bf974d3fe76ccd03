"""The command line with models that write texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run

from stretto.bench.decoder import SCRIPTS, ScriptedBlocks, bench_decoder
from stretto.bench.report.texts import decoder_table, speed_table
from stretto.bench.results import FULL, HF
from stretto.model import AdaptiveModel

SIZES = (
    "--d-model", 16, "--ffn-dim", 32, "--encoder-layers", 1, "--decoder-layers", 3, "--attention-heads", 2,
    "--vocabulary", 300, "--max-positions", 16,
)  # fmt: skip
PAIRS = [("eins zwei", "one two"), ("drei", "three"), ("zwei drei", "two three"), ("eins", "one")] * 4


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("\n".join(json.dumps({"src": a, "tgt": b}) for a, b in PAIRS))
    return file


@pytest.fixture(scope="module")
def model(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "out"
    done = run(
        "train", pairs, "--dev", pairs, "--task", "seq2seq", "--method", "depth_adaptive", "--mechanism", "confidence",
        "--model", "scratch:marian", *SIZES, "--num-train-epochs", 1, "--output", place,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return place


def test_train_evaluate_predict_explain_and_search(model: Path, pairs: Path, tmp_path: Path) -> None:
    limit = ("--max-new-tokens", 5)
    measured = run("evaluate", model, pairs, "--dials", "0,1", *limit, "--json", tmp_path / "points.json")
    assert measured.exit_code == 0 and "tok:13a" in measured.output, measured.output
    points = json.loads((tmp_path / "points.json").read_text())
    assert points["main_metric"] == "bleu" and "tok:13a" in points["signatures"]["bleu"]
    assert points["points"][0]["metrics"].keys() >= {"bleu", "chrf", "average_exit", "mflops_per_token"}
    assert points["points"][1]["metrics"]["mflops_per_token"] > 0

    answered = run("predict", model, pairs, "--num-beams", 2, *limit, "--output", tmp_path / "answers.jsonl")
    assert answered.exit_code == 0, answered.output
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len(PAIRS) and answers[0].keys() >= {"text", "score", "depth", "cost"}

    explained = run("explain", model, "eins zwei", "--dial", 0.5, *limit, "--html", tmp_path / "page.html")
    assert explained.exit_code == 0 and "decoder blocks on average" in explained.output, explained.output
    page = (tmp_path / "page.html").read_text()
    assert 'class="token"' in page and "it left at, of 3" in page
    listed = json.loads(run("explain", model, "eins zwei", *limit, "--json").stdout)
    assert len(listed["tokens"]) == len(listed["exits"]) and set(listed["exits"]) <= {1, 2, 3}

    searched = run("search", model, pairs, "--draws", 50, "--output", tmp_path / "searched")
    assert searched.exit_code == 0, searched.output
    found = AdaptiveModel.from_pretrained(tmp_path / "searched")
    thresholds = found.method.config.thresholds
    assert thresholds and all(len(each) == 2 for each in thresholds)
    assert len(found.operating_points) == len(thresholds) + 1 and found.operating_points[0].cost == 1.0
    # without translations the same are found: the full model's own take their place
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": source}) + "\n" for source, _ in PAIRS))
    alone = run("search", model, texts, "--draws", 50, "--output", tmp_path / "alone")
    assert alone.exit_code == 0, alone.output
    again = AdaptiveModel.from_pretrained(tmp_path / "alone")
    assert again.method.config.thresholds == thresholds and math.isnan(again.operating_points[0].score)
    refused = run("search", model, texts, "--objective", "score", "--output", tmp_path / "score")
    assert refused.exit_code == 1, refused.output
    scored = run("search", model, pairs, "--objective", "score", "--draws", 50, "--output", tmp_path / "score")
    assert scored.exit_code == 0, scored.output


def test_search_lengths_and_pairs(model: Path, pairs: Path, tmp_path: Path) -> None:
    """By score; options of another kind of search are refused."""
    long = tmp_path / "long.jsonl"  # enough tokens to drop some
    long.write_text("".join(json.dumps({"src": " ".join([a] * 4), "tgt": b}) + "\n" for a, b in PAIRS[:4]))
    for method, options in (
        ("length_adaptive", ("--iterations", 1, "--mutations", 1, "--crossovers", 0, "--population", 2)),
        ("length_adaptive+depth_adaptive", ()),
    ):
        AdaptiveModel.from_pretrained(model, method).save_pretrained(tmp_path / method)
        found = run("search", tmp_path / method, long, *options, "--json", tmp_path / "found.json")
        assert found.exit_code == 0, found.output
        points = json.loads((tmp_path / "found.json").read_text())["points"]
        assert points[0]["cost"] == 1.0 and {"bleu"} <= points[-1]["metrics"].keys()
    refused = run("search", tmp_path / method, pairs, "--objective", "divergence")
    assert refused.exit_code == 1 and "got a model that writes texts. Search by score" in refused.output
    for folder, options, answer in (
        (tmp_path / method, ("--draws", 5), "--draws only with a search for thresholds, got a search for pairs"),
        (model, ("--patience", 5, "--restart"), "--patience, --restart only with a search for lengths"),
        (tmp_path / "length_adaptive", ("--draws", 5), "got a search for lengths. Leave it out."),
    ):
        refused = run("search", folder, pairs, *options)
        assert refused.exit_code == 1 and answer in refused.output, refused.output


def test_flags_of_texts_are_refused_elsewhere(model: Path, pairs: Path, tmp_path: Path) -> None:
    bad = run("train", pairs, "--model", "scratch:marian", "--output", tmp_path / "out")
    assert bad.exit_code != 0 and "--task seq2seq" in bad.output, bad.output
    bad = run("train", pairs, "--task", "seq2seq", "--model", model, "--d-model", 8, "--output", tmp_path / "out")
    assert bad.exit_code != 0 and "starts from nothing" in bad.output
    bad = run("export", model, "--onnx", tmp_path / "out")
    assert bad.exit_code != 0 and "got a model that writes texts" in bad.output
    bad = run("predict", model, pairs, "--max-new-tokens", 99, "--output", tmp_path / "out.jsonl")
    assert bad.exit_code != 0 and "at most 16 new tokens" in bad.output
    bad = run("explain", model, "eins", "--text-b", "zwei")
    assert bad.exit_code != 0 and "Expected one text" in bad.output
    assert not {"out", "out.jsonl"} & {path.name for path in tmp_path.iterdir()}


def test_bench_decoder_measures_all_contenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.bench.decoder.NEW", 3)
    said: list[str] = []
    settings: dict[str, Any] = {"shapes": ["tiny"], "rounds": 3, "threads": 1, "progress": False, "say": said.append}
    monkeypatch.setattr("stretto.bench.decoder.is_installed", lambda: False)
    results = bench_decoder(tmp_path / "decoder.json", batches=[4], **settings)
    assert "not installed" in said[0]
    assert {row.name for row in results.rows} == {HF, FULL, *SCRIPTS}
    assert all({clock.dtype for clock in row.clock} == {"float32", "int8"} for row in results.rows)
    gains = {row.name: row.clock[0].flops_ratio for row in results.rows}
    assert gains["exit_1.5"] > gains["exit_3"] > 1 == gains[FULL]
    assert len(decoder_table(results.rows)) == 2 * len(results.rows)
    table = speed_table(results.rows)
    assert "| tiny | int8 | 4 |" in table and "exit 1.5 of 6" in table and "3 new tokens each" in table
    again = bench_decoder(tmp_path / "decoder.json", batches=[4], **settings)  # all is there
    assert [row.key for row in again.rows] == [row.key for row in results.rows]


def test_scripts_leave_where_they_say() -> None:
    for name, script in SCRIPTS.items():
        blocks = ScriptedBlocks(script).block_of(torch.arange(12).unsqueeze(1), torch.arange(8))
        assert float(blocks.float().mean()) == float(name.removeprefix("exit_"))
