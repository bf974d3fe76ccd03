"""`stretto bench server`: loads on a server in a thread, the plain servers, and malformed requests."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import run
from serving import serving
from tiny import tiny_model, tiny_reviews

from stretto.bench.load import Client, Question
from stretto.bench.malformed import KINDS, malformed
from stretto.bench.plain_server import create_app as plain_app
from stretto.bench.plain_server import hugging_face, onnx_runtime
from stretto.bench.report.server import load_table, summary_table
from stretto.bench.results import Load, Results, Row
from stretto.bench.server import CONTENDERS, Bench, Running, bench_server, described, measure
from stretto.deploy.server import create_app
from stretto.errors import StrettoError


@pytest.fixture(scope="module")
def bench() -> Bench:
    model = tiny_model("deebert", n_layers=2)
    model.dial = 0.97
    data = tiny_reviews(12)
    labels = [model.task.label_names[number] for number in data.labels]
    return Bench("unused", model, [text for (text,) in data.texts], labels, "reviews", seconds=0.4, malformed=60)


def row(bench: Bench, app: Any, name: str, capacity: dict[str, float], log: Path) -> Row:
    with serving(app) as port:
        server = Running(name, port, SimpleNamespace(pid=os.getpid()), log)  # type: ignore[arg-type]
        found = asyncio.run(measure(bench, server, bench.questions("short", name), capacity, True, lambda line: None))
    return described(bench, name, "short", found)


def test_loads_are_measured_and_reported(bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    capacity: dict[str, float] = {}
    rows = [row(bench, create_app({"reviews": bench.model}), name, capacity, log) for name in CONTENDERS[:2]]
    rows.append(row(bench, plain_app(lambda text: [{"label": "good", "score": 1.0}]), "huggingface", capacity, log))
    for each in rows:
        assert [load.name for load in each.load][:5] == ["capacity", "50 %", "80 %", "120 %", "burst"]
        for load in each.load[:4]:
            assert load.answered == load.offered > 0 and not load.lost and not load.wrong and not load.unanswered
            assert load.p50_ms is not None and load.p99_ms is not None and 0 < load.p50_ms <= load.p99_ms
        assert each.load[1].rate == pytest.approx(0.5 * capacity["stretto" if each is rows[1] else each.name])
    last = rows[0].load[-1]
    assert (last.name, last.offered, last.refused) == ("malformed", 60, 60)
    right = [each.label for each in bench.model.predict(list(bench.texts))]
    score = sum(a == b for a, b in zip(right, bench.labels, strict=True)) / len(right)
    assert rows[0].points[0].score == pytest.approx(score) and 0 < rows[0].points[0].cost < 1.5

    results = Results("server", path=tmp_path / "server.json")
    for each in rows:
        results.put(each)
    again = Results.load(tmp_path / "server.json").rows
    assert again == rows
    assert "p50 at 80 % load" in summary_table(again) and "malformed requests, refused | 60, 60" in summary_table(again)
    assert load_table(again).count("\n") == 2 + 16 - 1


def test_what_was_measured_is_not_measured_again(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with the same file starts the servers that are missing, with the capacity that was measured before."""
    capacity = Load("capacity", 1.0, 40, 40, 0, 40.0, 100.0)
    path = tmp_path / "server.json"
    Results("server", path=path).put(described(bench, "stretto", "short", ([capacity], [])))
    started: list[tuple[str, float]] = []

    @contextmanager
    def running(bench: Bench, name: str) -> Iterator[str]:
        yield name

    async def measure(bench: Bench, name: str, questions: Any, known: dict[str, float], *rest: Any) -> Any:
        started.append((name, known["stretto"]))
        return [capacity], []

    monkeypatch.setattr("stretto.bench.server.running", running)
    monkeypatch.setattr("stretto.bench.server.measure", measure)
    for _ in range(2):
        found = bench_server(bench, ["stretto", "wait_for_batch"], ["short"], path, lambda line: None)
        assert started == [("wait_for_batch", 40.0)]
        assert [row.name for row in found.rows] == ["stretto", "wait_for_batch"]
    with pytest.raises(StrettoError, match=r"another seconds: 9, before 0\.4"):
        bench_server(replace(bench, seconds=9), ["stretto"], ["short"], path, print)


def test_malformed_requests_are_refused_one_by_one(bench: Bench) -> None:
    """Also those that leave a connection unusable; the server lives on."""
    with serving(create_app({"reviews": bench.model})) as port:
        for kind, raw in malformed(20 * len(KINDS), seed=1):
            reply = asyncio.run(Client(port, keep=False).closed_loop([Question(raw)], 1, None)).replies[0]
            assert 400 <= reply.status < 500, (kind, raw[:200], reply.status, reply.body)
    counts = Counter(kind for kind, _ in malformed(20 * len(KINDS), seed=1))
    assert set(counts.values()) == {20}


def test_plain_servers_answer_as_the_full_model(tmp_path: Path) -> None:
    model = tiny_model("full", n_layers=1)
    model.save_pretrained(tmp_path / "model")
    expected = model.predict("a good film")
    folder = str(tmp_path / "model")
    for answer, most in ((hugging_face(folder), 1e-5), (onnx_runtime(folder, 1), 0.2)):  # the second in int8
        scores = {each["label"]: each["score"] for each in answer("a good film")}
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert scores == pytest.approx(expected.probabilities, abs=most)


def test_what_cannot_be_measured_says_why(bench: Bench, model: Path, data: Path) -> None:
    for contenders, lengths, reason in (
        (["nobody"], ["short"], "contenders among stretto"),
        (["stretto"], ["long"], "lengths among short"),
        (["wait_for_batch"], ["short"], "stretto as the first"),
    ):
        with pytest.raises(StrettoError, match=reason):
            bench_server(bench, contenders, lengths, None, print)
    done = run("bench", "server", model, data, "--contenders", "nobody")
    assert done.exit_code == 1 and "contenders among" in done.stderr
