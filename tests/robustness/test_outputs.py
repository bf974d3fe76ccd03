"""No option that writes a file writes over an input: the same path, a symbolic link, a hard link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_type_hints

import pytest
from commands import run
from forked import stretto_child

from stretto.cli import app, benches
from stretto.cli.guard import output_file, output_place

#: Every option that writes a file, by verb; DATA is read, OUT is written.
WRITERS = [
    "evaluate MODEL DATA --json OUT",
    "evaluate MODEL DATA --plot OUT",
    "search MODEL DATA --json OUT",
    "search MODEL DATA --plot OUT",
    "calibrate MODEL DATA --cost 0.5 --json OUT",
    "predict MODEL DATA --output OUT",
    "export DATA --onnx new --json OUT",
    "explain MODEL DATA --json OUT",
    "explain MODEL DATA --html OUT",
    "depths DATA --json OUT",
    "depths DATA --plot OUT",
    "rationales MODEL DATA --json OUT",
    "rationales MODEL DATA --plot OUT",
    "bench model MODEL DATA --json OUT",
    "bench server MODEL DATA --json OUT",
    "bench guarantee MODEL DATA --json OUT",
    "pretrain DATA new --vocab-size 100 --json OUT",
    "methods DATA --json OUT",
    "compare DATA --results OUT",
]
#: Write a file, but read none.
READ_NOTHING = {("bench engine", "--json"), ("bench decoder", "--json"), ("backbones", "--json")}
#: Name a file, but read it.
READ_ALONE = {("serve", "--api_key_file")}
LINKS = {"path": None, "symlink": os.symlink, "hard link": os.link}


def fill(command: str, **names: Path | str) -> list[str]:
    return [str(names.get(word, word)) for word in command.split()]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("command", WRITERS)
def test_an_input_is_not_overwritten(command: str, link: str, shared: Path, tmp_path: Path) -> None:
    suffix = ".png" if "--plot" in command else ".jsonl"
    data, out = tmp_path / f"data{suffix}", tmp_path / f"link{suffix}"
    before = (shared / "test.jsonl").read_bytes()
    data.write_bytes(before)
    if make := LINKS[link]:
        make(data, out)
    else:
        out = tmp_path / ".." / tmp_path.name / data.name
    result = run(*fill(command, MODEL=shared / "model", DATA=data, OUT=out))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: Expected an output that is not the input, got '{out}' for both. Choose")
    assert data.read_bytes() == before
    assert out.is_symlink() == (link == "symlink")


def test_every_option_that_writes_is_in_the_table() -> None:
    verbs = {command.name: command.callback for command in app.registered_commands}
    verbs |= {f"bench {command.name}": command.callback for command in benches.registered_commands}
    found = set()
    for verb, function in verbs.items():
        for name, kind in get_type_hints(function, include_extras=True).items():
            for option in getattr(kind, "__metadata__", ()):
                if option.callback in (output_file, output_place):
                    found.add((verb, f"--{name}"))
                elif (verb, f"--{name}") not in READ_ALONE:
                    assert option.metavar not in ("FILE", "[FILE]"), f"{verb} --{name} is not guarded"
    table = {(" ".join(c.split()[: 2 if c.startswith("bench") else 1]), c.split()[-2]) for c in WRITERS}
    assert found == table | READ_NOTHING


@pytest.mark.parametrize("file", ["config.json", "stretto.json", "model.safetensors", "tokenizer.json", "vocab.txt"])
def test_files_of_a_model_are_not_overwritten(file: str, shared: Path) -> None:
    path = shared / "model" / file
    before = path.read_bytes() if path.exists() else None
    result = run("evaluate", shared / "model", shared / "test.jsonl", "--json", path)
    assert result.exit_code == 1
    assert f"Expected another file after --json, got '{path}', which belongs to the folder" in result.stderr
    assert (path.read_bytes() if path.exists() else None) == before


def test_one_file_for_two_outputs(shared: Path, tmp_path: Path) -> None:
    result = run("explain", shared / "model", "fine", "--json", tmp_path / "o", "--html", tmp_path / "." / "o")
    assert result.exit_code == 1
    assert "Expected a file for each of --json and --html, got" in result.stderr
    assert not list(tmp_path.iterdir())


def test_what_stdin_reads_is_not_overwritten(shared: Path, tmp_path: Path) -> None:
    data = tmp_path / "in.jsonl"
    data.write_text('{"text": "a good film"}\n')
    done = stretto_child("predict", shared / "model", "-", "--output", data, stdin=str(data))
    assert done.code == 1
    assert "Expected an output that is not the input" in done.stderr
    assert data.read_text() == '{"text": "a good film"}\n'
