"""Answers in parts: the same as of one file, by one process or several; a job that is stopped or loses a worker."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet
import pytest
from commands import run
from sources import jsonl, write
from tiny import WORDS

from stretto import AdaptiveModel, StrettoError
from stretto.data.places import expand
from stretto.deploy.bulk import MANIFEST, WORK, Done, Job, Worker, alone, run_job
from stretto.deploy.cluster import on_ray, shares
from stretto.deploy.processes import in_processes

#: Lines of the inputs: the blocks of 4 are 2 + 1 + 3.
LINES = (7, 3, 11)


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    number = 0
    for name, count in zip("abc", LINES, strict=True):
        rows = []
        for _ in range(count):
            rows.append({"text": " ".join(WORDS[number % 9 : number % 9 + 1 + number % 5]), "id": number})
            number += 1
        write(tmp_path / f"in-{name}.jsonl", jsonl(*rows))
    return str(tmp_path / "in-*.jsonl")


@pytest.fixture
def job(inputs: str, model: Path, tmp_path: Path) -> Job:
    return Job(str(model), expand(inputs), str(tmp_path / "out"), 0.97, block_size=4, keep=("id",))


@pytest.fixture(scope="module")
def loaded(model: Path) -> AdaptiveModel:
    return AdaptiveModel.from_pretrained(model)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("part-*.jsonl")) for line in path.read_text().splitlines()]


def check_all(job: Job, loaded: AdaptiveModel, manifest: dict[str, Any]) -> None:
    """Every line was answered once, in order, as it is alone; the manifest counts them; nothing else is left."""
    rows = rows_in(Path(job.output))
    assert [row["id"] for row in rows] == list(range(sum(LINES)))
    expected = loaded.predict([row["text"] for row in rows], 0.97)
    assert [(row["label"], row["depth"]) for row in rows] == [(each.label, each.depth) for each in expected]
    assert [row["score"] for row in rows] == pytest.approx([each.score for each in expected], abs=1e-6)
    assert manifest["records"] == sum(LINES) and [part["records"] for part in manifest["parts"]] == [4, 3, 3, 4, 4, 3]
    assert [each["records"] for each in manifest["inputs"]] == list(LINES)
    left = sorted(path.name for path in Path(job.output).iterdir())
    assert left == sorted([MANIFEST, *(part["file"] for part in manifest["parts"])])


def test_the_command_writes_parts_and_does_nothing_twice(inputs: str, model: Path, tmp_path: Path) -> None:
    whole = run("predict", model, tmp_path / "in-c.jsonl", "--keep", "id", "--output", tmp_path / "whole.jsonl")
    assert whole.exit_code == 0, whole.stderr
    out = tmp_path / "out"
    command = [
        "predict",
        model,
        inputs,
        "--keep",
        "id",
        "--output",
        f"{out}/",
        "--block-size",
        4,
        "--format",
        "parquet",
    ]
    done = run(*command)
    assert done.exit_code == 0 and f"wrote 21 answers in 6 parts to {out}/" in done.stderr, done.stderr
    rows = [row for path in sorted(out.glob("part-00002-*")) for row in pyarrow.parquet.read_table(path).to_pylist()]
    assert [row["id"] for row in rows] == list(range(10, 21))
    assert [row["label"] for row in rows] == [
        json.loads(line)["label"] for line in (tmp_path / "whole.jsonl").read_text().splitlines()
    ]

    again = run(*command)
    assert again.exit_code == 0 and "6 of them before" in again.stderr
    other = run(*command, "--dial", 0)
    assert other.exit_code == 1 and "dial: 0.0, before 0.97" in other.stderr
    restarted = run(*command, "--dial", 0, "--restart")
    assert restarted.exit_code == 0 and "before" not in restarted.stderr


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("in-*.jsonl", ["--output", "out.jsonl"], "Expected a folder"),
        ("in-a.jsonl", ["--workers", "2"], "Expected a folder to write to with --workers"),
        ("in-a.jsonl", ["--ray", "auto"], "Expected a folder to write to with --ray"),
        ("nothing-*.jsonl", ["--output", "out/"], "Expected files that match"),
        ("in-a.jsonl", ["--output", "./"], "Expected an output folder that is not read"),
        ("in-a.jsonl", ["--output", "out/", "--format", "doc"], "Expected an output name ending in"),
        ("-", ["--output", "out/"], "got stdin"),
        ("s3:nothing://x/*", ["--output", "out/"], "Expected a URL that can be read"),
    ],
)
def test_what_cannot_be_done_in_parts_says_why(
    inputs: str, model: Path, tmp_path: Path, monkeypatch: Any, source: str, options: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("predict", model, source, *options)
    assert done.exit_code == 1 and reason in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in-a.jsonl", "in-b.jsonl", "in-c.jsonl"]


def test_a_stopped_job_skips_what_is_done(job: Job, loaded: AdaptiveModel) -> None:
    class Stopped(Exception):
        pass

    def stop_after_three(job: Job, finished: Any) -> Iterator[Done]:
        for number, done in enumerate(alone(job, finished, loaded)):
            if number == 3:  # its part is written, but nobody has taken note of it
                raise Stopped
            yield done

    with pytest.raises(Stopped):
        run_job(job, loaded, stop_after_three)
    assert (Path(job.output) / WORK).exists() and not (Path(job.output) / MANIFEST).exists()
    answered: list[Any] = []
    manifest = run_job(job, loaded, partial(alone, model=loaded), after=lambda done: answered.append(done.key))
    assert answered == [(2, 0), (2, 1), (2, 2)]
    check_all(job, loaded, manifest)


def test_a_bad_line_names_itself_and_can_be_corrected(job: Job, loaded: AdaptiveModel) -> None:
    second = Path(job.sources[1])
    good = second.read_text()
    second.write_text(good[:-5])
    with pytest.raises(StrettoError, match=r"in-b.jsonl:3: expected one JSON object"):
        run_job(job, loaded, partial(alone, model=loaded))
    second.write_text(good)
    answered: list[Any] = []
    manifest = run_job(job, loaded, partial(alone, model=loaded), after=lambda done: answered.append(done.key))
    assert answered == [(1, 0), (2, 0), (2, 1), (2, 2)]
    check_all(job, loaded, manifest)
    second.write_text(good + good)
    with pytest.raises(StrettoError, match="another inputs"):
        run_job(job, loaded, partial(alone, model=loaded))


def test_urls_are_read_too(job: Job, loaded: AdaptiveModel) -> None:
    remote = fsspec.filesystem("memory")
    for source in job.sources:
        remote.put_file(source, f"/texts/{Path(source).name}")
    sources = expand("memory://texts/in-*.jsonl")
    assert sources == tuple(f"memory:///texts/in-{name}.jsonl" for name in "abc")
    job = Job(**{**vars(job), "sources": sources})
    check_all(job, loaded, run_job(job, loaded, partial(alone, model=loaded)))


def test_processes_lose_a_worker_and_nothing_else(job: Job, loaded: AdaptiveModel) -> None:
    killed: list[int] = []

    def kill_once(done: Done) -> None:
        if not killed:
            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    manifest = run_job(job, loaded, partial(in_processes, workers=2), after=kill_once)
    assert killed
    check_all(job, loaded, manifest)


def test_no_block_is_lost_if_the_pool_breaks_while_one_is_read(
    job: Job, loaded: AdaptiveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block: without it all others are there, and a gap would not be seen."""
    answering, submitted = Worker(job, loaded), list[Any]()

    class Pool:
        def submit(self, _: Any, block: Any) -> Future[Done]:
            submitted.append(block.key)
            if block.key == (2, 2) and submitted.count(block.key) == 1:
                raise BrokenProcessPool
            future: Future[Done] = Future()
            future.set_result(answering(block))
            return future

        def shutdown(self, **_: Any) -> None: ...

    monkeypatch.setattr("stretto.deploy.processes.start_pool", lambda *_: Pool())
    check_all(job, loaded, run_job(job, loaded, partial(in_processes, workers=2)))
    assert submitted.count((2, 2)) == 2


def test_ray_loses_a_worker_and_nothing_else(job: Job, loaded: AdaptiveModel) -> None:
    """Two actors and a reading task on two CPUs; the actor that gave the first answer is killed."""
    killed: list[int] = []

    def kill_once(done: Done) -> None:
        if not killed:
            killed.append(int(done.worker.rpartition("-")[2]))
            os.kill(killed[0], signal.SIGKILL)

    with at_most(240):
        manifest = run_job(job, loaded, partial(on_ray, address="local", workers=2), after=kill_once)
    assert killed[0] != os.getpid()
    check_all(job, loaded, manifest)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """What waits for a CPU that nobody gives it waits for ever."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("cpus", [1, 2, 8])
@pytest.mark.parametrize("workers", [1, 2, 7, 30])
def test_reading_always_gets_a_cpu(cpus: float, workers: int) -> None:
    reading, answering = shares(cpus, workers)
    assert 0 < answering <= 1 and reading + workers * answering <= cpus
