"""Nothing from a model is ever executed: each file that can name code holds a trap that leaves a marker."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from commands import run
from sources import write
from tiny import tiny_config
from typer.main import get_command

from stretto import AdaptiveModel, StrettoError
from stretto.cli import app
from stretto.saving.folder import load_config, load_encoder, load_tokenizer
from stretto.saving.trust import NO_CODE
from stretto.tasks import Classification

TRAP = "import pathlib\npathlib.Path({marker!r}).touch()\nclass Trap: ...\n"
#: What the files may say; "deep" is how a config inside another one would.
AUTO_MAPS: dict[str, dict[str, Any]] = {
    "config.json": {"model_type": "unheard-of", "auto_map": {"AutoConfig": "trap.Trap"}},
    "config.json, known": {"auto_map": {"AutoConfig": "trap.Trap", "AutoModelForSequenceClassification": "trap.Trap"}},
    "config.json, deep": {"encoder": [{"auto_map": {"AutoConfig": "trap.Trap"}}]},
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}},
    "tokenizer_config.json, list": {"tokenizer_class": "Trap", "auto_map": ["trap.Trap", "trap.Trap"]},
}
COMMANDS = {
    "predict": "predict MODEL",
    "evaluate": "evaluate MODEL DATA",
    "train": "train DATA --model MODEL --output OUT",
    "train on": "train DATA --model MODEL --skip backbone --output OUT",
    "search": "search MODEL DATA",
    "explain": "explain MODEL text",
    "bench": "bench model MODEL DATA",
    "depths": "depths MODEL",
    "rationales": "rationales MODEL DATA",
    "pretrain": "pretrain DATA OUT --tokenizer MODEL",
    "demo": "demo --model MODEL --data DATA --output OUT",
    "calibrate": "calibrate MODEL DATA --cost 0.5",
    "predict many": "predict MODEL DATA --output OUT --workers 2 --format csv",
    "serve": "serve MODEL",
    "export": "export MODEL --onnx OUT",
    "compare": "compare SUITE --model MODEL --data FOLDER --output OUT",
    "bench guarantee": "bench guarantee MODEL DATA",
    "bench server": "bench server MODEL DATA",
}
#: These start from a plain encoder.
FROM_ENCODER = ("train", "demo", "compare")
#: These write down their settings before they open a model.
NOTED = ("demo", "compare")
SUITE = "name: s\nabout: a\nmodel: m\nsets: {a: {train: train, test: train, epochs: 1}}\nrecipes: {full: {}}\n"


def plant(kind: str, source: Path, target: Path) -> Path:
    """A copy of a model whose file names code, and the code; returns where its marker would be."""
    shutil.copytree(source, target)
    file = target / kind.partition(",")[0]
    file.write_text(json.dumps({**json.loads(file.read_text()), **AUTO_MAPS[kind]}))
    marker = target.parent / "executed"
    write(target / "trap.py", TRAP.format(marker=str(marker)))
    return marker


@pytest.fixture(scope="session")
def suite(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite, with its data beside it."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "train.jsonl.gz").write_bytes(gzip.compress((shared / "train.jsonl").read_bytes()))
    return write(folder / "suite.yaml", SUITE)


def test_every_verb_that_opens_a_model_is_here() -> None:
    verbs = {name for name in get_command(app).commands if name not in ("methods", "backbones")}
    assert verbs == {command.split()[0] for command in COMMANDS.values()}


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("kind", AUTO_MAPS)
def test_no_command_executes_code(kind: str, verb: str, shared: Path, suite: Path, tmp_path: Path) -> None:
    marker = plant(kind, shared / ("encoder" if verb in FROM_ENCODER else "model"), tmp_path / "trapped")
    names = {
        "MODEL": tmp_path / "trapped", "DATA": shared / "train.jsonl", "OUT": f"{tmp_path / 'out'}/",
        "SUITE": suite, "FOLDER": suite.parent,
    }  # fmt: skip
    result = run(*(names.get(word, word) for word in COMMANDS[verb].split()), stdin="y\ny\n")
    assert result.exit_code == 1
    assert "error: Expected a model that runs without code of its own, got" in result.stderr
    assert f"whose {kind.partition(',')[0]} names code to execute" in result.stderr
    assert "[y/N]" not in result.output
    assert not marker.exists()
    assert {path.name for path in tmp_path.iterdir()} - {"out" if verb in NOTED else ""} == {"trapped"}


@pytest.mark.parametrize("method", [None, "deebert", "length_adaptive+deebert"])
@pytest.mark.parametrize("folder", ["model", "encoder"])
@pytest.mark.parametrize("kind", AUTO_MAPS)
def test_python_executes_no_code(kind: str, folder: str, method: str | None, shared: Path, tmp_path: Path) -> None:
    marker = plant(kind, shared / folder, tmp_path / "trapped")
    task = None if folder == "model" else Classification(["bad", "good"])
    with pytest.raises(StrettoError, match="stretto never executes code from a model"):
        AdaptiveModel.from_pretrained(tmp_path / "trapped", method, task=task)
    assert not marker.exists()


@pytest.mark.parametrize("kind", AUTO_MAPS)
def test_the_hub_executes_no_code(kind: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as the hub's cache holds it."""
    cached, revision = tmp_path / "models--owner--trapped", "0" * 40
    marker = plant(kind, shared / "model", cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    write(cached / "refs" / "main", revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(StrettoError, match=r"got 'owner/trapped', whose .* names code to execute"):
        AdaptiveModel.from_pretrained("owner/trapped")
    assert not marker.exists()


@pytest.mark.parametrize("loader", ["config", "model", "tokenizer"])
def test_transformers_may_not_ask_either(
    loader: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the file to change after it was read (as on the hub), transformers still neither asks nor runs it."""
    kind = "tokenizer_config.json, list" if loader == "tokenizer" else "config.json"
    marker = plant(kind, shared / "model", tmp_path / "trapped")
    monkeypatch.setattr("stretto.saving.folder.refuse_code", lambda _: None)
    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    place = str(tmp_path / "trapped")
    with suppress(StrettoError):  # or it takes a class of its own
        match loader:
            case "config":
                load_config(place)
            case "model":
                task = Classification(["bad", "good"])
                load_encoder(place, tiny_config("bert"), task, new_labels=False, safetensors_only=True)
            case _:
                load_tokenizer(place)
    assert not asked
    assert not marker.exists()


def test_the_trap_works(shared: Path, tmp_path: Path) -> None:
    """It would spring if transformers were allowed to run it."""
    marker = plant("config.json", shared / "model", tmp_path / "trapped")
    assert NO_CODE == {"trust_remote_code": False}
    with pytest.raises(AttributeError):  # a Trap is no config
        transformers.AutoConfig.from_pretrained(tmp_path / "trapped", trust_remote_code=True)
    assert marker.exists()
