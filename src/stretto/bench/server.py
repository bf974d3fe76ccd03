"""`stretto bench server`: what a server answers, and how fast, when requests come at random.

    stretto          `stretto serve`: requests come in between layers, answers leave one by one
    wait_for_batch   the same server, `--wait-for-batch`: let in and answered batch by batch
    stretto_int8     `stretto serve --dtype int8`
    huggingface      FastAPI and a Hugging Face pipeline (`plain_server`)
    onnx_int8        FastAPI and ONNX Runtime, int8

Each runs alone, as a process of its own on its own cores; the client has another core. Capacity is what it answers to
32 clients that ask again at once. Then requests come at random moments, on average at 50, 80 and 120 % of the capacity,
and in a burst of ten times the capacity. `wait_for_batch` gets the rates of `stretto`, all others those of their own
capacity. A contender on one kind of lengths is a row of the results. It is written when it is measured; a run with the
same file resumes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.bench.load import Client, Measured, Question, post
from stretto.bench.malformed import malformed
from stretto.bench.report.server import at
from stretto.bench.results import Load, Point, Results, Row, now
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.saving.digests import weights_digest
from stretto.saving.same_run import check_same
from stretto.saving.versions import cpu_name, known_versions

SUITE = "server"
SHARES = (0.5, 0.8, 1.2)
BURST = 10
CLIENTS = 32
#: Parts of the time of a phase that measuring the capacity and the burst take.
CAPACITY_TIME, BURST_TIME = 1 / 4, 1 / 6
OURS = {"stretto": [], "wait_for_batch": ["--wait-for-batch"], "stretto_int8": ["--dtype", "int8"]}
PLAIN = {"huggingface": "huggingface", "onnx_int8": "onnx"}
CONTENDERS = (*OURS, *PLAIN)
LENGTHS = ("short", "mixed")
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)/")


@dataclass(frozen=True)
class Bench:
    """What is measured."""

    folder: str
    model: AdaptiveModel
    texts: Sequence[str]
    labels: Sequence[str]
    set: str
    seconds: float = 60.0
    threads: int = 1
    seed: int = 0
    malformed: int = 5000

    @cached_property
    def plan(self) -> dict[str, Any]:
        """What must be the same for all rows of a file."""
        return {
            "seconds": self.seconds, "threads": self.threads, "clients": CLIENTS, "dial": self.model.dial,
            "weights": weights_digest(self.model), "texts": len(self.texts),
        }  # fmt: skip

    @property
    def model_name(self) -> str:
        return str(self.model.encoder.config.model_type)

    def set_of(self, lengths: str) -> str:
        return f"{self.set}, {lengths}"

    def questions(self, lengths: str, name: str) -> list[Question]:
        """Requests: the texts themselves, or 1 to 16 of them joined, short ones more often."""
        dice, texts, gold = random.Random(f"{self.seed}/{lengths}"), list(self.texts), list[str | None](self.labels)
        if lengths == "mixed":
            texts = [" ".join(dice.choices(self.texts, k=2 ** dice.randrange(5))) for _ in self.texts]
            gold = [None] * len(texts)
        expected: list[str | None] = [None] * len(texts)
        if name in ("stretto", "wait_for_batch"):  # in int8 an answer depends on the texts beside it
            expected = [each.label for each in self.model.predict(texts)]
        return [
            Question(post("/predict", {"inputs": text}), label, answer)
            for text, label, answer in zip(texts, gold, expected, strict=True)
        ]


def bench_server(
    bench: Bench, contenders: Sequence[str], lengths: Sequence[str], output: Path | None, say: Callable[[str], None]
) -> Results:
    """All contenders on all lengths that `output` does not hold yet; the results are written after each."""
    check(bench, contenders, lengths)
    results = Results.start(SUITE, output)
    for known in results.rows:
        before = {name: known.settings.get(name) for name in bench.plan}
        check_same(before, bench.plan, what="the measurements", place=output or Path())
    for kind in lengths:
        capacity: dict[str, float] = {}
        for name in contenders:
            found = results.get(bench.set_of(kind), bench.model_name, name, bench.seed)
            if found is not None:
                capacity[name] = at(found, "capacity").throughput
                say(f"{name:>15} on {kind} texts: measured before")
                continue
            questions = bench.questions(kind, name)
            with running(bench, name) as server:
                row = asyncio.run(measure(bench, server, questions, capacity, kind == lengths[0], say))
            results.put(described(bench, name, kind, row))
    return results


def check(bench: Bench, contenders: Sequence[str], lengths: Sequence[str]) -> None:
    for names, known, what in ((contenders, CONTENDERS, "contenders"), (lengths, LENGTHS, "lengths")):
        if unknown := [name for name in names if name not in known]:
            raise StrettoError(f"Expected {what} among {', '.join(known)}; got '{unknown[0]}'. Name some of them.")
    task = bench.model.task
    if task.answers != "sequence" or not task.label_names or getattr(task, "n_texts", 1) == 2:
        raise StrettoError(
            f"Expected a model that gives single texts a label, got one for the task {task.name}. Choose another model."
        )
    if "wait_for_batch" in contenders and contenders[0] != "stretto":
        raise StrettoError("Expected stretto as the first contender, whose rates wait_for_batch gets. Add it.")
    if (os.cpu_count() or 1) < 2:
        raise StrettoError("Expected two CPUs, one for the client, got one. Use another machine.")


# ---- one server --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Running:
    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def memory(self) -> float:
        """In MB, now."""
        import psutil

        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        import psutil

        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)


@contextmanager
def running(bench: Bench, name: str) -> Iterator[Running]:
    """A contender as a process; this process keeps off its cores."""
    if name in OURS:
        arguments = ["-m", "stretto", "serve", bench.folder, "--port", "0", *OURS[name]]
        arguments += ["--threads", str(bench.threads), "--dial", str(bench.model.dial)]
    else:
        arguments = ["-m", "stretto.bench.plain_server", PLAIN[name], bench.folder, str(bench.threads)]
    cores = sorted(os.sched_getaffinity(0))
    theirs = set(cores[: max(1, min(bench.threads, len(cores) - 1))])
    environment = {**os.environ, "OMP_NUM_THREADS": str(bench.threads), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file, env=environment)
        try:
            os.sched_setaffinity(process.pid, theirs)  # before it makes threads
            os.sched_setaffinity(0, set(cores) - theirs)
            yield Running(name, port_of(process, log), process, log)
        finally:
            os.sched_setaffinity(0, set(cores))
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def port_of(process: subprocess.Popen[bytes], log: Path, seconds: float = 300.0) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if found := ADDRESS.search(log.read_text(errors="replace")):
            return int(found[1])
        time.sleep(0.1)
    raise StrettoError(f"Expected a server that starts, got: {log.read_text(errors='replace')[-300:]}.")


# ---- its phases --------------------------------------------------------------------------------------------


async def measure(
    bench: Bench, server: Running, questions: Sequence[Question], capacity: dict[str, float], first: bool,
    say: Callable[[str], None],
) -> tuple[list[Load], list[Point]]:  # fmt: skip
    client, dice = Client(server.port), random.Random(bench.seed)
    loads: list[Load] = []
    points: list[Point] = []

    async def phase(name: str, rate: float | None, work: Any) -> Load:
        load = await watched(server, name, rate, work)
        loads.append(load)
        say(f"{server.name:>15} {name:>9}: {load.throughput:7.1f} answers/s, p50 {shown(load.p50_ms)} ms, "
            f"p95 {shown(load.p95_ms)} ms, answered {100 * load.answered / max(1, load.offered):.1f} %")  # fmt: skip
        return load

    if questions[0].label is not None:
        points.append(score_of(bench, server, await client.closed_loop(questions, 8, None)))
    await client.closed_loop(questions, CLIENTS, min(2.0, bench.seconds))  # warm up
    work = client.closed_loop(questions, CLIENTS, bench.seconds * CAPACITY_TIME)
    capacity[server.name] = (await phase("capacity", None, work)).throughput
    most = capacity["stretto" if server.name == "wait_for_batch" else server.name]
    for share in SHARES:
        work = client.open_loop(questions, share * most, bench.seconds, dice)
        await phase(f"{100 * share:.0f} %", share * most, work)
    work = client.open_loop(questions, BURST * most, bench.seconds * BURST_TIME, dice)
    await phase("burst", BURST * most, work)
    client.close()
    if server.name == "stretto" and first and bench.malformed:
        wrong = [Question(raw) for _, raw in malformed(bench.malformed, bench.seed)]
        await phase("malformed", None, Client(server.port, keep=False).closed_loop(wrong, CLIENTS, None))
        log = server.log.read_text(errors="replace")
        if server.get("/health") != {"status": "ok"} or "Traceback" in log:
            raise StrettoError(
                f"Expected a healthy server after malformed requests, got this in its log: {log[-2000:]}. "
                "This is a bug, please report it."
            )
    return loads, points


async def watched(server: Running, name: str, rate: float | None, work: Any) -> Load:
    """One phase, with the most memory that the server took in it."""
    most, ended, cpu = server.memory(), False, server.cpu()

    async def watch() -> None:
        nonlocal most
        while not ended:
            most = max(most, server.memory())
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    measured: Measured = await work
    ended, cpu = True, server.cpu() - cpu
    await watching
    replies = measured.replies
    answered = [reply for reply in replies if reply.status == 200]
    times = sorted(1000 * reply.seconds for reply in answered)
    refusals = sorted(1000 * reply.seconds for reply in replies if 400 <= reply.status < 600)
    unanswered = None
    if server.name in OURS:
        about = next(iter((await asyncio.to_thread(server.get, "/stats"))["models"].values()))
        unanswered = about["accepted"] - about["answered"] - about["waiting"] - about["live"]
    return Load(
        name=name, rate=rate, seconds=measured.seconds, offered=len(replies), answered=len(answered),
        refused=len(refusals), lost=sum(reply.status == 0 for reply in replies), unanswered=unanswered,
        wrong=sum(reply.question.expected not in (None, reply.label) for reply in answered),
        throughput=len(answered) / measured.seconds, p50_ms=quantile(times, 0.5), p95_ms=quantile(times, 0.95),
        p99_ms=quantile(times, 0.99), refusal_p99_ms=quantile(refusals, 0.99), memory_mb=round(most, 1),
        cpu_ms=round(1000 * cpu / len(answered), 3) if answered else None,
        late_p99_ms=quantile(sorted(1000 * reply.late for reply in replies), 0.99),
    )  # fmt: skip


def score_of(bench: Bench, server: Running, measured: Measured) -> Point:
    """The accuracy of its answers to all questions, asked once, and what our servers say of their cost."""
    score = statistics.fmean(reply.label == reply.question.label for reply in measured.replies)
    cost, depth, dial = 1.0, float(bench.model.backbone.n_layers), bench.model.method.dial.off
    if server.name in OURS:
        about = next(iter(server.get("/stats")["models"].values()))
        cost, dial = about["mean_cost"], bench.model.dial
        depth = sum((i + 1) * n for i, n in enumerate(about["depths"])) / sum(about["depths"])
    dtype = "int8" if server.name.endswith("int8") else "float32"
    return Point(dial=dial, score=score, cost=cost, depth=depth, dtype=dtype)


def quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else None


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def described(bench: Bench, name: str, lengths: str, measured: tuple[list[Load], list[Point]]) -> Row:
    loads, points = measured
    return Row(
        set=bench.set_of(lengths), model=bench.model_name, name=name,
        method=bench.model.method.name if name in OURS else name, seed=bench.seed, command="stretto bench server",
        versions=known_versions(), machine=cpu_name(), task=bench.model.task.name, metric="accuracy",
        settings={**bench.plan, "date": now()}, n_test=len(bench.texts), points=points, load=loads,
    )  # fmt: skip
