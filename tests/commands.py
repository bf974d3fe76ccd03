"""The command line in tests: run it here or as a process of its own, on small models and files."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer.main
import typer.testing
from sources import jsonl, write
from tiny import tiny_encoder, tiny_model, tiny_reviews, tiny_tokenizer
from typer.testing import CliRunner, Result

from stretto.cli import app
from stretto.data import Dataset
from stretto.saving.points import OperatingPoint

# typer reads the signatures of all verbs at every call; once is enough for a process, and for the forks of it.
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)

QUICK = ["--num-train-epochs", "1", "--exit-epochs", "1", "--per-device-train-batch-size", "16"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Terminal(io.StringIO):
    """Where output goes that believes it is seen."""

    def isatty(self) -> bool:
        return True


def run(*args: Any, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception  # a bug, not a message
    return result


def stretto(*args: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto", *map(str, args)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


def write_reviews(path: Path, n: int, seed: int = 0) -> Path:
    data = tiny_reviews(n, seed)
    rows = [
        {"text": text, "label": ["bad", "good"][number]}
        for (text,), number in zip(data.texts, data.labels, strict=True)
    ]
    return write(path, jsonl(*rows))


def tagging_rows(data: Dataset) -> list[dict[str, Any]]:
    names = data.label_names or []
    pairs = zip(data.texts, data.labels or [], strict=True)
    return [{"tokens": list(words), "tags": [names[tag] for tag in tags]} for words, tags in pairs]


def question_rows(data: Dataset) -> list[dict[str, Any]]:
    pairs = zip(data.texts, data.labels or [], strict=True)
    return [{"question": q, "context": c, "answers": [gold._asdict() for gold in golds]} for (q, c), golds in pairs]


def save_encoder(folder: Path) -> Path:
    """A plain Hugging Face folder."""
    tiny_encoder("bert", 2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_model(folder: Path) -> Path:
    """A stretto folder, untrained but with operating points."""
    made = tiny_model("deebert")
    made.dial = 0.97
    made.operating_points = [
        OperatingPoint(dial, 0.9, cost, 4 * cost, {"accuracy": 0.9})
        for dial, cost in ((0.0, 1.0), (0.95, 0.6), (1.0, 0.25))
    ]
    made.save_pretrained(folder)
    return folder
