"""The saved folder: damage is told by file, no pickle is read, a failed save leaves no trace, the card is true."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import tiny_config, tiny_encoder, tiny_model, tiny_tokenizer
from transformers import AutoModelForMaskedLM

from stretto import AdaptiveModel, StrettoError
from stretto.training.pretraining import Summary, pretraining_card

POINT = {"dial": 0.1, "score": None, "cost": 1.0, "depth": 4, "metrics": {}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("file", ["model.safetensors", "stretto.safetensors", "stretto.json", "config.json"])
def test_a_truncated_file_is_named(file: str, saved: Path) -> None:
    path = saved / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StrettoError, match=r"again|Check the name"):
        AdaptiveModel.from_pretrained(saved)


def test_settings_that_are_not_utf_8(saved: Path) -> None:
    (saved / "stretto.json").write_bytes(b'{"format": "caf\xe9"}')
    with pytest.raises(StrettoError, match=r"a complete stretto\.json"):
        AdaptiveModel.from_pretrained(saved)


def test_a_format_of_the_future(saved: Path) -> None:
    path = saved / "stretto.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 99'))
    with pytest.raises(StrettoError, match="format 99"):
        AdaptiveModel.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dial": None}, r"a number as 'dial' of stretto\.json in '.*', got None\. Copy"),
        ({"dial": "0.3"}, r"a number as 'dial' of stretto\.json in '.*', got '0\.3'\. Copy"),
        ({"config": []}, r"an object as 'config' of stretto\.json"),
        ({"method": None}, r"a string as 'method' of stretto\.json"),
        ({"points": {}}, r"a list as 'points' of stretto\.json"),
        ({"points": [3]}, r"a complete stretto\.json .* Copy"),
        ({"points": [{"dial": 0.1}]}, r"a complete stretto\.json .*an operating point without its score.* Copy"),
        ({"points": [{**POINT, "cost": "low"}]}, r"a complete stretto\.json .*'low' as the cost .* Copy"),
        ({"points": [{**POINT, "latency": {}}]}, r"a complete stretto\.json .* Copy"),
        ({"points": [{**POINT, "certificate": {"p_values": 3}}]}, r"a complete stretto\.json .* Copy"),
        ({"provenance": "none"}, r"an object as 'provenance' of stretto\.json"),
        ({"task": None}, r"an object as 'task' of stretto\.json"),
        ({"task": {"stride": 3}}, r"stretto\.json .* to name the task, got .*KeyError: 'name'.* Copy"),
        ({"task": {"name": "ner"}}, r"stretto\.json .* to name the task, got .*classification, .* Copy"),
        ({"task": {"name": 3}}, r"stretto\.json .* to name the task, got .*classification, .* Copy"),
        ({"task": {"name": "classification", "stride": 3}}, r"stretto\.json .* argument 'stride'.* Copy"),
        ({"surplus": 1}, r"a complete stretto\.json .*surplus.* Copy"),
    ],
)
def test_damaged_settings(change: dict[str, Any], expected: str, saved: Path) -> None:
    settings = json.loads((saved / "stretto.json").read_text())
    (saved / "stretto.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(StrettoError, match=expected):
        AdaptiveModel.from_pretrained(saved)


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    tiny_encoder("bert").save_pretrained(tmp_path)
    with pytest.raises(StrettoError, match="tokenizer"):
        AdaptiveModel.from_pretrained(tmp_path, "full")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[]", "null", "{", ""])
def test_a_damaged_tokenizer(content: str, file: str, saved: Path) -> None:
    (saved / file).write_text(content)
    with pytest.raises(StrettoError, match=rf"a readable tokenizer in '{saved}', got \w+: .*Copy .*{file}"):
        AdaptiveModel.from_pretrained(saved)


@pytest.mark.parametrize("content", ["{}", '{"added_tokens": []}'])
def test_a_tokenizer_without_its_parts(content: str, saved: Path) -> None:
    (saved / "tokenizer.json").write_text(content)
    with pytest.raises(StrettoError, match=r"Expected a readable tokenizer in .*, got \w+: .*Copy tokenizer\.json"):
        AdaptiveModel.from_pretrained(saved)


@pytest.mark.parametrize("content", ["{}", "[]", "null", "3", '{"model_type": "bert", "hidden_size": "wide"}'])
def test_a_damaged_config(content: str, saved: Path) -> None:
    (saved / "config.json").write_text(content)
    with pytest.raises(StrettoError, match=r"a readable Hugging Face config \(config\.json\) in '.*', got \w+: "):
        AdaptiveModel.from_pretrained(saved)


def test_no_pickle_is_read_from_a_stretto_folder(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    torch.save(weights, saved / "pytorch_model.bin")
    AdaptiveModel.from_pretrained(saved)  # it is not looked at
    (saved / "model.safetensors").unlink()
    with pytest.raises(StrettoError, match=r"as safetensors, the only .* no file named model\.safetensors .*again"):
        AdaptiveModel.from_pretrained(saved)


def test_a_plain_model_to_start_from_may_hold_pytorch_weights(tmp_path: Path) -> None:
    encoder = tiny_encoder("bert")
    encoder.config.save_pretrained(tmp_path)
    torch.save(encoder.state_dict(), tmp_path / "pytorch_model.bin")
    tiny_tokenizer().save_pretrained(tmp_path)
    model = AdaptiveModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, encoder.state_dict()[key]) for key, value in model.encoder.state_dict().items())


# ---- saving


@pytest.mark.parametrize("dial", [99, float("nan"), "0.3", None])
def test_a_dial_that_could_not_predict_is_not_saved(dial: Any, tmp_path: Path) -> None:
    model = tiny_model()
    model.dial = dial
    with pytest.raises(StrettoError, match=r"Expected .* dial.*, got '?(99|nan|0\.3|None)"):
        model.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_leaves_the_old_model(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(StrettoError, match="No space left on device"):
        model.save_pretrained(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_folder_with_other_things_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(StrettoError, match="so that nothing is lost"):
        tiny_model().save_pretrained(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_what_others_put_beside_a_model_stays(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    tiny_model().save_pretrained(place)
    (place / "notes.txt").write_text("dial 0.3 in production")
    (place / ".git").mkdir()
    (place / ".git" / "HEAD").write_text("main")
    (place / "model-00001-of-00002.safetensors").write_text("a part of the model that was")
    (place / "README.md").write_text("the card that was")
    tiny_model("pabee").save_pretrained(place)
    assert (place / "notes.txt").read_text() == "dial 0.3 in production"
    assert (place / ".git" / "HEAD").read_text() == "main"
    assert not (place / "model-00001-of-00002.safetensors").exists()
    assert "pabee" in (place / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# ---- the card


@pytest.mark.parametrize("method", ["deebert", "adapler", "depth_mi"])
def test_a_card_names_the_method_and_what_is_known_of_the_training(method: str, tmp_path: Path) -> None:
    model = tiny_model(method)
    model.provenance = {"training examples": 128, "seed": 7}
    model.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert f"tags: [adaptive-computation, {method}]" in card  # not all methods exit early
    assert "## How it was made\n\n- training examples: 128\n- seed: 7\n" in card


def test_a_pretraining_card_counts_layers_that_groups_do_not_share_evenly() -> None:
    config = tiny_config("alberta")
    config.num_hidden_groups = 3
    summary = Summary(
        perplexity=9.0, loss=2.2, texts=10, held_out_texts=2, windows=10, tokens=90, steps=5, epochs=1.0,
        parameters=1000, vocabulary=50, seed=42,
    )  # fmt: skip
    assert "4 layers in 3 groups, 32 wide" in pretraining_card(AutoModelForMaskedLM.from_config(config), summary)
