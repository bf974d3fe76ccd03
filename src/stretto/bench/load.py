"""Load on a server of this machine: requests that come whether or not the ones before were answered (open loop), or as
soon as they were (closed loop).

The client takes as little as it can of the machine it measures: prepared bytes over connections that stay open. A
latency counts from the moment a request was due, so that a client that falls behind hides nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

#: Seconds after which the client gives up on an answer.
PATIENCE = 30.0
#: Connections at once; a request that would need more is not sent, and counts as lost.
MOST_CONNECTIONS = 4000
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A request as it is sent, and the label that its answer should have (None: any)."""

    raw: bytes
    label: str | None = None
    expected: str | None = None
    """What the model answers offline."""


@dataclass(frozen=True)
class Reply:
    """What became of a request."""

    status: int
    """The HTTP code; 0: no answer."""
    seconds: float
    """From the moment it was due."""
    late: float
    """Seconds between the moment it was due and the moment it was sent: the client's own delay."""
    body: bytes
    question: Question

    @property
    def label(self) -> str | None:
        """The first label, of an answer."""
        return json.loads(self.body)[0]["label"] if self.status == 200 else None


@dataclass
class Measured:
    """The replies of one phase."""

    seconds: float
    """From the first request that was due to the last answer."""
    replies: list[Reply] = field(default_factory=list)


def post(path: str, content: object) -> bytes:
    """A JSON request."""
    body = json.dumps(content).encode()
    return request("POST", path, body, b"application/json")


def request(method: str, path: str, body: bytes = b"", kind: bytes = b"application/json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\ncontent-type: ".encode()
    return head + kind + b"\r\n\r\n" + body


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.reply: asyncio.Future[tuple[int, bytes]] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, raw: bytes) -> tuple[int, bytes]:
        """The code and the body of the answer."""
        loop = asyncio.get_running_loop()
        assert self.transport is not None
        self.reply = loop.create_future()
        self.transport.write(raw)
        late = loop.call_later(PATIENCE, self.end, TimeoutError())
        try:
            return await self.reply
        finally:
            late.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        found = LENGTH.search(self.buffer, 0, end)
        whole = end + 4 + (int(found[1]) if found else 0)
        if len(self.buffer) < whole or self.reply is None or self.reply.done():
            return
        status, body = int(self.buffer[9:12]), bytes(self.buffer[end + 4 : whole])
        del self.buffer[:whole]
        self.reply.set_result((status, body))

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.end(error or ConnectionResetError())

    def end(self, error: Exception) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(error)


class Client:
    """Connections to one port of this machine; `keep` uses them again."""

    def __init__(self, port: int, *, keep: bool = True) -> None:
        self.port, self.keep, self.open = port, keep, 0
        self.idle: list[Connection] = []

    async def ask(self, question: Question, due: float) -> Reply:
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        late = 0.0
        try:
            connection = await self.connection()
            late = loop.time() - due
            status, body = await connection.ask(question.raw)
        except OSError:  # refused, reset, or late
            return Reply(0, loop.time() - due, late, b"", question)
        finally:
            if connection is not None and self.keep and connection.transport is not None:
                self.idle.append(connection)
            elif connection is not None:
                connection.end(ConnectionAbortedError())
                self.open -= 1
        return Reply(status, loop.time() - due, late, body, question)

    async def connection(self) -> Connection:
        while self.idle:
            found = self.idle.pop()
            if found.transport is not None:
                return found
            self.open -= 1
        if self.open >= MOST_CONNECTIONS:
            raise ConnectionError("too many connections")
        self.open += 1
        try:
            _, made = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self.port)
        except OSError:
            self.open -= 1
            raise
        return made

    def close(self) -> None:
        for connection in self.idle:
            if connection.transport is not None:
                connection.transport.abort()
        self.idle = []

    async def open_loop(
        self, questions: Sequence[Question], rate: float, seconds: float, dice: random.Random
    ) -> Measured:
        """`rate` requests a second on average, at random moments (Poisson), drawn from `questions`."""
        loop = asyncio.get_running_loop()
        start = due = loop.time()
        asked = []
        while (due := due + dice.expovariate(rate)) < start + seconds:
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
            asked.append(asyncio.create_task(self.ask(dice.choice(questions), due)))
        replies = list(await asyncio.gather(*asked))
        return Measured(max(seconds, loop.time() - start), replies)

    async def closed_loop(self, questions: Sequence[Question], clients: int, seconds: float | None) -> Measured:
        """`clients` that each ask again when they are answered: as many as the server can answer. Without `seconds`
        every question is asked once."""
        loop = asyncio.get_running_loop()
        start, replies = loop.time(), list[Reply]()

        async def client(number: int) -> None:
            while number < len(questions) if seconds is None else loop.time() < start + seconds:
                replies.append(await self.ask(questions[number % len(questions)], loop.time()))
                number += clients

        await asyncio.gather(*map(client, range(clients)))
        return Measured(loop.time() - start, replies)
