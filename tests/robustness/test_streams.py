"""Closed streams, file names that are not UTF-8, full disks: for every verb one line on stderr, exit code not 0."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT, QUICK
from forked import CLOSED, Ended, stretto_child
from sources import CSV

SUITE = Path(__file__).parents[2] / "benchmarks/suites/quick.yaml"
#: Every verb with what it needs.
VERBS = {
    "train": "train TRAIN --model ENCODER --output OUT",
    "pretrain": "pretrain TRAIN OUT --vocab-size 60 --max-steps 1",
    "evaluate": "evaluate MODEL TEST --dials 0",
    "search": "search ADAPTIVE TEST --output OUT --iterations 1 --population 2 --mutations 1 --crossovers 1",
    "predict": "predict MODEL TEST",
    "explain": "explain MODEL fine",
    "depths": "depths DEPTHS",
    "rationales": "rationales MODEL RATIONALES",
    "bench": "bench model MODEL TEST --batch-sizes 2 --rounds 1 --sequences 2 --dials 0",
    "bench engine": "bench engine --shapes tiny --mixes sst --batch-sizes 1 --rounds 1 --dtypes float32 --no-onnx",
    "calibrate": "calibrate MODEL TEST --cost 1",
    "export": "export MODEL --onnx OUT",
    "compare": "compare SUITE --plan",
    "methods": "methods",
    "backbones": "backbones",
    "help": "--help",
}


def fill(command: str, shared: Path, folder: Path) -> list[str]:
    names = {
        "TRAIN": shared / "train.jsonl", "TEST": shared / "test.jsonl", "ENCODER": shared / "encoder",
        "MODEL": shared / "model", "ADAPTIVE": shared / "adaptive", "DEPTHS": shared / "depths",
        "RATIONALES": shared / "rationales.jsonl", "OUT": folder / "out", "SUITE": SUITE,
    }  # fmt: skip
    return [str(names.get(word, word)) for word in command.split()]


def one_line(ended: Ended, *parts: str) -> None:
    """It failed, and says so in one line that holds these parts."""
    lines = ended.stderr.splitlines()
    assert ended.code == 1, ended
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], ended.stderr
    assert not any(word in ended.stderr for word in ("Traceback", "Exception ignored"))
    for part in parts:
        assert part in lines[-1], lines[-1]


@pytest.mark.parametrize("verb", VERBS)
def test_a_closed_stdout(verb: str, shared: Path, tmp_path: Path) -> None:
    ended = stretto_child(*fill(VERBS[verb], shared, tmp_path), stdout=CLOSED)
    assert ended.code == 1
    assert ended.stderr == "error: Expected an open stdout, got a closed one. Redirect it to a file or /dev/null.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    ["predict MODEL", "predict MODEL -", "explain MODEL -", "evaluate MODEL -", "train - --model ENCODER --output OUT"],
)
def test_a_closed_stdin_that_is_read(command: str, shared: Path, tmp_path: Path) -> None:
    ended = stretto_child(*fill(command, shared, tmp_path), stdin=CLOSED)
    one_line(ended, "Expected texts on stdin, got a closed stdin. Name a file, or pipe the texts in.")
    assert ended.stdout == ""
    assert not list(tmp_path.iterdir())


def test_a_closed_stdin_that_is_not_read(shared: Path, tmp_path: Path) -> None:
    """No file takes its number: what is written stays whole."""
    out = tmp_path / "answers.jsonl"
    ended = stretto_child("predict", shared / "model", shared / "test.jsonl", "--output", out, stdin=CLOSED)
    assert ended.code == 0, ended.stderr
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 40


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_shell_that_closes_streams(closed: str, shared: Path) -> None:
    """Python itself starts with the streams closed."""
    script = f"{sys.executable} -m stretto --help {closed}"
    done = subprocess.run(["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == (1 if ">&- " in f"{closed} ".replace("2>&-", "") else 0)
    assert "Traceback" not in done.stderr
    assert ("Usage" in done.stdout) == (done.returncode == 0)


# ---- names -------------------------------------------------------------------------------------------------

ODD = b"caf\xe9"


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".txt", ".csv.gz", ".parquet"])
def test_a_data_file_whose_name_is_not_utf_8(ending: str, shared: Path, tmp_path: Path) -> None:
    """It is read, or refused; its name is shown with the byte escaped."""
    missing = os.path.join(os.fsencode(tmp_path), ODD + ending.encode())
    one_line(stretto_child("predict", shared / "model", missing), "caf\\udce9", "file not found")
    with open(missing, "wb") as file:
        file.write(CSV.encode())
    ended = stretto_child("predict", shared / "model", missing)
    if ended.code == 1:
        one_line(ended, "caf\\udce9" if ending != ".jsonl" else ":1: expected one JSON object per line")
    else:
        assert ending in (".csv", ".txt")
        assert "good film" in ended.stdout


def test_outputs_whose_names_are_not_utf_8(shared: Path, tmp_path: Path) -> None:
    data = os.path.join(os.fsencode(tmp_path), ODD + b".jsonl")
    shutil.copy(shared / "test.jsonl", data)
    out = os.path.join(os.fsencode(tmp_path), b"out" + ODD + b".json")
    plot = out + b".png"
    ended = stretto_child("evaluate", shared / "model", data, "--dials", "0,1", "--json", out, "--plot", plot)
    assert ended.code == 0, ended.stderr
    with open(out, encoding="utf-8") as file:
        assert json.load(file)["data"] == os.fsdecode(data)
    assert os.path.getsize(plot) > 1000
    ended = stretto_child("evaluate", shared / "model", data, "--dials", "0", "--json")
    assert json.loads(ended.stdout)["data"] == os.fsdecode(data)


@pytest.mark.parametrize("verb", ["predict", "explain", "evaluate", "bench", "calibrate", "export"])
def test_a_model_whose_name_is_not_utf_8(verb: str, shared: Path, tmp_path: Path) -> None:
    place = os.path.join(os.fsencode(tmp_path), ODD)
    shutil.copytree(os.fsencode(shared / "model"), place)
    args = fill(VERBS[verb], shared, tmp_path)
    ended = stretto_child(*(place if word == str(shared / "model") else word for word in args))
    one_line(ended, "Expected the name of a model in UTF-8, got '", "caf\\udce9'. Rename the folder")


@pytest.mark.parametrize("verb", ["train", "pretrain", "search"])
def test_an_output_folder_whose_name_is_not_utf_8(verb: str, shared: Path, tmp_path: Path) -> None:
    out = os.path.join(os.fsencode(tmp_path), ODD)
    ended = stretto_child(*(out if word.endswith("/out") else word for word in fill(VERBS[verb], shared, tmp_path)))
    one_line(ended, "Expected the name of a model in UTF-8")
    assert not list(tmp_path.iterdir())


# ---- full disks --------------------------------------------------------------------------------------------

#: A command, and the bytes a file may have.
FULL = {
    "train": (f"{VERBS['train']} {' '.join(QUICK)}", 30_000),
    "train, at its end": (
        f"{VERBS['train']} --method full --max-steps 1 --save-strategy no --eval-strategy no",
        30_000,
    ),
    "pretrain": (VERBS["pretrain"], 3_000),
    "search": (VERBS["search"], 3_000),
    "predict": (f"{VERBS['predict']} --output OUT.jsonl", 1000),
    "evaluate --json": (f"{VERBS['evaluate']} --json OUT.json", 200),
    "evaluate --plot": (f"{VERBS['evaluate']} --plot OUT.png", 200),
    "explain --html": (f"{VERBS['explain']} --html OUT.html", 200),
    "calibrate": (VERBS["calibrate"], 200),
    "export": (VERBS["export"], 3_000),
    "bench --json": (f"{VERBS['bench']} --json OUT.json", 200),
}


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk(case: str, shared: Path, tmp_path: Path) -> None:
    command, most = FULL[case]
    args = [word.replace("OUT.", f"{tmp_path}/out.") for word in fill(command, shared, tmp_path)]
    ended = stretto_child(*args, most_bytes=most)
    one_line(ended, "Expected to write '", "File too large")
    assert {path.name for path in tmp_path.iterdir()} <= {"out.work", "out.search"}
