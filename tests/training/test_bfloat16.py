"""A processor on which bfloat16 ends the process is recognised before the training starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model, tiny_reviews

from stretto.errors import StrettoError
from stretto.training import bfloat16
from stretto.training.run import train

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "PROBE", DIES)
    bfloat16.survives_bf16.cache_clear()


def test_the_probe_survives_without_amx() -> None:
    bfloat16.survives_bf16.cache_clear()
    assert bfloat16.survives_bf16()


@pytest.mark.usefixtures("dies")
def test_a_training_that_would_be_killed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"ends the process\. Set ONEDNN_MAX_CPU_ISA"):
        train(tiny_model("full"), tiny_reviews(8), tiny_reviews(8, seed=1), tmp_path / "out", progress=False, bf16=True)
    assert not any(tmp_path.iterdir())
    bfloat16.survives_bf16.cache_clear()
