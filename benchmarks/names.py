"""How the files of results are found and what their sets, metrics and columns are called in tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SET_NAMES = {
    "sst2": "SST-2", "trec": "TREC", "mrpc": "MRPC", "stsb": "STS-B", "ag_news": "AG News", "imdb": "IMDB", "mr": "MR",
    "wnut17": "WNUT-17", "squad": "SQuAD",
}  # fmt: skip
METRIC_NAMES = {"accuracy": "accuracy, %", "pearson": "Pearson × 100"}
HF = "time_gain_vs_huggingface"
STREAM = "stream"  # beside batch sizes: the largest batches, several at a time


def title(about: dict[str, Any]) -> str:
    """Of the part `about` of a file: set and encoder."""
    return f"{SET_NAMES[about['set']]}, {about['encoder']}"


def metric(about: dict[str, Any]) -> str:
    name = about["main_metric"]
    return METRIC_NAMES.get(name, f"{name} × 100")
