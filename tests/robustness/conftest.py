"""Tiny models and files that all cases share; each is made once and only read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import save_encoder, save_model, write_reviews
from sources import jsonl, write
from tiny import tiny_model

from stretto.saving import folder
from stretto.tasks import Task


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: encoder (plain Hugging Face), model (deebert), adaptive (length_adaptive), depths (depth_mi).
    Files: train.jsonl and test.jsonl (texts, labels), rationales.jsonl."""
    place = tmp_path_factory.mktemp("shared")
    save_encoder(place / "encoder")
    save_model(place / "model")
    tiny_model("length_adaptive").save_pretrained(place / "adaptive")
    tiny_model("depth_mi").save_pretrained(place / "depths")
    write_reviews(place / "train.jsonl", 64)
    write_reviews(place / "test.jsonl", 40, seed=1)
    marked = {"tokens": ["a", "good", "film"], "rationale": [0, 1, 0], "label": "good"}
    write(place / "rationales.jsonl", jsonl(marked, marked))
    return place


@pytest.fixture(autouse=True, scope="session")
def read_once(shared: Path) -> Iterator[None]:
    """The encoders and tokenizers of `shared` are read once, and then copied: most cases are about something else.
    Other folders, as the damaged ones, are read each time."""
    known: dict[Any, Any] = {}

    def remembered(load: Callable[..., Any]) -> Callable[..., Any]:
        def loaded(place: str, *args: Any, **settings: Any) -> Any:
            if Path(place).parent != shared:
                return load(place, *args, **settings)
            posed = [vars(arg) for arg in args if isinstance(arg, Task)]
            key = (load.__name__, place, str(posed), str(settings))
            if key not in known:
                known[key] = load(place, *args, **settings)
            return copy.deepcopy(known[key])

        return loaded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.model.load_encoder", remembered(folder.load_encoder))
        patch.setattr("stretto.model.load_tokenizer", remembered(folder.load_tokenizer))
        yield
