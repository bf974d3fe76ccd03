"""Sources of data for the tests: files, stdin and a stand-in for the hub."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from stretto.data import read

datasets.disable_progress_bars()

CSV = "text,label\ngood film,pos\ndull film,neg\n"


def write(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def pairs(source: Any, **options: Any) -> list[tuple[tuple[str, ...], Any]]:
    return [(record.texts, record.label) for record in read(source, **options)]


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def give_stdin(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))


def hub_dataset() -> datasets.Dataset:
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["world", "sports", "arts"])}
    )
    rows = {"sentence": ["a", "b", "c"], "label": [1, 0, 1]}
    return datasets.Dataset.from_dict(rows, features=features)


def give_hub(monkeypatch: pytest.MonkeyPatch, *splits: str) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(name: str, config: str | None, streaming: bool) -> Any:
        calls.append((name, config, streaming))
        return datasets.IterableDatasetDict({split: hub_dataset().to_iterable_dataset() for split in splits})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("stretto.data.sources.reachable", lambda: True)
    return calls
