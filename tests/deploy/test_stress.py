"""Many clients over loopback: every accepted request gets its own answer, whatever the others do."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from serving import serving
from tiny import WORDS, tiny_model

from stretto.bench.load import Client, Connection, Question, post
from stretto.deploy.scheduler import Limits
from stretto.deploy.server import Settings, create_app

REQUESTS, CLIENTS, DIALS = 300, 24, (0.0, 0.97, 1.0)


def test_no_answer_is_mixed_up_or_lost() -> None:
    """Random texts, dials, batches and deadlines; every tenth client closes its connection before it is answered."""
    model, dice = tiny_model("deebert"), random.Random(0)
    asked = []
    for number in range(REQUESTS):
        texts = [" ".join(dice.choices(WORDS, k=dice.randint(1, 20))) for _ in range(dice.randint(1, 4))]
        options: dict[str, Any] = {"dial": dice.choice(DIALS)} | ({"deadline_ms": 1} if number % 10 == 5 else {})
        asked.append((texts, options, Question(post("/predict", {"inputs": [[text] for text in texts], **options}))))
    app = create_app({"reviews": model}, Settings(Limits(live_tokens=100, queue=40)))
    with serving(app) as port:
        replies = asyncio.run(ask_all(port, [question for _, _, question in asked]))
        scheduler = app.state.server.served["reviews"].scheduler
    assert not scheduler.live and not scheduler.waiting, "nothing stays behind"

    codes = [status for status, _ in replies]
    assert set(codes) <= {200, 429, 504, None}
    assert codes.count(200) > REQUESTS / 4
    for (texts, options, _), (status, body) in zip(asked, replies, strict=True):
        if status == 504:
            assert "deadline_ms" in options
        if status == 200:
            best = [max(each, key=lambda score: score["score"]) for each in json.loads(body)]
            alone = model.predict(texts, options["dial"])
            assert [each["label"] for each in best] == [each.label for each in alone]
            assert all(abs(a["score"] - b.score) < 1e-5 for a, b in zip(best, alone, strict=True))


async def ask_all(port: int, questions: list[Question]) -> list[tuple[int | None, bytes]]:
    """What each request got: a code and a body; None where the client has left."""
    found: dict[int, tuple[int | None, bytes]] = {}
    client, loop = Client(port), asyncio.get_running_loop()

    async def work(start: int) -> None:
        for number in range(start, len(questions), CLIENTS):
            if number % 10 == 0:
                _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
                asking = asyncio.ensure_future(connection.ask(questions[number].raw))
                await asyncio.sleep(0.002)
                connection.end(ConnectionAbortedError())
                await asyncio.gather(asking, return_exceptions=True)
                found[number] = (None, b"")
            else:
                reply = await client.ask(questions[number], loop.time())
                found[number] = (reply.status, reply.body)

    await asyncio.gather(*map(work, range(CLIENTS)))
    client.close()
    return [found[number] for number in range(len(questions))]
