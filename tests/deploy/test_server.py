"""The server's routes, codes and limits; its OpenAPI description is true (schemathesis)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.testclient import TestClient
from tiny import TAGS, tiny_model

from stretto import AdaptiveModel
from stretto.data import Dataset
from stretto.deploy.scheduler import Limits
from stretto.deploy.server import Settings, create_app
from stretto.methods import METHODS
from stretto.saving.points import Certificate, OperatingPoint
from stretto.tasks import Regression, Seq2Seq, Span, Tokens
from stretto.training.scratch import ScratchConfig, from_nothing

POINTS = [
    OperatingPoint(dial, 0.9, cost, 4 * cost, {"accuracy": 0.9}, name=name)
    for dial, cost, name in ((0.0, 1.0, ""), (0.95, 0.6, ""), (1.0, 0.25, ""), (1.0, 0.25, "quick"))
]


def translator() -> AdaptiveModel:
    """It writes something for every text."""
    numbers = ["eins zwei", "drei", "vier eins drei", "zwei"] * 10
    pairs = Dataset([(text,) for text in numbers], numbers[::-1], None, ["here"] * len(numbers), Seq2Seq.form)
    sizes = ScratchConfig(d_model=16, encoder_layers=1, decoder_layers=3, attention_heads=2, ffn_dim=16, vocabulary=300)
    method = METHODS["depth_adaptive"]
    model = AdaptiveModel.put_together(
        *from_nothing("marian", sizes, pairs, seed=1), method, method.Config(), Seq2Seq()
    )
    model.generation["max_new_tokens"] = 4
    return model.eval()


def make_app(**changes: Any) -> FastAPI:
    reviews = tiny_model("deebert")
    reviews.dial, reviews.operating_points = 0.97, POINTS
    models = {
        "reviews": reviews, "tags": tiny_model("length_adaptive", task=Tokens(TAGS)),
        "questions": tiny_model("full", task=Span()), "stars": tiny_model("full", task=Regression()),
        "numbers": translator(),
    }  # fmt: skip
    return create_app(models, Settings(batch=4, body=20_000, **changes))


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return make_app()


@pytest.fixture(scope="module")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as found:
        yield found


def labels(answer: list[dict[str, Any]]) -> list[str]:
    return [each["label"] for each in answer]


def test_predict_takes_the_shapes_of_text_embeddings_inference(client: TestClient, app: FastAPI) -> None:
    model = app.state.server.served["reviews"].model
    one = client.post("/predict", json={"inputs": "a good film"})
    expected = model.predict("a good film")
    assert one.status_code == 200 and labels(one.json())[0] == expected.label
    assert [each["score"] for each in one.json()] == pytest.approx(sorted(expected.probabilities.values())[::-1])
    assert {"x-queue-time", "x-inference-time", "x-total-time"} <= one.headers.keys()
    assert float(one.headers["x-depth"]) == expected.depth
    assert float(one.headers["x-cost"]) == pytest.approx(expected.cost, abs=1e-3)

    pair = client.post("/predict", json={"inputs": ["a good film", "a dull plot"]}).json()
    assert pair[0]["score"] == pytest.approx(model.predict(("a good film", "a dull plot")).score)
    batch = client.post("/predict", json={"inputs": [["a good film"], ["a dull plot"]]}).json()
    assert [labels(each)[0] for each in batch] == [p.label for p in model.predict(["a good film", "a dull plot"])]
    flat = client.post("/predict", json={"inputs": ["a", "b", "c"]})
    assert flat.status_code == 422 and "flat list of 3" in flat.json()["error"]
    model.task.n_texts = 1  # the model knows that it was trained on single texts
    trap = client.post("/predict", json={"inputs": ["a good film", "a dull plot"]})
    assert trap.status_code == 422 and '[["a"], ["b"]]' in trap.json()["error"]
    model.task.n_texts = 2
    assert client.post("/predict", json={"inputs": "a"}).json()["error"].endswith('Write a pair as ["a", "b"].')
    model.task.n_texts = None
    raw = client.post("/predict", json={"inputs": "a good film", "raw_scores": True}).json()
    assert sum(each["score"] for each in raw) != pytest.approx(1.0) and labels(raw) == labels(one.json())


def test_dials_and_budgets(client: TestClient) -> None:
    def depth(**options: Any) -> float:
        answer = client.post("/predict", json={"inputs": "a good film", **options})
        assert answer.status_code == 200, answer.text
        return float(answer.headers["x-depth"])

    assert depth(dial=0.0) == 4 and depth(dial=1.0) == 1
    assert depth(budget={"max_cost": 0.3}) == 1 and depth(budget={"max_cost": 1.0}) == 4
    assert depth(budget="quick") == 1


def test_an_explanation_runs_few_windows(client: TestClient, app: FastAPI) -> None:
    name = next(n for n, each in app.state.server.served.items() if each.model.task.name == "span")
    long = client.post(f"/explain?model={name}", json={"inputs": ["how many ?", "one city and " * 400]})
    assert long.status_code == 413 and "windows to explain" in long.json()["error"]


def test_points_of_another_dtype_are_estimates_at_most(
    client: TestClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = app.state.server.served["reviews"].model
    given = Certificate("right answers lost", 0.01, 0.95, 0.0, ((0.0, 0.01),), 1, {})
    quick = OperatingPoint(0.0, 0.9, 0.5, 2.0, {}, name="loss-1", dtype="int8", certificate=given)
    monkeypatch.setattr(model, "operating_points", [*POINTS, quick])
    points = client.get("/info").json()["models"][0]["points"]
    assert len(points) == len(POINTS) and not any(point["guaranteed"] for point in points)
    body = {"inputs": "a good film", "budget": {"max_cost": 0.5}}
    assert client.post("/predict", json=body).headers["x-depth"] == "1.00"  # by dial 1, not 0
    monkeypatch.setattr(model, "operating_points", [quick])
    (point,) = client.get("/info").json()["models"][0]["points"]
    assert point["dial"] == 0.0 and not point["guaranteed"]  # an estimate
    assert client.post("/predict", json=body).headers["x-depth"] == "4.00"


def test_other_tasks(client: TestClient, app: FastAPI) -> None:
    tags = client.post("/tokens", json={"inputs": ["how many", ["city", "film"]]}).json()
    assert [each["words"] for each in tags] == [["how", "many"], ["city", "film"]]
    assert client.post("/tokens", json={"inputs": "how many"}).json()["tags"] == tags[0]["tags"]
    answer = client.post("/answer", json={"question": "how many ?", "context": "it was one film"}).json()
    assert answer["answer"] in "it was one film" and answer["depth"] == 4
    texts = ["eins", "drei zwei eins", "zwei"]
    written = client.post("/generate", json={"inputs": texts})
    expected = app.state.server.served["numbers"].model.predict(texts)
    assert [each["text"] for each in written.json()] == [each.text for each in expected]
    assert [each["depth"] for each in written.json()] == pytest.approx([each.depth for each in expected])
    assert float(written.headers["x-depth"]) == pytest.approx(sum(each.depth for each in expected) / 3, abs=0.01)
    assert client.post("/generate", json={"inputs": texts[0]}).json() == written.json()[0]
    value = client.post("/predict/stars", json={"inputs": "a good film"}).json()
    assert labels(value) == ["value"]
    explained = client.post("/explain", json={"inputs": "a good film", "dial": 1.0}).json()
    assert explained["tokens"] == ["[CLS]", "a", "good", "film", "[SEP]"] and explained["depth"] == 1


@pytest.mark.parametrize(
    ("code", "route", "body"),
    [
        (400, "/predict", {"inputs": ""}),
        (400, "/predict", {"inputs": []}),
        (400, "/predict", {"inputs": [["a"], []]}),
        (400, "/answer", {"question": "", "context": "a"}),
        (404, "/predict/nobody", {"inputs": "a"}),
        (404, "/nowhere", {}),
        (413, "/predict", {"inputs": [["a"]] * 5}),
        (413, "/predict", {"inputs": "a " * 20_000}),
        (413, "/predict", {"inputs": "a film " * 60, "truncate": False}),
        (413, "/explain", {"inputs": "a film " * 60, "truncate": False}),
        (422, "/predict", {"inputs": 7}),
        (422, "/predict", {"inputs": "a", "dail": 0.5}),
        (422, "/predict", {"inputs": "a", "dial": 7}),
        (422, "/predict", {"inputs": "a", "dial": 0.5, "budget": "quick"}),
        (422, "/predict", {"inputs": "a", "budget": "nobody"}),
        (422, "/predict", {"inputs": "a", "budget": {"max_cost": 0.01}}),
        (422, "/predict", {"inputs": "\ud800"}),
        (422, "/predict", {"inputs": [["a"], ["b", "c"]]}),
        (424, "/predict/tags", {"inputs": "a"}),
        (424, "/tokens?model=reviews", {"inputs": "a"}),
        (424, "/generate?model=reviews", {"inputs": "a"}),
        (424, "/explain?model=numbers", {"inputs": "a"}),
        (504, "/predict", {"inputs": "a", "deadline_ms": 1}),
    ],
)
def test_codes(client: TestClient, app: FastAPI, code: int, route: str, body: Any, monkeypatch: Any) -> None:
    if code == 504:  # a loop that is busy
        monkeypatch.setattr(app.state.server.served["reviews"].scheduler, "_admit", list)
    answer = client.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == code, answer.text
    assert set(answer.json()) == {"error", "error_type"}


def test_what_is_not_json_is_refused(client: TestClient) -> None:
    text = client.post("/predict", content=b'{"inputs": "a"}', headers={"content-type": "text/plain"})
    assert text.status_code == 422 and "content-type: application/json" in text.json()["error"]
    kind = {"content-type": "application/json; charset=utf-8"}
    assert client.post("/predict", content=b'{"inputs": "a"}', headers=kind).status_code == 200
    endless = client.post("/predict", content=(b'"' * 5000 for _ in range(9)), headers=kind)  # no content-length
    assert endless.status_code == 413 and "at most 20000 bytes" in endless.json()["error"]
    for body in (b'{"inputs": "a"', b"\xff", b"", b"[" * 90_000, b'{"inputs": 1}'):
        refused = client.post("/predict", content=body, headers=kind)
        assert refused.status_code in (413, 422) and refused.json()["error"].startswith(("body", "Expected")), body[:20]


def test_truncation_keeps_either_end(client: TestClient, app: FastAPI) -> None:
    model = app.state.server.served["reviews"].model
    text = "good " * 40 + "bad " * 40
    for side, kept in (("Right", text), ("Left", "bad " * 40)):
        score = client.post("/predict", json={"inputs": text, "truncation_direction": side, "dial": 0}).json()[0]
        alone = model.predict(text if side == "Right" else "good " * 22 + kept, 0.0)
        assert (score["label"], score["score"]) == (alone.label, pytest.approx(alone.score, abs=1e-5))


def test_full_queue_and_stopping() -> None:
    with TestClient(make_app(limits=Limits(queue=1))) as client:
        server = client.app.state.server  # type: ignore[attr-defined]
        waiting = []
        for served in server.served.values():  # loops that are busy
            task, text = served.model.task, ("a", "a") if served.name == "questions" else "a"
            served.scheduler._admit, one = list, served.encode([task.check_input(text)], left=False)
            waiting.append(served.scheduler.submit(one, served.model.method.dial.off, 60.0))
            full = client.post("/predict", json={"inputs": "a film"})
            assert full.status_code == 429 and full.headers["retry-after"] == "1"
        unread = client.post("/predict", content=b"no JSON")
        assert unread.status_code == 429, "where all queues are full nothing is read"
        for served in server.served.values():
            del served.scheduler._admit
        for each in waiting:
            each.result(30)
        server.stopping = True
        assert client.post("/predict", json={"inputs": "a film"}).status_code == 503
        assert client.get("/health").status_code == 503


def status_of(app: FastAPI, *messages: dict[str, Any]) -> int:
    """At the level of ASGI: the answer to a client of `/predict` that sends this."""
    left, sent = iter(messages), []

    async def receive() -> Any:
        return next(left)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http", "root_path": "",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


GONE = {"type": "http.disconnect"}


def test_a_client_that_leaves_before_its_body_is_complete(app: FastAPI, client: TestClient) -> None:
    assert status_of(app, {"type": "http.request", "body": b'{"inputs', "more_body": True}, GONE) == 499


def test_clients_that_left_are_dropped(app: FastAPI, client: TestClient) -> None:
    """The client disconnects while its text waits."""
    scheduler = app.state.server.served["reviews"].scheduler
    admit, scheduler._admit = scheduler._admit, list
    try:
        body = json.dumps({"inputs": "a film"}).encode()
        assert status_of(app, {"type": "http.request", "body": body}, GONE) == 499
        assert all(entry[2].future.cancelled() for entry in scheduler._queue)
    finally:
        scheduler._admit = admit
    assert client.post("/predict", json={"inputs": "a film"}).status_code == 200


def test_key_is_asked_for() -> None:
    with TestClient(make_app(api_key="secret-key")) as client:
        assert client.post("/predict", json={"inputs": "a"}).status_code == 401
        wrong = client.get("/info", headers={"authorization": "Bearer another"})
        assert wrong.status_code == 401 and wrong.headers["www-authenticate"] == "Bearer"
        right = {"authorization": "Bearer secret-key"}
        assert client.post("/predict", json={"inputs": "a"}, headers=right).status_code == 200
        assert client.get("/health").status_code == 200 and client.get("/").status_code == 200
        assert client.get("/openapi.json", headers=right).json()["security"] == [{"key": []}]


def test_info_metrics_and_stats(client: TestClient) -> None:
    client.post("/predict", json={"inputs": "a good film", "dial": 1.0})
    info = client.get("/info").json()
    assert info["model_id"] == "reviews" and info["max_client_batch_size"] == 4
    assert [model["name"] for model in info["models"]] == ["reviews", "tags", "questions", "stars", "numbers"]
    assert info["models"][0]["points"][-1]["name"] == "quick"
    assert info["models"][0]["promise"] == "not measured"
    stats = client.get("/stats").json()["models"]["reviews"]
    assert stats["depths"][0] >= 1 and stats["answered"] == sum(stats["depths"])
    metrics = client.get("/metrics").text
    assert 'stretto_exits_total{layer="1",model="reviews"}' in metrics
    assert 'stretto_requests_total{code="200",route="/predict"}' in metrics


# ---- the description ---------------------------------------------------------------------------------------


def test_openapi_is_true() -> None:
    """What the schema cannot say (a dial's range, known names) is refused too: that data are accepted is not asked."""
    api = schemathesis.openapi.from_asgi("/openapi.json", make_app())  # it starts the app itself
    operations = [found.ok() for found in api.get_all_operations()]
    assert {"/predict", "/predict/{model}", "/tokens", "/answer", "/generate", "/explain"} <= {
        each.path for each in operations
    }
    described = make_app().openapi()["paths"]["/predict"]["post"]["responses"]["200"]["headers"]
    assert {"x-queue-time", "x-inference-time", "x-compute-tokens", "x-depth", "x-cost"} == set(described)
    for operation in operations:

        @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def check(case: Any) -> None:
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        check()
    asgi.shutdown_lifespans()  # schemathesis would let the app run to the end of the process
