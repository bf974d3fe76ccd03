"""One model of the server: it checks and tokenises requests, and passes them to the model's scheduler."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from stretto.backbones.decoder import EncoderDecoder
from stretto.budget.choose import within_cost
from stretto.data.tokenise import Encoded
from stretto.deploy.metrics import Metrics, ModelMetrics
from stretto.deploy.scheduler import Answer, DeadlinePassed, Limits, QueueFull, Scheduler, Stopping
from stretto.deploy.schema import ExplainRequest, MaxCost, ModelInfo, Options, Point
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint, as_estimates, budget_named

#: Requests of more characters are tokenised in a thread, so that other requests do not wait.
QUICK = 20_000
#: Windows of a long text that one explanation may run: the other requests wait meanwhile.
MOST_WINDOWS = 8
#: Seconds before the server looks whether the client has left: most answers come earlier, and looking takes time.
PROMPT = 0.05
FULL = (429, "Overloaded", "Expected room in the queue, got a full one. Try again later.")
STOPPING = (503, "Unhealthy", "Expected a running server, got one that is stopping. Try again later.")


class Refused(Exception):
    """An error that is sent to the client: an HTTP code, the kind of error, and the reason."""

    def __init__(self, code: int, kind: str, why: str) -> None:
        super().__init__(why)
        self.code, self.kind, self.why = code, kind, why


class ClientGone(Exception):
    """The client has closed its connection."""


def headers_of(answer: Answer) -> dict[str, str]:
    """Response headers. Times are in milliseconds; depth and cost are means over the inputs."""
    count = len(answer.predictions)
    return {
        "x-queue-time": f"{1000 * answer.queued:.3f}",
        "x-inference-time": f"{1000 * answer.computed:.3f}",
        "x-compute-tokens": str(answer.tokens),
        "x-depth": f"{sum(each.depth for each in answer.predictions) / count:.2f}",
        "x-cost": f"{sum(each.cost for each in answer.predictions) / count:.4f}",
    }


class Served:
    def __init__(
        self, name: str, model: AdaptiveModel, limits: Limits, metrics: Metrics, *, batch: int, seconds: float,
        threads: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.model, self.batch, self.seconds = name, model, batch, seconds
        self.metrics = ModelMetrics(metrics, name, self.n_layers)
        self.scheduler = Scheduler(model, limits, threads)
        metrics.queue_size.labels(name).set_function(lambda: self.scheduler.waiting)
        metrics.live.labels(name).set_function(lambda: self.scheduler.live)
        self.from_left = copy.copy(model.tokenizer)  # drops the beginning of long texts
        self.from_left.truncation_side = "left"

    @property
    def n_layers(self) -> int:
        """Layers after which an answer may leave; of a model that writes texts, those of its decoder."""
        backbone = self.model.backbone
        return backbone.n_blocks if isinstance(backbone, EncoderDecoder) else backbone.n_layers

    def warm_up(self) -> None:
        """Run a few texts, so that kernels are built and packages imported before the first request; then count."""
        try:
            text = self.model.task.check_input("a")
            self.encode([text], left=False)
        except StrettoError:  # it takes pairs, or a question with a context
            text = self.model.task.check_input(("a", "a"))
        for count in (1, 4, 16):
            encoded = self.encode([text] * count, left=False)
            self.scheduler.submit(encoded, self.model.method.dial.off, 600.0).result()
        self.scheduler.watch = self.metrics.rows.observe
        self.scheduler.accepted = self.scheduler.answered = 0

    # ---- answers

    async def answer(self, request: Request, inputs: Sequence[Any], options: Options, *, left: bool = False) -> Answer:
        """Answer these inputs, each in the form that the model's task takes."""
        check_some(inputs)
        if len(inputs) > self.batch:
            raise too_large(f"at most {self.batch} inputs", f"{len(inputs)}. Send fewer at once")
        dial = self.dial_of(options)
        texts = [self.model.task.check_input(each) for each in inputs]
        if sum(len(part) for text in texts for part in text) > QUICK:
            encoded = await asyncio.to_thread(self.encode, texts, left)
        else:
            encoded = self.encode(texts, left)
        if encoded.truncated and not options.truncate:
            raise self.too_long(encoded.truncated)
        seconds = self.seconds_of(options)
        future = accepted(self.scheduler.submit, encoded, dial, seconds)
        answer: Answer = await wanted(request, future, seconds)
        self.metrics.answered(answer)
        return answer

    def encode(self, texts: Sequence[tuple[str, ...]], left: bool) -> Encoded:
        model = self.model
        tokenizer = self.from_left if left else model.tokenizer
        return model.task.encode(tokenizer, texts, model.max_length, words=model.method.reads_words)

    async def explain(self, request: Request, body: ExplainRequest) -> dict[str, Any]:
        """Explain one input. It runs alone, between two layers of other requests."""
        from stretto.view.explain import explain

        check_some([body.inputs])
        dial, seconds = self.dial_of(body), self.seconds_of(body)
        text = body.inputs if isinstance(body.inputs, str) else tuple(body.inputs)
        encoded = await asyncio.to_thread(self.encode, [self.model.task.check_input(text)], False)
        if encoded.truncated and not body.truncate:
            raise self.too_long(1)
        if len(encoded.features) > MOST_WINDOWS:
            raise too_large(f"at most {MOST_WINDOWS} windows to explain", f"{len(encoded.features)}. Shorten the text")
        future = accepted(self.scheduler.call, lambda: explain(self.model, text, dial))
        explained = await wanted(request, future, seconds)
        return dict(explained.to_json())

    def too_long(self, count: int) -> Refused:
        return too_large(
            f"texts of at most {self.model.max_length} tokens",
            f"{count} that are longer. Shorten them, or set truncate to true",
        )

    # ---- options of a request

    def dial_of(self, options: Options) -> float:
        model = self.model
        if options.dial is not None and options.budget is not None:
            raise StrettoError("Expected a dial or a budget, got both. Send one of them.")
        if isinstance(options.budget, MaxCost):
            point = within_cost(self.points, options.budget.max_cost)
            if point is None:
                least = min((each.cost for each in self.points), default=1.0)
                raise StrettoError(
                    f"Expected a max_cost of at least {least:.3f}, the cheapest measured point, got "
                    f"{options.budget.max_cost:g}. Allow more."
                )
            return point.dial
        if options.budget is not None:
            return budget_named(model.operating_points, options.budget, model.dtype).dial
        if options.dial is None:
            return model.dial
        return float(model.dials_of(options.dial, 1)[0])

    def seconds_of(self, options: Options) -> float:
        """A client may ask for less time than the server gives, not for more."""
        return self.seconds if options.deadline_ms is None else min(self.seconds, options.deadline_ms / 1000)

    @property
    def points(self) -> list[OperatingPoint]:
        """Those measured in the model's dtype. If there are none, the others, as estimates."""
        points = self.model.operating_points
        return [point for point in points if point.dtype == self.model.dtype] or as_estimates(points)

    @property
    def info(self) -> ModelInfo:
        model = self.model
        n_texts = getattr(model.task, "n_texts", None)
        points = [
            Point(
                dial=point.dial, score=point.to_json()["score"], cost=point.cost, depth=point.depth,
                name=point.name or None, guaranteed=point.certificate is not None,
            )
            for point in self.points
        ]  # fmt: skip
        return ModelInfo(
            name=self.name, task=model.task.name, method=model.method.name, labels=model.task.label_names,
            dtype=model.dtype, n_layers=self.n_layers, max_input_length=model.max_length, dial=model.dial,
            dial_off=model.method.dial.off, dial_meaning=model.method.dial.meaning, promise=model.promise(),
            pairs=None if n_texts is None else n_texts == 2, points=points,
        )  # fmt: skip


def too_large(expected: str, got: str) -> Refused:
    return Refused(413, "TooLarge", f"Expected {expected}, got {got}.")


def check_some(inputs: Sequence[Any]) -> None:
    """Refuse an empty list, and inputs without text."""

    def empty(value: Any) -> bool:
        return not value or (not isinstance(value, str) and any(not part for part in value))

    if empty(inputs) or any(map(empty, inputs)):
        raise Refused(400, "Empty", "Expected some text, got an empty input. Leave it out.")


def accepted(submit: Any, *arguments: Any) -> Any:
    """Submit to a scheduler. Returns its future, or raises the HTTP error if the request is not accepted."""
    try:
        return submit(*arguments)
    except QueueFull:
        raise Refused(*FULL) from None
    except Stopping:
        raise Refused(*STOPPING) from None


async def wanted(request: Request, future: Any, seconds: float) -> Any:
    """Wait for a scheduler's future. It is cancelled if the client leaves, or if it takes too long."""
    answer = asyncio.wrap_future(future)
    leaving: asyncio.Task[None] | None = None
    try:
        done, _ = await asyncio.wait((answer,), timeout=min(seconds, PROMPT))
        if not done:
            leaving = asyncio.ensure_future(disconnected(request))
            both, rest = (answer, leaving), max(0.0, seconds - PROMPT)
            done, _ = await asyncio.wait(both, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
        if answer in done:
            return answer.result()
        if leaving in done:
            raise ClientGone
        raise DeadlinePassed
    except DeadlinePassed:
        why = f"Expected an answer within {seconds:g} s, got none. Try again later, or allow more time (deadline_ms)."
        raise Refused(504, "Deadline", why) from None
    finally:
        if leaving is not None:
            leaving.cancel()
        answer.cancel()  # does nothing if it is done


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
