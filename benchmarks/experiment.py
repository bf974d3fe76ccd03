"""One dataset, one encoder: a folder of trained models and a JSON of results, written row by row.

Shared by the benchmark scripts of this folder, which say what is trained and what is asked of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from names import STREAM

from stretto import AdaptiveModel, __version__, train
from stretto.bench.baselines import GemmLimit, hugging_face, padded_flops
from stretto.bench.model import packed_contender
from stretto.bench.timing import Contender, interleaved
from stretto.bench.timing import Timed as Result
from stretto.data import Dataset, load, sample, split_off
from stretto.data.batches import batches, windows
from stretto.saving.versions import cpu_name
from stretto.state import Inputs
from stretto.tasks import TASKS

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 8, 32)
#: How many times more texts are timed in a stream.
STREAM_FACTOR = 8
DEFAULT_SEED = 42


@dataclass(frozen=True)
class Set:
    """A dataset of a folder with <set>.<split>.jsonl.gz."""

    train: str
    dev: str | None  # None: a tenth of train
    test: str | None  # None: another tenth of train
    epochs: float
    task: str = "classification"
    limit: int | None = None
    """Most training examples, a random sample."""
    test_limit: int | None = None
    """Most test examples, a random sample."""
    chosen_on: int | None = None
    """Examples to choose dials on, from the part of train that `limit` leaves unused; None: the dev data."""
    max_length: int | None = None
    """Tokens per input, if fewer than the encoder takes."""
    bf16: bool = False
    """Train under bfloat16 autocast where the processor computes in it; everything is measured in float32."""
    attention_dropout: float | None = None
    """While training; None: the encoder's own."""
    accumulate: int = 1
    """Parts a training batch of 32 is computed in: long texts need the memory."""
    timed: int = 64
    """Test inputs that are timed, in batches by themselves; in a stream eight times as many."""
    rounds: int = 5
    """Of timing."""


@dataclass(frozen=True)
class Timed:
    """A model at a dial, to be timed."""

    key: str
    point: str
    model: AdaptiveModel
    dial: float

    @property
    def name(self) -> str:
        """The same for two points with one dial: they are timed together."""
        return f"{self.key} {self.dial}"


def without(dataset: Dataset, part: Dataset) -> Dataset:
    """What is left of a dataset without some of its examples."""
    taken = set(part.where)
    rest = [index for index, where in enumerate(dataset.where) if where not in taken]
    labels = None if dataset.labels is None else [dataset.labels[index] for index in rest]
    return dataclasses.replace(
        dataset, texts=[dataset.texts[index] for index in rest], labels=labels,
        where=[dataset.where[index] for index in rest],
    )  # fmt: skip


class Experiment:
    kind: ClassVar[str]
    """The name of the script, of its results and of the folder of its models."""
    batch_sizes: ClassVar[tuple[int, ...]] = BATCHES

    def __init__(self, data: Path, encoder: str, name: str, spec: Set, runs: Path, seed: int) -> None:
        self.encoder, self.name, self.spec, self.seed = encoder, name, spec, seed
        run = f"{Path(encoder).name}-{name}" + ("" if seed == DEFAULT_SEED else f"-seed{seed}")
        self.runs = runs / run
        self.json = RESULTS / f"{self.kind}-{run}.json"
        self.rows: dict[str, Any] = json.loads(self.json.read_text()) if self.json.exists() else {}

        def part(split: str, names: list[str] | None = None, limit: int | None = None) -> Dataset:
            found = load(str(data / f"{split}.jsonl.gz"), task=TASKS[spec.task], label_names=names)
            return found if limit is None else sample(found, limit, seed)

        whole = part(spec.train)
        self.train = whole if spec.limit is None else sample(whole, spec.limit, seed)
        names = whole.label_names
        self.choosing = None if spec.chosen_on is None else sample(without(whole, self.train), spec.chosen_on, seed)
        if spec.test is None:
            self.train, self.test = split_off(self.train, 0.1, DEFAULT_SEED)  # the same for every seed
        else:
            self.test = part(spec.test, names, spec.test_limit)
        if spec.dev is None:
            self.train, self.dev = split_off(self.train, 0.1, seed)
        else:
            self.dev = part(spec.dev, names)
        self.task = TASKS[spec.task].posed_by(self.train)

    @property
    def trains_in_bf16(self) -> bool:
        """A processor without bfloat16 would be several times slower at it than at float32: oneDNN emulates it."""
        return self.spec.bf16 and bool(torch.cpu.get_capabilities().get("avx512_bf16"))

    def write(self, key: str, value: Any) -> None:
        self.rows[key] = value
        self.rows["about"] = {
            "set": self.name,
            "encoder": Path(self.encoder).name,
            "main_metric": self.task.main_metric,
            "test_examples": len(self.test),
            "seed": self.seed,
            "stretto": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "command": f"python benchmarks/{self.kind}.py DATA {Path(self.encoder).name} {self.name}"
            + ("" if self.seed == DEFAULT_SEED else f" --seed {self.seed}"),
        }
        temporary = self.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.rows, indent=1) + "\n")
        os.replace(temporary, self.json)

    def fit(self, key: str, start: str, skip: tuple[str, ...], settings: dict[str, Any]) -> AdaptiveModel:
        """Train (or load) the model of one row."""
        folder = self.runs / key
        if not folder.exists():
            task = self.task if start == self.encoder or key.startswith("full") else None  # or it knows the task
            torch.manual_seed(self.seed)
            model = AdaptiveModel.from_pretrained(
                start, key.split("-")[0], task=task, max_length=self.spec.max_length, **settings
            )
            parts = self.spec.accumulate
            train(
                model, self.train, self.dev, folder, skip=skip, progress=False, seed=self.seed,
                bf16=self.trains_in_bf16, attention_dropout=self.spec.attention_dropout,
                per_device_train_batch_size=32 // parts, gradient_accumulation_steps=parts,
            )  # fmt: skip
        return AdaptiveModel.from_pretrained(folder)

    def run(self, only: list[str]) -> None:
        """Train and measure every row that is not there yet (of these methods, if any are named)."""
        raise NotImplementedError

    def timed(self) -> Iterator[Timed]:
        """What is to be timed."""
        raise NotImplementedError

    def whole(self) -> Timed:
        """The model that the others are compared with: all layers, all tokens."""
        full = AdaptiveModel.from_pretrained(self.runs / "full")
        return Timed("full", "", full, full.method.dial.off)

    def clock(self) -> None:
        """Wall-clock of each model at its dial against the full one, packed and as Hugging Face runs it: in batches of
        each size by themselves, and in a stream of the largest, as `stretto predict` takes a file."""
        full, jobs, largest = self.whole(), list(self.timed()), max(self.batch_sizes)
        found: dict[str, Any] = {}
        for name, size in {**{str(size): size for size in self.batch_sizes}, STREAM: largest}.items():
            for (key, point), row in self.times(full, jobs, size, stream=name == STREAM).items():
                where = found.setdefault(key, {})
                (where.setdefault(point, {}) if point else where)[name] = row
        cpu = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
        about = {
            "sequences": self.n_timed(stream=False), "streamed": self.n_timed(stream=True),
            "rounds": self.spec.rounds, "threads": torch.get_num_threads(), "cpu": cpu,
        }  # fmt: skip
        self.write("clock", {**about, "methods": found})

    def n_timed(self, stream: bool) -> int:
        return min(self.spec.timed * (STREAM_FACTOR if stream else 1), len(self.test))

    def times(
        self, full: Timed, jobs: Sequence[Timed], size: int, stream: bool
    ) -> dict[tuple[str, str], dict[str, float]]:
        """(row, point) -> its gains in time. The full model has one point, without a name."""
        with_products = size == max(self.batch_sizes) and not stream
        texts = random.Random(self.seed).sample(self.test.texts, self.n_timed(stream))
        contenders = list(self.contenders(full, jobs, texts, size, stream, with_products))
        timed = interleaved(contenders, self.spec.rounds, random.Random(size))
        results = {result.contender.name: result for result in timed}
        found = {("full", ""): {"time_gain_vs_huggingface": ratio(results["huggingface"], results["full"])}}
        for job in jobs:
            flops, time = gains(results["full"], results[job.name])
            row = {"flops_gain": flops, "time_gain": time, "tracking": time / flops}
            row["time_gain_vs_huggingface"] = ratio(results["huggingface"], results[job.name])
            if with_products:
                flops, time = gains(results[products_of("full")], results[products_of(job.name)])
                row["tracking_of_products"] = time / flops
            found[job.key, job.point] = row
        return found

    def contenders(
        self, full: Timed, jobs: Sequence[Timed], texts: Sequence[Any], size: int, stream: bool, with_products: bool
    ) -> Iterator[Contender]:
        """Hugging Face, the full model, every job once for each dial; with the matrix products of all but the first."""

        def pool(model: AdaptiveModel, taken: Callable[..., Iterator[Inputs]]) -> list[Inputs]:
            return list(taken(model.encode(texts).features, model.tokenizer.pad_token_id, size))

        padded, model = pool(full.model, batches), full.model
        yield Contender(
            "huggingface", "float32", hugging_face(model.encoder, padded), padded_flops(padded, model.backbone)
        )
        for name, job in {"full": full, **{job.name: job for job in jobs}}.items():
            inputs = pool(job.model, windows if stream else batches)
            yield packed_contender(name, job.model, job.model.method, job.dial, inputs, size)
            if with_products:
                traces = [job.model.packed.run(batch, job.model.method, job.dial).trace for batch in inputs]
                limit = GemmLimit(job.model.packed)
                yield Contender(products_of(name), "float32", limit.steps(traces), limit.flops(traces))


def products_of(name: str) -> str:
    """What the matrix products alone of a contender are called."""
    return f"products of {name}"


def gains(slow: Result, fast: Result) -> tuple[float, float]:
    """How many times less a contender computes, and how many times faster it is."""
    return slow.contender.flops / fast.contender.flops, ratio(slow, fast)


def ratio(slow: Result, fast: Result) -> float:
    """The median over the rounds: in one round both meet the same machine."""
    return statistics.median(a / b for a, b in zip(slow.times, fast.times, strict=True))


def main(experiment: type[Experiment], sets: Mapping[str, Set], description: str | None) -> None:
    """The command line of a script."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model")
    parser.add_argument("sets", nargs="+", choices=list(sets))
    parser.add_argument("--only", nargs="*", default=[], help="rows to run (default: all)")
    parser.add_argument("--no-clock", action="store_true", help="leave out the wall-clock part")
    parser.add_argument("--only-clock", action="store_true", help="measure what has been trained")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs") / experiment.kind, help="where trained models are kept"
    )
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.sets:
        found = experiment(arguments.data, arguments.model, name, sets[name], arguments.runs, arguments.seed)
        if not arguments.only_clock:
            found.run(arguments.only)
        if not arguments.no_clock:
            found.clock()
