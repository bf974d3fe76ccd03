"""The server: routes compatible with text-embeddings-inference, and a few more. Each model has a scheduler.

Nothing in a model folder is executed, requests cannot name files, and the page loads nothing from other hosts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stretto import __version__
from stretto.deploy.gate import Gate
from stretto.deploy.metrics import Metrics
from stretto.deploy.scheduler import Limits
from stretto.deploy.schema import (
    AnswerRequest,
    Error,
    Explained,
    ExplainRequest,
    GenerateRequest,
    Info,
    ModelStats,
    PredictRequest,
    Score,
    SpanAnswer,
    Stats,
    Tags,
    TokensRequest,
    Written,
)
from stretto.deploy.served import STOPPING, ClientGone, Refused, Served, headers_of
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.tasks import LabelPrediction, Seq2Seq, SequenceTask, Span, Task, Tokens

STATIC = Path(__file__).parent / "static"
#: What each code means (also in the OpenAPI description).
CODES = {
    400: "Empty: an input without text",
    401: "Unauthorized: no API key, or a wrong one",
    404: "NotFound: no such model or route",
    405: "NotFound: this route takes another HTTP method",
    413: "TooLarge: body, batch or text",
    415: "Validation: not JSON",
    422: "Validation: not what this route takes",
    424: "WrongModel: the model has another task",
    429: "Overloaded: the queue is full",
    500: "Backend: the engine failed",
    503: "Unhealthy: the server is stopping",
    504: "Deadline: no answer in time",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": Error, "description": text} for code, text in CODES.items() if code not in (404, 405, 415)
}
#: What `headers_of` sends beside an answer.
HEADERS = {
    "x-queue-time": "milliseconds in the queue", "x-inference-time": "milliseconds in the engine",
    "x-compute-tokens": "tokens of all inputs", "x-depth": "layers run, a mean over the inputs",
    "x-cost": "fraction of the full model's FLOPs, a mean over the inputs",
}  # fmt: skip
ANSWERED: dict[int | str, dict[str, Any]] = {
    200: {"headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in HEADERS.items()}}
}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Error, "description": CODES[404]}}
ModelName = Annotated[str | None, Query(description="Which model; default: the first that does this.")]


@dataclass(frozen=True)
class Settings:
    limits: Limits = field(default_factory=Limits)
    batch: int = 32
    """Inputs per request."""
    body: int = 2_000_000
    """Bytes per request."""
    seconds: float = 30.0
    """Deadline of a request that has none of its own."""
    api_key: str | None = None
    threads: int | None = None
    """Threads of torch; None: as torch chooses."""


class Server:
    """The models behind an app."""

    def __init__(self, models: Mapping[str, AdaptiveModel], settings: Settings) -> None:
        self.settings, self.metrics, self.started = settings, Metrics(), time.monotonic()
        self.stopping = False
        self.served = {
            name: Served(
                name, model, settings.limits, self.metrics,
                batch=settings.batch, seconds=settings.seconds, threads=settings.threads,
            )
            for name, model in models.items()
        }  # fmt: skip

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        for served in self.served.values():
            served.scheduler.start()
            await asyncio.to_thread(served.warm_up)
        try:
            yield
        finally:
            self.stop_accepting()
            for served in self.served.values():
                await asyncio.to_thread(served.scheduler.stop)

    def stop_accepting(self) -> None:
        """Refuse new requests from now on (503)."""
        self.stopping = True

    @property
    def full(self) -> bool:
        """Whether the queues of all models are full: then requests are refused before they are read."""
        return all(served.scheduler.full for served in self.served.values())

    def named(self, name: str | None, kind: Any) -> Served:
        """The model of this name (None: the first) whose task is of this `kind` (a class, or several)."""
        if name is not None and name not in self.served:
            raise Refused(
                404, "NotFound", f"Expected a model among {', '.join(self.served)}; got '{name:.60}'. Name one."
            )
        candidates = self.served.values() if name is None else [self.served[name]]
        able = [each for each in candidates if isinstance(each.model.task, kind)]
        if not able:
            tasks = ", ".join(f"{each.name} ({each.model.task.name})" for each in self.served.values())
            wanted = " or ".join(getattr(each, "name", "labels or values") for each in as_tuple(kind))
            raise Refused(424, "WrongModel", f"Expected a model for {wanted}, got: {tasks}. Use another route.")
        return able[0]


def as_tuple(kind: Any) -> tuple[Any, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def create_app(models: Mapping[str, AdaptiveModel], settings: Settings | None = None) -> FastAPI:
    """An ASGI app that serves these models by name. The first one is the default."""
    settings = settings or Settings()
    server = Server(models, settings)
    app = FastAPI(
        title="stretto", version=__version__, lifespan=server.lifespan, docs_url=None, redoc_url=None,
        description="Adaptive computation for Hugging Face encoders: easy texts are answered after few layers.",
    )  # fmt: skip
    app.state.server = server
    add_answers(app, server)
    add_views(app, server)
    add_errors(app)
    app.add_middleware(Gate, server=server)
    if settings.api_key is not None:
        secure(app)
    return app


class PredictRoute(APIRoute):
    """Reads the body itself, and sends what the endpoint returns. FastAPI's own way, with dependencies and a check of
    the answer, takes longer than everything else that is done for a short text outside the engine."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise StrettoError(
                    f"Expected JSON with the header 'content-type: application/json', got '{kind:.60}'. Add the header."
                )
            try:
                body = PredictRequest.model_validate_json(await request.body())
            except ClientDisconnect:
                raise ClientGone from None
            except ValidationError as error:
                found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_input=False)]
                raise RequestValidationError(found) from None
            response: Response = await self.endpoint(request, body, **request.path_params)
            return response

        return handle


def check_form(task: Task, inputs: Sequence[Any]) -> None:
    """Refuse pairs if the model takes single texts, and single texts if it takes pairs."""
    wanted = getattr(task, "n_texts", None)
    for each in inputs:
        count = 1 if isinstance(each, str) else len(each)
        if wanted == 1 and count == 2:
            raise StrettoError(
                "Expected single texts, got a pair: a flat list of two strings is one pair. "
                'Write a batch of two texts as [["a"], ["b"]].'
            )
        if wanted == 2 and count == 1:
            raise StrettoError('Expected pairs of texts, got a single text. Write a pair as ["a", "b"].')


def add_answers(app: FastAPI, server: Server) -> None:
    """The routes that run a model."""

    async def predict(request: Request, body: PredictRequest, served: Served) -> Response:
        inputs, is_batch = body.inputs, isinstance(body.inputs, list) and any(isinstance(e, list) for e in body.inputs)
        if isinstance(inputs, list) and not is_batch and len(inputs) > 2:
            raise StrettoError(
                f'Expected one text, a pair, or a batch such as [["a"], ["b"]], got a flat list of {len(inputs)} '
                "strings. Put each text in a list of its own."
            )
        check_form(served.model.task, inputs if is_batch else [inputs])
        left = body.truncation_direction.lower() == "left"
        result = await served.answer(request, inputs if is_batch else [inputs], body, left=left)
        rows = [
            scores_of(served.model.task, each, logits.tolist() if body.raw_scores else None)
            for each, logits in zip(result.predictions, result.logits, strict=True)
        ]
        return JSONResponse(rows if is_batch else rows[0], headers=headers_of(result))

    async def predict_first(request: Request, body: PredictRequest) -> Response:
        """Labels with their scores, best first. The first model that gives labels or values answers."""
        return await predict(request, body, server.named(None, SequenceTask))

    async def predict_named(request: Request, body: PredictRequest, model: str) -> Response:
        """The same, by the model of this name."""
        return await predict(request, body, server.named(model, SequenceTask))

    for path, endpoint, errors in (("/predict", predict_first, {}), ("/predict/{model}", predict_named, UNKNOWN)):
        app.router.add_api_route(
            path, endpoint, methods=["POST"], responses={**ANSWERED, **ERRORS, **errors},
            response_model=list[Score] | list[list[Score]],
            tags=["text-embeddings-inference"] if path == "/predict" else None, route_class_override=PredictRoute,
        )  # fmt: skip

    @app.post("/tokens", responses={**ANSWERED, **ERRORS, **UNKNOWN})
    async def tokens(
        request: Request, response: Response, body: TokensRequest, model: ModelName = None
    ) -> Tags | list[Tags]:
        """A tag for every word, and the entities they make."""
        is_batch = isinstance(body.inputs, list)
        result = await server.named(model, Tokens).answer(request, body.inputs if is_batch else [body.inputs], body)
        response.headers.update(headers_of(result))
        answers = [Tags(**asdict(each)) for each in result.predictions]
        return answers if is_batch else answers[0]

    @app.post("/answer", responses={**ANSWERED, **ERRORS, **UNKNOWN})
    async def answer(request: Request, response: Response, body: AnswerRequest, model: ModelName = None) -> SpanAnswer:
        """The part of the context that answers the question."""
        result = await server.named(model, Span).answer(request, [(body.question, body.context)], body)
        response.headers.update(headers_of(result))
        return SpanAnswer(**asdict(result.predictions[0]))

    @app.post("/generate", responses={**ANSWERED, **ERRORS, **UNKNOWN})
    async def generate(
        request: Request, response: Response, body: GenerateRequest, model: ModelName = None
    ) -> Written | list[Written]:
        """The text that the model writes for a text, such as its translation."""
        is_batch = isinstance(body.inputs, list)
        result = await server.named(model, Seq2Seq).answer(request, body.inputs if is_batch else [body.inputs], body)
        response.headers.update(headers_of(result))
        answers = [Written(**asdict(each)) for each in result.predictions]
        return answers if is_batch else answers[0]

    @app.post("/explain", responses={**ERRORS, **UNKNOWN})
    async def explain(request: Request, body: ExplainRequest, model: ModelName = None) -> Explained:
        """Which token lives to which layer, and where the answer was given."""
        return Explained(**await server.named(model, (SequenceTask, Tokens, Span)).explain(request, body))


def scores_of(task: Task, prediction: LabelPrediction, logits: list[float] | None) -> list[dict[str, Any]]:
    """Every label with its score, best first (`Score`), as in text-embeddings-inference."""
    if logits is not None:
        scores = dict(zip(task.label_names or ["value"], logits, strict=True))
    elif prediction.probabilities is None:
        scores = {"value": float(prediction.label)}
    else:
        scores = prediction.probabilities
    ordered = sorted(scores.items(), key=lambda each: each[1], reverse=True)
    return [{"label": label, "score": score} for label, score in ordered]


def add_views(app: FastAPI, server: Server) -> None:
    """The routes that show something: models, metrics, the page."""

    @app.get("/info", responses={401: ERRORS[401]}, tags=["text-embeddings-inference"])
    async def info() -> Info:
        """The models and the limits."""
        models = [served.info for served in server.served.values()]
        first, limits = models[0], server.settings.limits
        labels = {str(number): label for number, label in enumerate(first.labels)}
        ids = {label: number for number, label in enumerate(first.labels)}
        return Info(
            model_id=first.name, model_dtype=first.dtype, version=__version__, models=models,
            model_type={"classifier": {"id2label": labels, "label2id": ids}}, auto_truncate=True,
            max_concurrent_requests=limits.queue, max_input_length=first.max_input_length,
            max_batch_tokens=limits.live_tokens, max_client_batch_size=server.settings.batch,
        )  # fmt: skip

    @app.get("/health", responses={503: ERRORS[503]}, tags=["text-embeddings-inference"])
    async def health() -> dict[str, str]:
        """200 while requests are taken."""
        if server.stopping:
            raise Refused(*STOPPING)
        return {"status": "ok"}

    @app.get(
        "/metrics", tags=["text-embeddings-inference"], response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, 401: ERRORS[401]},
    )  # fmt: skip
    async def metrics() -> Response:
        """Counters and histograms for Prometheus."""
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", responses={401: ERRORS[401]})
    async def stats() -> Stats:
        """Live figures: answers, queue, and after which layer sequences left."""
        models = {}
        for name, served in server.served.items():
            scheduler, count = served.scheduler, sum(served.metrics.depths)
            models[name] = ModelStats(
                accepted=scheduler.accepted, answered=scheduler.answered,
                waiting=scheduler.waiting, live=scheduler.live,
                depths=list(served.metrics.depths), mean_cost=served.metrics.total_cost / count if count else None,
            )  # fmt: skip
        return Stats(seconds=time.monotonic() - server.started, models=models)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))


def add_errors(app: FastAPI) -> None:
    """Every error has the same form: a reason and its kind, never a traceback."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        headers = {"retry-after": "1"} if error.code in (429, 503) else None
        return JSONResponse({"error": error.why, "error_type": error.kind}, error.code, headers)

    @app.exception_handler(StrettoError)
    async def invalid(request: Request, error: StrettoError) -> JSONResponse:
        return JSONResponse({"error": str(error), "error_type": "Validation"}, 422)

    @app.exception_handler(RequestValidationError)
    async def misshaped(request: Request, error: RequestValidationError) -> JSONResponse:
        reasons = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:3]]
        return JSONResponse({"error": "; ".join(reasons)[:500], "error_type": "Validation"}, 422)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        kind, why = CODES.get(error.status_code, "Validation").split(":")[0], str(error.detail)
        if error.status_code == 404:
            path = request.scope["path"]
            why = f"Expected a route of this server, got '{path:.60}'. /openapi.json lists them."
        elif error.status_code == 405:
            why = f"Expected another HTTP method here, got {request.method:.20}. The header 'allow' names it."
        return JSONResponse({"error": why, "error_type": kind}, error.status_code, error.headers)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # for the metrics: the client does not read it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "The engine failed. The log has the reason.", "error_type": "Backend"}, 500)


def secure(app: FastAPI) -> None:
    """Add the key to the OpenAPI description; `Gate` checks it."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        schema = described()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        schema["paths"]["/health"]["get"]["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
