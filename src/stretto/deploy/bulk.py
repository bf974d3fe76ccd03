"""Answer many files in blocks, with one process or several. A stopped job can be resumed.

A block is up to `block_size` records of one input. Its answers are one file, `part-00003-00017.jsonl` (input 3, block
17), which gets its name when it is complete. Names sort in the order of the inputs: `cat part-*.jsonl` has all answers
in order. A journal (`.unfinished/`) lists the finished blocks; a resumed job skips them. At the end `manifest.json`
lists all parts with their counts.

Three functions answer the blocks of a job, in order: `alone` here, `in_processes` on this machine (`processes`),
`on_ray` on a cluster (`cluster`).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from stretto.data.columns import Layout, Texts
from stretto.data.places import local_copy, stamp_of
from stretto.data.records import GUESS, Columns, Record, read
from stretto.deploy.predict import Predictor
from stretto.deploy.rows import write_rows
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.saving.digests import weights_digest
from stretto.saving.files import write_json
from stretto.saving.journal import Journal
from stretto.saving.place import locked, read_plan
from stretto.saving.same_run import as_json, check_same

MANIFEST, WORK = "manifest.json", ".unfinished"
PART = re.compile(r"part-\d{5}-\d{5}\..+")
FORMAT = 1

#: An input and its block, both from 0.
Key = tuple[int, int]
#: Changes when an input changes: its size and time of change.
Stamp = list[Any]


@dataclass(frozen=True)
class Job:
    """Inputs, settings and output. Every worker gets a copy, so names of files are absolute."""

    model: str
    sources: tuple[str, ...]
    output: str
    dial: float
    ending: str = ".jsonl"
    block_size: int = 10_000
    batch_size: int = 32
    probabilities: bool = False
    dtype: str = "float32"
    columns: Columns = GUESS
    keep: tuple[str, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `AdaptiveModel.generation`."""
    layout: type[Layout] = Texts

    def part(self, key: Key) -> Path:
        return Path(self.output) / f"part-{key[0]:05d}-{key[1]:05d}{self.ending}"

    def plan(self, model: AdaptiveModel) -> dict[str, Any]:
        """What must be the same when the job is resumed."""
        settings = {name: value for name, value in asdict(self).items() if name not in ("output", "layout")}
        return as_json({**settings, "weights": weights_digest(model)})


@dataclass(frozen=True)
class Block:
    key: Key
    stamp: Stamp
    records: list[Record]


@dataclass(frozen=True)
class Done:
    """The counts of a finished block."""

    key: Key
    stamp: Stamp
    records: int
    truncated: int
    flops: float
    full_flops: float
    worker: str
    """Host and process."""


#: Takes a job and the stamps of its finished blocks; yields the other blocks when they are done, in order.
Answering = Callable[[Job, Mapping[Key, Stamp]], Iterable[Done]]


# ---- reading and answering ---------------------------------------------------------------------------------


def unfinished(job: Job, finished: Mapping[Key, Stamp]) -> Iterator[Block]:
    """The blocks of all inputs that are not finished; one at a time is in memory."""
    for number in range(len(job.sources)):
        yield from blocks_of(job, number, finished)


def blocks_of(job: Job, number: int, finished: Mapping[Key, Stamp]) -> Iterator[Block]:
    """The unfinished blocks of one input. A finished block counts only while its input is unchanged."""
    source = job.sources[number]
    stamp = stamp_of(source)
    with local_copy(source) as path:
        records = read(path, layout=job.layout, columns=job.columns, labelled=False, keep=job.keep)
        for index in count():
            some = list(islice(records, job.block_size))
            if not some:
                return
            if finished.get((number, index)) != stamp:
                yield Block((number, index), stamp, some)


class Worker:
    """Answers one block after another with a model."""

    def __init__(self, job: Job, model: AdaptiveModel) -> None:
        self.job, self.model = job, model
        self.name = f"{socket.gethostname()}-{os.getpid()}"

    def __call__(self, block: Block) -> Done:
        job = self.job
        predictor = Predictor(self.model, job.dial, batch_size=job.batch_size, probabilities=job.probabilities)
        write_rows(predictor.rows(block.records), job.part(block.key))
        return Done(
            block.key, block.stamp, predictor.count, predictor.truncated, predictor.flops, predictor.full_flops,
            self.name,
        )  # fmt: skip


def alone(job: Job, finished: Mapping[Key, Stamp], model: AdaptiveModel) -> Iterator[Done]:
    return map(Worker(job, model), unfinished(job, finished))


# ---- a job from its start to its manifest ------------------------------------------------------------------


def run_job(
    job: Job, model: AdaptiveModel, answering: Answering, *, restart: bool = False,
    after: Callable[[Done], None] = lambda done: None,
) -> dict[str, Any]:  # fmt: skip
    """Answer the unfinished blocks, and return the manifest. `after` is called with each finished block."""
    output, plan = Path(job.output), job.plan(model)
    with locked(output):
        if restart:
            discard(output)
        if (output / MANIFEST).exists():
            return complete_already(job, plan)
        with Journal(output / WORK, plan) as journal:
            stamps = {
                (int(key[0]), int(key[1])): entry["stamp"]
                for key, entry in journal.entries.items()
                if job.part((int(key[0]), int(key[1]))).exists()
            }
            for done in answering(job, stamps):
                journal.add(done.key, asdict(done))
                after(done)
            manifest = manifest_of(job, plan, [Done(**entry) for entry in journal.entries.values()])
            listed = {part["file"] for part in manifest["parts"]}
            for path in output.iterdir():  # remove parts of an input that has become shorter
                if PART.fullmatch(path.name) and path.name not in listed:
                    path.unlink()
            write_json(output / MANIFEST, manifest)
            journal.remove()
    return manifest


def manifest_of(job: Job, plan: dict[str, Any], blocks: list[Done]) -> dict[str, Any]:
    """Counts by input and by part. A block that is missing, or of an input that has changed, is an error."""
    now = [stamp_of(source) for source in job.sources]
    found = {(done.key[0], done.key[1]): done for done in blocks if done.stamp == now[done.key[0]]}
    keys = sorted(found)
    for key, before in zip(keys, [(-1, 0), *keys], strict=False):
        if key != (before[0], before[1] + 1) and key != (before[0] + 1, 0):
            raise StrettoError(
                f"Expected the inputs to stay as they are while they are read, got another '{job.sources[key[0]]}'. "
                "Run the command again."
            )
    parts = [
        {
            "file": job.part(key).name, "source": job.sources[key[0]], "first": key[1] * job.block_size,
            "records": found[key].records, "truncated": found[key].truncated, "worker": found[key].worker,
        }
        for key in keys
    ]  # fmt: skip
    full = sum(done.full_flops for done in found.values())
    return {
        "format": FORMAT,
        "records": sum(part["records"] for part in parts),
        "truncated": sum(part["truncated"] for part in parts),
        "cost": sum(done.flops for done in found.values()) / full if full else None,
        "inputs": [
            {
                "source": source, "stamp": now[number],
                "records": sum(part["records"] for part in parts if part["source"] == source),
                "parts": sum(part["source"] == source for part in parts),
            }
            for number, source in enumerate(job.sources)
        ],
        "parts": parts,
        "plan": plan,
    }  # fmt: skip


def complete_already(job: Job, plan: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a finished job, if it is this one and its inputs are unchanged."""
    output = Path(job.output)
    manifest: dict[str, Any] | None = read_plan(output / MANIFEST)
    if manifest is None or manifest.get("format") != FORMAT:
        raise StrettoError(
            f"Expected a manifest of `stretto predict` in '{output / MANIFEST}', got something else. "
            "Choose another output folder, or add --restart."
        )
    stamps = {each["source"]: each["stamp"] for each in manifest["inputs"]}
    now = {source: stamp_of(source) for source in job.sources}
    before = {**manifest["plan"], "inputs": stamps}
    check_same(before, {**plan, "inputs": now}, what="the finished job", place=output)
    if missing := [part["file"] for part in manifest["parts"] if not (output / part["file"]).exists()]:
        raise StrettoError(
            f"Expected all parts that '{output / MANIFEST}' lists, got no '{missing[0]}'. Add --restart to start again."
        )
    return manifest


def discard(output: Path) -> None:
    """Remove the files of an earlier job, and no others."""
    (output / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(output / WORK, ignore_errors=True)
    if output.is_dir():
        for path in output.iterdir():
            if PART.fullmatch(path.name):
                path.unlink()
