"""Results: one JSON format for everything that is measured here.

A file holds the rows of one suite. A row is one trained model (or one contender of the engine benchmark): what it is,
how it was made, its operating points (`points`) and its times (`clock`). docs/benchmarks.md describes every field.

Times are never compared between rows: an entry of `clock` says how many times faster this row was than others that
were timed with it, in one process, in interleaved rounds. The figure is the median over the rounds of the ratio in each
round (`timing.ratio`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from stretto.bench.record import Record
from stretto.errors import StrettoError
from stretto.saving.files import write_text

FORMAT = 1
#: How many times faster: the one statistic, and the one of some older rows.
MEDIAN_OF_RATIOS, RATIO_OF_MEDIANS = "median of ratios", "ratio of medians"
#: Names in `Clock.ratios`, beside those of the engine benchmark's own baselines.
FULL, HF, HF_SORTED, ONNX, ONNX_INT8 = "full", "huggingface", "huggingface_sorted", "onnx", "onnx_int8"
CT2 = "ctranslate2"


@dataclass(frozen=True)
class Point(Record):
    """A dial with its measured score, cost and depth."""

    dial: float
    score: float
    cost: float
    depth: float
    metrics: dict[str, float] = field(default_factory=dict)
    split: str = "test"
    """'dev' or 'test'."""
    dtype: str = "float32"
    layers_per_token: float | None = None
    """Layers that an average token was updated in."""


@dataclass(frozen=True)
class Clock(Record):
    """One timing of a row: at one batch size and dial."""

    batch: int
    flops_ratio: float
    """How many times fewer FLOPs than the full model on the packed engine, on the inputs timed."""
    ratios: dict[str, float]
    """How many times faster than what: the full model on the packed engine, Hugging Face, …"""
    sequences: int
    rounds: int
    threads: int
    dial: float | None = None
    stream: bool = False
    """Whether several batches go through the layers together, as with a file in `stretto predict`."""
    dtype: str = "float32"
    products_tracking: float | None = None
    """`tracking` of the row's matrix products alone."""
    cpu: str | None = None
    statistic: str = MEDIAN_OF_RATIOS
    ms_per_text: float | None = None
    fastest_ms: float | None = None
    slowest_ms: float | None = None
    gflop: float | None = None
    """Of all the inputs timed."""
    tokens: int | None = None
    padded_tokens: int | None = None
    date: str | None = None

    @property
    def tracking(self) -> float:
        """The part of the FLOPs gain over the full model that became a gain in time."""
        return self.ratios[FULL] / self.flops_ratio


@dataclass(frozen=True)
class Load(Record):
    """A server under one load. Latencies count from the moment a request was due."""

    name: str
    """'capacity', '80 %' of it, 'burst', 'malformed'."""
    seconds: float
    offered: int
    answered: int
    refused: int
    """With a code from 400 to 599."""
    throughput: float
    """Answers per second."""
    memory_mb: float
    """The most that the server took."""
    rate: float | None = None
    """Requests per second on average; None: each client asks again when it is answered."""
    lost: int = 0
    """No answer at all."""
    unanswered: int | None = None
    """Accepted by the server, as it says itself, and never answered."""
    wrong: int = 0
    """Answers that differ from the model's own."""
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    refusal_p99_ms: float | None = None
    cpu_ms: float | None = None
    """CPU time of the server per answer."""
    late_p99_ms: float | None = None
    """How late the client sent a request: if this is large, the client was the limit and not the server."""


@dataclass(frozen=True)
class Row(Record):
    """One trained model, or one contender."""

    set: str
    model: str
    name: str
    """Unique for a set, model and seed: the method, or the method and a variant ('deebert-cls')."""
    method: str
    seed: int
    command: str
    versions: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    metric: str | None = None
    epochs: float | None = None
    """Of fine-tuning; those of other stages are in `settings`."""
    batch: int = 32
    """Examples of a training step."""
    layers: int | None = None
    """Of the encoder, where only its first ones were taken."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of a model that started from nothing."""
    n_train: int | None = None
    n_dev: int | None = None
    n_test: int | None = None
    machine: str | None = None
    hours: float | None = None
    """Of training and measuring, on the machine and threads it ran with."""
    points: list[Point] = field(default_factory=list)
    clock: list[Clock] = field(default_factory=list)
    load: list[Load] = field(default_factory=list)
    search: dict[str, Any] | None = None
    pretraining: dict[str, Any] | None = None
    rationales: dict[str, Any] | None = None
    answers: dict[str, Any] | None = None
    """How the test inputs were answered at one dial: histograms of depth and of tokens left."""

    guarantee: dict[str, Any] | None = None
    """How often a guarantee held over random draws, and what it cost (`bench/guarantee.py`)."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.set, self.model, self.name, self.seed

    def on(self, split: str = "test", dtype: str = "float32") -> list[Point]:
        """Its points on the dev or the test data, in the order of the dial."""
        return [point for point in self.points if point.split == split and point.dtype == dtype]

    def at(self, dial: float | None, split: str = "test") -> Point | None:
        return next((point for point in self.on(split) if point.dial == dial), None)

    def times(self, dial: float | None, dtype: str = "float32") -> dict[str, Clock]:
        """Its clock at a dial, by batch size and 'stream'."""
        found = [entry for entry in self.clock if entry.dial == dial and entry.dtype == dtype]
        return {"stream" if entry.stream else str(entry.batch): entry for entry in found}


@dataclass
class Results:
    """A file of rows, complete after each of them (`path` None: in memory only)."""

    suite: str
    rows: list[Row] = field(default_factory=list)
    path: Path | None = None
    comparison: dict[str, Any] | None = None
    """What follows from several rows: hypervolumes, agreement; see `summary.py`."""

    @classmethod
    def load(cls, path: Path) -> Results:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StrettoError(f"Expected results in '{path}', got: {error}. Write to another file.") from error
        if (
            not isinstance(content, dict)
            or content.get("format") != FORMAT
            or not isinstance(content.get("rows"), list)
        ):
            raise StrettoError(
                f"Expected results of format {FORMAT} in '{path}', got something else. Write to another file."
            )
        rows = [Row.read(row, f"{path.name}, row {i}") for i, row in enumerate(content["rows"])]
        if len({row.key for row in rows}) < len(rows):
            raise StrettoError(f"Expected each row of '{path}' once, got one twice. Delete one of them.")
        return cls(content.get("suite", ""), rows, path, content.get("comparison"))

    @classmethod
    def start(cls, suite: str, path: Path | None) -> Results:
        """Those in the file, or none yet."""
        if path is None or not path.exists():
            return cls(suite, path=path)
        found = cls.load(path)
        if found.suite != suite:
            raise StrettoError(
                f"Expected results of the suite '{suite}' in '{path}', got those of '{found.suite}'. "
                "Write to another file."
            )
        return found

    def get(self, *key: object) -> Row | None:
        return next((row for row in self.rows if row.key == key), None)

    def put(self, row: Row) -> None:
        """Add a row, or replace the one with its key, and write the file."""
        self.replace(row)
        self.write()

    def replace(self, row: Row) -> None:
        """The same, in memory only: for several rows that belong together."""
        places = [index for index, other in enumerate(self.rows) if other.key == row.key]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)

    def to_json(self) -> dict[str, Any]:
        content = {"format": FORMAT, "suite": self.suite, "rows": [row.to_json() for row in self.rows]}
        return content if self.comparison is None else {**content, "comparison": self.comparison}

    def write(self) -> None:
        """In one step: a kill leaves the old file or the new one."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, compact(self.to_json()) + "\n")


def load_all(folder: Path) -> dict[str, Results]:
    """The results of a folder by suite."""
    found = [Results.load(path) for path in sorted(folder.glob("*.json"))]
    return {results.suite: results for results in found}


def compact(content: Any) -> str:
    """Indented JSON with every innermost list and object on one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    for _ in range(2):  # an object of numbers; then one that holds such an object
        text = re.sub(r"[\[{][^\[\]{}]*(?:\{[^\[\]{}\n]*\}[^\[\]{}]*)*[\]}]", _one_line, text)
    return text


def _one_line(match: re.Match[str]) -> str:
    line = re.sub(r"\n\s*", " ", match[0])
    return re.sub(r"^([\[{]) | ([\]}])$", r"\1\2", line) if len(line) < 2000 else match[0]


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
