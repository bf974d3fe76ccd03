"""One engine loop per model: requests come in between two layers, and each is answered when its sequences have left.

Two things wait. Sequences that came in wait in a queue, shortest expected work first; a second of waiting counts as
much as `AGING` tokens of work, so that nothing starves. Sequences inside wait for their next layer. Next is the layer
where answers cost least: where most sequences wait, with the fewest rows and layers to go. Those that have been passed
over count for more with every step. A model that writes texts takes some
sentences together, and others when these are done (`writing`).

The loop runs in a thread of its own. Other threads submit, and get a `concurrent.futures.Future`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from stretto.data.tokenise import Feature, as_inputs, collate
from stretto.deploy.writing import SHARE, Writing
from stretto.engine.parts import Part
from stretto.engine.stepping import Stepping
from stretto.engine.written import TextTrace
from stretto.model import AdaptiveModel
from stretto.state import Trace

log = logging.getLogger(__name__)

#: Tokens of expected work that a second of waiting makes up for.
AGING = 2000.0
#: Rows that take as long as the rest of a step.
OVERHEAD = 30
#: Steps after which sequences that wait inside count twice.
PATIENCE = 32


class QueueFull(Exception):
    """More is waiting than the queue holds."""


class Stopping(Exception):
    """The loop takes no more requests."""


class DeadlinePassed(Exception):
    """Not answered in time."""


@dataclass(frozen=True)
class Limits:
    """What a loop takes at once."""

    live_tokens: int = 4096
    """Rows inside, of all sequences in all layers. A sequence that is longer than this goes in alone."""
    queue: int = 512
    """Sequences that may wait; those of one request always go in together."""
    wait_for_batch: bool = False
    """Let requests in only when all before have left, and answer them together: what other servers do."""


@dataclass
class Answer:
    """The sequences of one request: what they answered and what it took."""

    logits: list[Any]
    """A tensor of each; a `Text` where texts are written."""
    trace: Trace | TextTrace
    queued: float
    """Seconds until the last of them was let in."""
    computed: float
    """Seconds from then to the answer."""


@dataclass(eq=False)
class Request:
    """The sequences of one request on their way."""

    features: Sequence[Feature]
    dial: float
    deadline: float
    """On the monotonic clock."""
    expected: float
    """The part of the full model's work that its sequences will take."""
    arrived: float
    entered: float = 0.0
    future: Future[Answer] = field(default_factory=Future)
    logits: dict[int, Any] = field(default_factory=dict)
    traces: dict[int, Any] = field(default_factory=dict)

    def finish(self) -> None:
        order = range(len(self.features))
        traces = [self.traces[i] for i in order]
        trace = type(traces[0]).concatenate(traces)
        took = time.monotonic() - self.entered
        answer = Answer([self.logits[i] for i in order], trace, self.entered - self.arrived, took)
        with suppress(InvalidStateError):  # the client has left in this very moment
            self.future.set_result(answer)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def unwanted(self, now: float) -> bool:
        """Whether nobody waits for the answer any more; a passed deadline is reported."""
        if not self.future.done() and now > self.deadline:
            self.fail(DeadlinePassed())
        return self.future.done()


class Scheduler:
    """The engine loop of one model."""

    def __init__(self, model: AdaptiveModel, limits: Limits, threads: int | None = None) -> None:
        self.model, self.limits, self.threads = model, limits, threads
        self.writes = model.task.answers == "text"
        self.watch: Callable[[int], object] = lambda rows: None
        """Told the rows of every step."""
        self.expected = expected_cost(model)
        self._changed = threading.Condition()  # guards what follows
        self._queue: list[tuple[float, int, Request, int]] = []  # a heap: key, tie-break, the request and its sequence
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._stopping = False
        self._count = itertools.count()
        self.accepted, self.answered = 0, 0  # sequences so far
        # of the loop's thread alone
        self._stepping = self._new_stepping()
        self._live: dict[int, tuple[Request, int]] = {}
        self._held: list[Request] = []  # answered, but told with their batch
        self._passed_over: dict[int, int] = {}  # steps that rows before each layer have waited
        self._thread = threading.Thread(target=self._loop, name="stretto-engine", daemon=True)

    # ---- for any thread

    def start(self) -> None:
        self._thread.start()

    def submit(self, features: Sequence[Feature], dial: float, seconds: float) -> Future[Answer]:
        """Let the sequences of one request wait. `seconds` is how long an answer is of use."""
        now = time.monotonic()
        request = Request(features, dial, now + seconds, self.expected(dial), arrived=now)
        with self._changed:
            if self._stopping:
                raise Stopping
            if self._queue and len(self._queue) + len(features) > self.limits.queue:
                self._queue = [entry for entry in self._queue if not entry[2].unwanted(request.arrived)]
                heapq.heapify(self._queue)
                if self._queue and len(self._queue) + len(features) > self.limits.queue:
                    raise QueueFull
            for number, feature in enumerate(features):
                work = len(feature["input_ids"]) * request.expected
                key = request.arrived + work / AGING
                heapq.heappush(self._queue, (key, next(self._count), request, number))
            self.accepted += len(features)
            self._changed.notify()
        return request.future

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function in the loop's thread, between two layers: nobody else uses the engine then."""
        future: Future[Any] = Future()
        with self._changed:
            if self._stopping:
                raise Stopping
            if len(self._calls) >= self.limits.queue:
                raise QueueFull
            self._calls.append((future, function))
            self._changed.notify()
        return future

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether a request would be refused, unless somebody in the queue has left."""
        return len(self._queue) >= self.limits.queue

    @property
    def live(self) -> int:
        """Sequences inside."""
        return len(self._live)

    def stop(self, seconds: float = 30.0) -> None:
        """Take no more requests, answer those that were accepted, and end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    # ---- the loop

    def _loop(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        while True:
            with self._changed:
                while not (self._queue or self._calls or self._live or self._stopping):
                    self._changed.wait()
                if not (self._queue or self._calls or self._live):
                    return
            self.turn()

    def turn(self) -> None:
        """Let in who fits, take one part through one layer, answer who has left. Of the loop's thread alone."""
        with self._changed:
            admitted = self._admit()
            call = self._calls.popleft() if self._calls else None
        if call is not None:
            self._call(*call)
        try:
            self._add(admitted)
            self._step()
        except Exception as error:  # of the engine: these requests are lost, the loop is not
            log.exception("the engine has failed; what was inside is lost")
            self._give_up([request for request, _ in admitted], error)

    def _admit(self) -> list[tuple[Request, int]]:
        """Those that are let in now. The first of the queue goes first, even if others would fit better."""
        if (self.limits.wait_for_batch or self.writes) and self._live:
            return []
        room = self.limits.live_tokens * (SHARE if self.writes else 1) - self._rows()
        now, admitted = time.monotonic(), list[tuple[Request, int]]()
        while self._queue:
            _, _, request, number = self._queue[0]
            tokens = len(request.features[number]["input_ids"])
            if not request.unwanted(now):
                if tokens > room and (self._live or admitted):
                    break
                admitted.append((request, number))
                room -= tokens
            heapq.heappop(self._queue)
        return admitted

    def _rows(self) -> int:
        return sum(part.state.n_rows for parts in self._stepping.parts.values() for part in parts)

    def _add(self, admitted: Sequence[tuple[Request, int]]) -> None:
        if not admitted:
            return
        now = time.monotonic()
        features = [dict(request.features[number]) for request, number in admitted]
        inputs = as_inputs(collate(self.model.tokenizer.pad_token_id)(features))
        dials = torch.tensor([request.dial for request, _ in admitted], dtype=torch.float64)
        for who, (request, number) in zip(self._stepping.add(inputs, dials), admitted, strict=True):
            self._live[who] = (request, number)
            request.entered = now

    def _step(self) -> None:
        now = time.monotonic()
        unwanted = [who for who, (request, _) in self._live.items() if request.unwanted(now)]
        if unwanted:
            self._stepping.forget(unwanted)
            for who in unwanted:
                del self._live[who]
        if not self._live:
            return
        for finished in self._stepping.step():
            if finished.id not in self._live:
                continue
            request, number = self._live.pop(finished.id)
            request.logits[number], request.traces[number] = finished.logits, finished.trace
            if len(request.logits) == len(request.features):
                self._held.append(request)
        if not self.limits.wait_for_batch or not self._live:
            done, self._held = self._held, []
            for request in done:
                self.answered += len(request.features)
                request.finish()

    def _choose(self, parts: Mapping[int, Sequence[Part]]) -> int:
        """The layer where answers cost least now: most sequences for the rows and the layers that they still need.
        Those that have been passed over count for more."""
        rows = {layer: sum(part.state.n_rows for part in waiting) for layer, waiting in parts.items()}
        urgency = {}
        for layer, waiting in parts.items():
            left = [self._layers_left(layer, who) for part in waiting for who in part.state.ids.tolist()]
            cheap = len(left) ** 2 / ((rows[layer] + OVERHEAD) * sum(left))
            urgency[layer] = cheap * (1 + self._passed_over.get(layer, 0) / PATIENCE)
        chosen = max(urgency, key=lambda layer: (urgency[layer], layer))
        self._passed_over = {layer: self._passed_over.get(layer, 0) + 1 for layer in rows if layer != chosen}
        self.watch(rows[chosen])
        return chosen

    def _layers_left(self, layer: int, who: int) -> float:
        """That a sequence before this layer is expected to need; one that has outlived this, half of what is left."""
        n_layers = self.model.backbone.n_layers
        expected = self._live[who][0].expected * n_layers if who in self._live else 0.0
        left = expected - (layer - 1)
        return left if left >= 1 else max(1.0, (n_layers - layer + 1) / 2)

    def _call(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    def _give_up(self, admitted: Sequence[Request], error: Exception) -> None:
        for request in [*admitted, *self._held, *(request for request, _ in self._live.values())]:
            request.fail(error)
        self._live, self._held, self._stepping = {}, [], self._new_stepping()

    def _new_stepping(self) -> Stepping | Writing:
        if self.writes:
            return Writing(self.model)
        return Stepping(self.model.packed, self.model.method, choose=self._choose)


def expected_cost(model: AdaptiveModel) -> Callable[[float], float]:
    """From a dial to the part of the full model's work that a text will take, as the nearest measured point has it."""
    points = [(point.dial, point.cost) for point in model.operating_points]
    if not points:
        return lambda dial: 1.0
    return lambda dial: min(points, key=lambda point: abs(point[0] - dial))[1]
