"""One engine loop per model: requests are admitted between two layers, and answered when their sequences have left.

Sequences wait in two places. New ones wait in a queue, shortest expected work first. A second of waiting counts as much
as `AGING` tokens of work, so that nothing starves. Admitted ones wait for their next layer. The loop chooses the layer
where answers cost least: many sequences, few rows, few layers to go. Sequences that were not chosen count for more with
every step, and go first when half of their time is over. Sequences are admitted only when the first layer is chosen, as
many as fit: one by one would take longer. A model that writes texts takes a few sentences together, and the next ones
when these are done (`writing`).

The loop runs in a thread of its own. Other threads submit requests, and get a `concurrent.futures.Future`.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count, islice
from typing import Any

import torch

from stretto.data.tokenise import Encoded, Feature, as_inputs, collate
from stretto.deploy.writing import SHARE, Writing
from stretto.engine.parts import Part
from stretto.engine.stepping import Stepping
from stretto.model import AdaptiveModel

log = logging.getLogger(__name__)

#: Tokens of expected work that are worth a second of waiting.
AGING = 2000.0
#: The fixed time of a step, in rows that take as long.
OVERHEAD = 30
#: Steps after which admitted sequences that were not chosen count twice.
PATIENCE = 32


class QueueFull(Exception):
    """The queue has no room for this request."""


class Stopping(Exception):
    """The loop takes no more requests."""


class DeadlinePassed(Exception):
    """Not answered in time."""


@dataclass(frozen=True)
class Limits:
    """The limits of one loop."""

    live_tokens: int = 4096
    """Rows of all admitted sequences together. A longer sequence is admitted alone."""
    queue: int = 512
    """Sequences that may wait. The sequences of one request are accepted or refused together."""
    wait_for_batch: bool = False
    """Admit requests only when all admitted ones have left, and answer them together: what other servers do."""


@dataclass
class Answer:
    """The answers to one request, and what they took."""

    predictions: list[Any]
    """One per input."""
    logits: list[Any]
    """Of each sequence; a `Text` where texts are written."""
    tokens: int
    """Of all sequences."""
    queued: float
    """Seconds until the last sequence was admitted."""
    computed: float
    """Seconds from then to the answer."""


@dataclass(eq=False)
class Request:
    """One request that is not answered yet."""

    encoded: Encoded
    dial: float
    deadline: float
    """On the monotonic clock."""
    expected: float
    """Expected cost of its sequences: a fraction of the full model's work."""
    arrived: float
    entered: float = 0.0
    future: Future[Answer] = field(default_factory=Future)
    logits: dict[int, Any] = field(default_factory=dict)
    traces: dict[int, Any] = field(default_factory=dict)

    @property
    def features(self) -> Sequence[Feature]:
        """One per sequence."""
        return self.encoded.features

    @property
    def half_time(self) -> float:
        """When half of its time is over, on the monotonic clock."""
        return (self.arrived + self.deadline) / 2

    @cached_property
    def tokens(self) -> list[int]:
        """Of each sequence."""
        return [len(feature["input_ids"]) for feature in self.features]

    def in_order(self, found: Mapping[int, Any]) -> list[Any]:
        return [found[number] for number in range(len(self.features))]

    def finish(self, predictions: list[Any]) -> None:
        waited, took = self.entered - self.arrived, time.monotonic() - self.entered
        with suppress(InvalidStateError):  # the client may have left just now
            self.future.set_result(Answer(predictions, self.in_order(self.logits), sum(self.tokens), waited, took))

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def unwanted(self, now: float) -> bool:
        """Whether the client has left or the deadline has passed. Reports a deadline that has passed."""
        if not self.future.done() and now > self.deadline:
            self.fail(DeadlinePassed())
        return self.future.done()


class Scheduler:
    """The engine loop of one model."""

    def __init__(self, model: AdaptiveModel, limits: Limits, threads: int | None = None) -> None:
        self.model, self.limits, self.threads = model, limits, threads
        self.writes = model.task.answers == "text"
        self.watch: Callable[[int], object] = lambda rows: None
        """Called with the rows of every step."""
        self.expected = expected_cost(model)
        self._changed = threading.Condition()  # guards what follows
        self._queue: list[tuple[float, int, Request, int]] = []  # a heap: key, tie-break, the request and its sequence
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._stopping = False
        self._count = count()
        self.accepted, self.answered = 0, 0  # sequences so far
        # of the loop's thread alone
        self._stepping = self._new_stepping()
        self._live: dict[int, tuple[Request, int]] = {}
        self._held: list[Request] = []  # all their sequences have left; with `wait_for_batch` they wait for the others
        self._passed_over: dict[int, int] = {}  # for each layer: steps in which it was not chosen
        self._next = 1  # the layer that was chosen
        self._thread = threading.Thread(target=self._loop, name="stretto-engine", daemon=True)

    # ---- for any thread

    def start(self) -> None:
        self._thread.start()

    def submit(self, encoded: Encoded, dial: float, seconds: float) -> Future[Answer]:
        """Put a request in the queue. After `seconds` its answer is no longer wanted."""
        now, features = time.monotonic(), encoded.features
        request = Request(encoded, dial, now + seconds, self.expected(dial), arrived=now)
        with self._changed:
            if self._stopping:
                raise Stopping
            if self._queue and len(self._queue) + len(features) > self.limits.queue:
                self._queue = [entry for entry in self._queue if not entry[2].unwanted(request.arrived)]
                heapq.heapify(self._queue)
                if self._queue and len(self._queue) + len(features) > self.limits.queue:
                    raise QueueFull
            for number, tokens in enumerate(request.tokens):
                key = request.arrived + tokens * request.expected / AGING
                heapq.heappush(self._queue, (key, next(self._count), request, number))
            self.accepted += len(features)
            self._changed.notify()
        return request.future

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function in the loop's thread, between two layers, when nothing else uses the engine."""
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
        """Whether a request would be refused (unless a client in the queue has left)."""
        return len(self._queue) >= self.limits.queue

    @property
    def live(self) -> int:
        """Admitted sequences that have not left."""
        return len(self._live)

    def stop(self, seconds: float = 30.0) -> None:
        """Refuse new requests, answer the accepted ones, and end the loop."""
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
        """Admit what fits, run one part through one layer, answer what has left. For the loop's thread only."""
        admitted: list[tuple[Request, int]] = []
        try:
            with self._changed:
                self._next = self._choose()
                if self._next == 1:
                    admitted = self._admit()
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                self._call(*call)
            self._add(admitted)
            self._step()
        except Exception as error:  # of the engine: the admitted requests fail, the loop continues
            log.exception("The engine failed. All admitted requests get an error.")
            self._give_up([request for request, _ in admitted], error)

    def _admit(self) -> list[tuple[Request, int]]:
        """Take sequences from the queue while there is room. If the first does not fit, no other overtakes it."""
        room, now, admitted = self._room(), time.monotonic(), list[tuple[Request, int]]()
        while self._queue and not self._is_closed:
            _, _, request, number = self._queue[0]
            tokens = request.tokens[number]
            if not request.unwanted(now):
                if tokens > room and (self._live or admitted):
                    break
                admitted.append((request, number))
                room -= tokens
            heapq.heappop(self._queue)
        return admitted

    @property
    def _is_closed(self) -> bool:
        """Whether no sequence may enter before all admitted ones have left."""
        return bool(self._live) and (self.limits.wait_for_batch or self.writes)

    def _room(self) -> float:
        """Tokens that may be admitted now."""
        rows = sum(part.state.n_rows for parts in self._stepping.parts.values() for part in parts)
        return self.limits.live_tokens * (SHARE if self.writes else 1) - rows

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
        for finished in self._stepping.step() if self._live else ():
            if finished.id not in self._live:
                continue
            request, number = self._live.pop(finished.id)
            request.logits[number], request.traces[number] = finished.logits, finished.trace
            if len(request.logits) == len(request.features):
                self._held.append(request)
        if self._held and not (self.limits.wait_for_batch and self._live):
            done, self._held = self._held, []
            self._answer(done)

    def _answer(self, done: Sequence[Request]) -> None:
        """Decode these requests together (much cheaper than one by one), and answer them."""
        try:
            traces = [trace for request in done for trace in request.in_order(request.traces)]
            logits = [each for request in done for each in request.in_order(request.logits)]
            encoded = Encoded.join([request.encoded for request in done])
            predictions = iter(self.model.decode(encoded, logits, type(traces[0]).concatenate(traces)).answers)
        except Exception as error:
            if len(done) == 1:
                done[0].fail(error)
            else:  # one of them is at fault: the others get their answers
                for request in done:
                    self._answer([request])
            return
        for request in done:
            self.answered += len(request.features)
            request.finish(list(islice(predictions, len(request.encoded.texts))))

    def _choose(self) -> int:
        """The layer where answers cost least now: many sequences, few rows, few layers to go. A layer that was not
        chosen counts for more with every step."""
        waiting: dict[int, tuple[int, list[float]]] = {}
        """For each layer: rows, and the expected layers to go of each sequence."""
        late: dict[float, int] = {}
        """Moments when half of the time of a request was over, and the layer it waits for."""
        now = time.monotonic()
        for layer, parts in self._stepping.parts.items():
            requests = [self._live[who][0] for part in parts for who in part.state.ids.tolist()]
            left = [self._layers_left(layer, request.expected) for request in requests]
            waiting[layer] = sum(part.state.n_rows for part in parts), left
            late |= {request.half_time: layer for request in requests if request.half_time < now}
        if late:
            return late[min(late)]
        entering = self._entering()
        if entering or not waiting:
            rows, left = waiting.get(1, (0, []))
            rows += sum(request.tokens[number] for request, number in entering)
            waiting[1] = rows, [*left, *(self._layers_left(1, request.expected) for request, _ in entering)]
        urgency = {}
        for layer, (rows, left) in waiting.items():
            cheap = len(left) ** 2 / ((rows + OVERHEAD) * sum(left)) if left else 0.0
            urgency[layer] = cheap * (1 + self._passed_over.get(layer, 0) / PATIENCE)
        chosen = max(urgency, key=lambda layer: (urgency[layer], layer))
        self._passed_over = {layer: self._passed_over.get(layer, 0) + 1 for layer in waiting if layer != chosen}
        return chosen

    def _entering(self) -> list[tuple[Request, int]]:
        """About what `_admit` would take from the queue (which is not in full order)."""
        while self._queue and self._queue[0][2].unwanted(time.monotonic()):
            heapq.heappop(self._queue)
        room, found = self._room(), list[tuple[Request, int]]()
        for _, _, request, number in () if self._is_closed else self._queue:
            room -= request.tokens[number]
            if room < 0 and (self._live or found):
                break
            found.append((request, number))
        return found

    def _chosen(self, parts: Mapping[int, Sequence[Part]]) -> int:
        """The layer that was chosen, if sequences still wait for it."""
        layer = self._next if self._next in parts else min(parts)
        self.watch(sum(part.state.n_rows for part in parts[layer]))
        return layer

    def _layers_left(self, layer: int, expected: float) -> float:
        """Expected layers to go, for a sequence of this `expected` cost before this layer. Half of the rest if it is
        deeper than expected."""
        n_layers = self.model.backbone.n_layers
        left = expected * n_layers - (layer - 1)
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
        return Stepping(self.model.packed, self.model.method, choose=self._chosen)


def expected_cost(model: AdaptiveModel) -> Callable[[float], float]:
    """A function from a dial to the cost of its nearest measured operating point."""
    points = [(point.dial, point.cost) for point in model.operating_points]
    if not points:
        return lambda dial: 1.0
    return lru_cache(1024)(lambda dial: min(points, key=lambda point: abs(point[0] - dial))[1])
