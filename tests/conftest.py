"""What the tests of the command line share: a saved encoder, a saved model and labelled reviews.

Importing this file loads no library: the process that only distributes tests (`-n`) need not wait for them."""

from __future__ import annotations

import functools
import gc
from pathlib import Path

import amx  # noqa: F401 (before torch)
import pytest


@functools.cache
def register() -> None:
    from stretto.backbones import register_architectures

    register_architectures()


def pytest_collectstart() -> None:
    register()


def pytest_collection_finish() -> None:
    """The modules and tests stay: nobody has to look through them for garbage (each training collects twice)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from commands import save_encoder

    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from commands import save_model

    return save_model(tmp_path_factory.mktemp("model") / "saved")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """test.jsonl, with train.jsonl beside it."""
    from commands import write_reviews

    folder = tmp_path_factory.mktemp("data")
    write_reviews(folder / "train.jsonl", 64)
    return write_reviews(folder / "test.jsonl", 40, seed=1)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny data are not trained for a hundred steps."""
    monkeypatch.setattr("stretto.training.plan.FEWEST_STEPS", 1)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a training measures four texts instead of seconds."""
    monkeypatch.setattr("stretto.bench.faster.SECONDS", 0.0)
