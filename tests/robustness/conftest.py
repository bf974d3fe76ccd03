"""Tiny models and files that all cases share; each is made once and only read."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import save_encoder, save_model, write_reviews
from sources import jsonl, write
from tiny import tiny_model


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: encoder (plain Hugging Face), model (deebert), adaptive (length_adaptive), depths (depth_mi).
    Files: train.jsonl and test.jsonl (texts, labels), rationales.jsonl."""
    folder = tmp_path_factory.mktemp("shared")
    save_encoder(folder / "encoder")
    save_model(folder / "model")
    tiny_model("length_adaptive").save_pretrained(folder / "adaptive")
    tiny_model("depth_mi").save_pretrained(folder / "depths")
    write_reviews(folder / "train.jsonl", 64)
    write_reviews(folder / "test.jsonl", 40, seed=1)
    marked = {"tokens": ["a", "good", "film"], "rationale": [0, 1, 0], "label": "good"}
    write(folder / "rationales.jsonl", jsonl(marked, marked))
    return folder
