"""Exported graphs answer as the packed engine does, whatever is beside a sequence, or the export says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from tiny import TAGS, random_inputs, tiny_model

from stretto.deploy.onnx import export_onnx, quantise
from stretto.deploy.onnx_graphs import PARTS, line_above
from stretto.deploy.onnx_runner import CONTRACT, OnnxModel
from stretto.errors import StrettoError
from stretto.tasks import Tokens

LENGTHS = [3, 17, 9, 30]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """PABEE keeps notes between layers, and the second stage has two layers and an exit in its middle."""
    model = tiny_model("pabee", "electra", n_layers=3)
    folder = tmp_path_factory.mktemp("onnx")
    model.save_pretrained(folder / "model")
    done = run("export", folder / "model", "--onnx", folder / "graphs", "--dial", 1, "--stages", 2)
    assert done.exit_code == 0 and "wrote 2 graphs" in done.stderr, done.stderr
    return model, folder / "graphs"


def answers(exported: OnnxModel, dial: float) -> tuple[Any, Any]:
    inputs = random_inputs(LENGTHS, types=False)
    return exported.run(inputs.input_ids, inputs.attention_mask, dial=dial)


@pytest.mark.parametrize("dial", [0.0, 1.0])
def test_stages_answer_as_the_packed_engine(staged: tuple[Any, Path], dial: float) -> None:
    model, folder = staged
    wanted = model.run(random_inputs(LENGTHS, types=False), dial)
    logits, depth = answers(OnnxModel(folder), dial)
    np.testing.assert_allclose(logits, wanted.logits, atol=1e-4)
    assert depth.tolist() == wanted.trace.depth.tolist()
    if dial == 1.0:
        assert len(set(depth.tolist())) > 1, "nothing is shown if all leave at one layer"


def test_int8_stages_are_close(staged: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = staged
    copy = shutil.copytree(folder, tmp_path / "int8")
    before = sum(file.stat().st_size for file in copy.glob("*.onnx"))
    for graph in copy.glob("*.onnx"):
        quantise(graph)
    assert sum(file.stat().st_size for file in copy.glob("*.onnx")) < before
    logits, _ = answers(OnnxModel(copy), 0.0)
    wanted = model.run(random_inputs(LENGTHS, types=False), 0.0).logits.numpy()
    assert 0 < np.abs(logits - wanted).max() < 0.1 * np.abs(wanted).max()


def test_a_graph_that_drops_answers_every_token(tmp_path: Path) -> None:
    model = tiny_model("constant_ratio", "mpnet", task=Tokens(TAGS), n_layers=2)
    contract = export_onnx(model, tmp_path / "graphs", dial=0.7)
    assert contract["form"] == "whole" and contract["labels"] == TAGS
    inputs = random_inputs(LENGTHS, types=False)
    logits, depth = OnnxModel(tmp_path / "graphs").run(inputs.input_ids, inputs.attention_mask)
    wanted, there = model.run(inputs, 0.7).logits, inputs.attention_mask.bool()
    np.testing.assert_allclose(logits[there], wanted[there], atol=1e-4)
    assert depth.tolist() == [2] * 4
    far = model.run(inputs, 1.0).logits
    assert (far - wanted)[there].abs().max() > 1e-2, "nothing was dropped"


def test_the_folder_is_complete_and_never_overwritten(staged: tuple[Any, Path]) -> None:
    _, folder = staged
    assert (folder / "tokenizer.json").exists()
    contract = json.loads((folder / CONTRACT).read_text())
    assert [(graph["first"], graph["last"]) for graph in contract["graphs"]] == [(1, 1), (2, 3)]
    assert contract["largest_difference"] < 1e-4 and contract["dial"] == 1.0
    again = run("export", folder.parent / "model", "--onnx", folder)
    assert again.exit_code == 1 and "which has content" in again.stderr


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("deebert", {"dial": 0.5, "whole": True}, "depth differs from text to text"),
        ("deebert", {"dial": 0.5, "stages": 5}, "1 to 4 stages"),
        ("deebert", {"dial": 0.5, "stages": 2, "whole": True}, "either --stages or --whole"),
        ("adapler", {"dial": 1.0}, "how many of its tokens"),
        ("constant_ratio", {"dial": 0.7, "stages": 2}, "only exits for --stages"),
        (
            "constant_ratio",
            {"dial": 0.7},
            "which a graph cannot look up. Train it with --select attention",
        ),
        ("full", {"dtype": "int4"}, "float32, int8"),
    ],
)
def test_what_cannot_be_exported_says_why(tmp_path: Path, method: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(StrettoError, match=reason):
        export_onnx(tiny_model(method), tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("counts", [lambda n: (0.3 * n).ceil(), lambda n: n.clamp(max=7), lambda n: n])
def test_columns_suffice_for_every_length(counts: Any) -> None:
    kept = torch.minimum(counts(torch.arange(65).double()).long(), torch.arange(65))
    slope, offset = line_above(kept)
    columns = torch.arange(65) * slope // PARTS + offset
    assert bool((columns >= kept).all())
    assert int(columns[-1]) <= int(kept[-1]) + 2
