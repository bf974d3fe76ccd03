"""The engine loop: every request gets its own answer, easy ones do not wait for hard ones, and nothing starves."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tiny import WORDS, tiny_model

from stretto.deploy import scheduler as module
from stretto.deploy.scheduler import AGING, DeadlinePassed, Limits, QueueFull, Scheduler, Stopping
from stretto.saving.points import OperatingPoint

OFF, FIRST = 0.0, 1.0  # dials of deebert: to the last layer; out after the first one


@pytest.fixture(scope="module")
def model() -> Any:
    """One that knows what its dials cost."""
    made = tiny_model("deebert")
    made.operating_points = [
        OperatingPoint(dial, 0.9, cost, 4 * cost, {}) for dial, cost in ((OFF, 1.0), (FIRST, 0.25))
    ]
    return made


def encoded(model: Any, *texts: str) -> Any:
    return model.encode([(text,) for text in texts])


def text_of(tokens: int) -> str:
    return " ".join(["film"] * (tokens - 2))  # [CLS] and [SEP]


def turn_until(loop: Scheduler, *futures: Future[Any], most: int = 100) -> int:
    for turns in range(most):
        if all(future.done() for future in futures):
            return turns
        loop.turn()
    raise AssertionError(f"not answered after {most} turns")


def test_many_threads_get_their_own_answers(model: Any) -> None:
    """Random texts, dials and batch sizes from several threads: each answer is the one its text gets alone."""
    loop = Scheduler(model, Limits(live_tokens=60))
    loop.start()
    wrong: list[str] = []

    def client(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(12):
            texts = [" ".join(dice.choices(WORDS, k=dice.randint(1, 20))) for _ in range(dice.randint(1, 3))]
            dial = dice.choice([OFF, 0.97, FIRST])
            answer = loop.submit(encoded(model, *texts), dial, 60.0).result(60)
            alone = model.predict(texts, dial)
            pairs = list(zip(answer.predictions, alone, strict=True))
            same = [abs(a.score - b.score) < 1e-5 and (a.label, a.depth) == (b.label, b.depth) for a, b in pairs]
            if not all(same):
                wrong.append(f"{texts} at {dial}")

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(120)
    loop.stop()
    assert not wrong and not loop.live and not loop.waiting


def test_easy_requests_do_not_wait_for_hard_ones(model: Any) -> None:
    loop = Scheduler(model, Limits())
    hard = loop.submit(encoded(model, "a bad film"), OFF, 60.0)
    loop.turn()
    easy = loop.submit(encoded(model, "a good film"), FIRST, 60.0)  # let in between two layers
    assert turn_until(loop, easy) <= 2 and not hard.done()
    turn_until(loop, hard)
    assert [each.result().predictions[0].depth for each in (easy, hard)] == [1, 4]


def test_sequences_that_come_one_by_one_are_admitted_together(model: Any) -> None:
    """Those that are inside are nearer to their answers: the others wait for one turn of the first layer."""
    loop = Scheduler(model, Limits())
    first = loop.submit(encoded(model, "a film"), OFF, 60.0)
    loop.turn()
    later = []
    for count in range(1, 4):
        later.append(loop.submit(encoded(model, "a film"), OFF, 60.0))
        loop.turn()
        assert (loop.waiting, loop.live) == (count, 1 if count < 3 else 0)
    assert first.done()
    loop.turn()
    assert (loop.waiting, loop.live) == (0, 3)
    assert turn_until(loop, *later) == 3


def test_who_has_used_half_of_the_time_goes_first(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    loop = Scheduler(model, Limits())
    long = loop.submit(encoded(model, text_of(60)), OFF, 10.0)
    loop.turn()
    short = [loop.submit(encoded(model, text_of(4)), OFF, 10.0) for _ in range(20)]
    now += 5.1
    short += [loop.submit(encoded(model, text_of(4)), OFF, 10.0) for _ in range(20)]
    assert turn_until(loop, long) == 3
    assert not any(each.done() for each in short)
    turn_until(loop, *short)


def test_requests_that_are_no_longer_wanted_do_not_hold_back_others(model: Any) -> None:
    """The first in the queue is too long to be admitted now; its client leaves."""
    loop = Scheduler(model, Limits(live_tokens=62))
    inside = loop.submit(encoded(model, text_of(20)), OFF, 60.0)
    loop.turn()
    long = loop.submit(encoded(model, text_of(60)), OFF, 60.0)
    long.cancel()
    easy = loop.submit(encoded(model, text_of(4)), FIRST, 60.0)
    assert turn_until(loop, easy) <= 2 and not inside.done()
    turn_until(loop, inside)


def test_long_texts_are_passed_over_but_not_for_ever(model: Any) -> None:
    """A stream of short texts, one more with every turn: each costs less than the long one that waits inside."""
    loop = Scheduler(model, Limits())
    long = loop.submit(encoded(model, text_of(60)), OFF, 60.0)
    loop.turn()
    short = []
    while not long.done() and len(short) < 400:
        short.append(loop.submit(encoded(model, text_of(4)), OFF, 60.0))
        loop.turn()
    assert long.done() and short[0].done()


def test_waiting_for_the_batch_answers_together(model: Any) -> None:
    loop = Scheduler(model, Limits(wait_for_batch=True))
    hard, easy = (loop.submit(encoded(model, "a film"), dial, 60.0) for dial in (OFF, FIRST))
    loop.turn()
    late = loop.submit(encoded(model, "a film"), FIRST, 60.0)
    for _ in range(2):
        loop.turn()
    assert not hard.done() and not easy.done() and loop.waiting == 1
    loop.turn()
    assert hard.done() and easy.done() and not late.done()
    turn_until(loop, late)


def test_short_work_goes_first_and_age_counts(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    loop = Scheduler(model, Limits(live_tokens=42, wait_for_batch=True))
    long = loop.submit(encoded(model, text_of(40)), OFF, 60.0)
    short = loop.submit(encoded(model, text_of(4)), OFF, 60.0)
    turn_until(loop, short)
    assert not long.done(), "the shorter one is first"

    now += 40 / AGING  # enough to make up for 40 tokens
    later = loop.submit(encoded(model, text_of(4)), OFF, 60.0)
    turn_until(loop, long)
    assert not later.done(), "the longer one has waited long enough"


def test_nothing_starves_in_the_queue(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts arrive faster than they are answered; the long one needs all the room."""
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    loop = Scheduler(model, Limits(live_tokens=40))
    long = loop.submit(encoded(model, text_of(40)), OFF, 60.0)
    turns, short = 0, []
    while not long.done() and turns < 400:
        short += [loop.submit(encoded(model, text_of(4)), OFF, 60.0) for _ in range(4)]
        loop.turn()
        now, turns = now + 0.001, turns + 1
    assert long.done() and loop.waiting, "it was answered while short ones were waiting"
    assert short[0].done()


def test_a_text_longer_than_the_budget_goes_in_alone(model: Any) -> None:
    loop = Scheduler(model, Limits(live_tokens=8))
    long, short = (loop.submit(encoded(model, text_of(tokens)), OFF, 60.0) for tokens in (30, 4))
    turn_until(loop, long, short)


def test_a_full_queue_refuses_and_forgets_who_has_left(model: Any) -> None:
    loop = Scheduler(model, Limits(queue=3))
    waiting = [loop.submit(encoded(model, "a film"), OFF, 60.0) for _ in range(3)]
    with pytest.raises(QueueFull):
        loop.submit(encoded(model, "a film"), OFF, 60.0)
    waiting[1].cancel()
    last = loop.submit(encoded(model, "a film"), OFF, 60.0)
    turn_until(loop, waiting[0], waiting[2], last)


def test_who_left_or_waits_too_long_is_dropped(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    loop = Scheduler(model, Limits())
    gone, slow, kept = (loop.submit(encoded(model, "a film"), OFF, seconds) for seconds in (60.0, 1.0, 60.0))
    loop.turn()
    assert loop.live == 3
    gone.cancel()
    now += 2
    loop.turn()
    assert loop.live == 1
    with pytest.raises(DeadlinePassed):
        slow.result(0)
    turn_until(loop, kept)


def test_an_engine_error_fails_what_was_inside_and_nothing_else(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Scheduler(model, Limits())
    first = loop.submit(encoded(model, "a film"), OFF, 60.0)
    with monkeypatch.context() as broken:
        broken.setattr(model.method, "decide", lambda state: 1 / 0)
        loop.turn()
    with pytest.raises(ZeroDivisionError):
        first.result(0)
    second = loop.submit(encoded(model, "a film"), OFF, 60.0)
    turn_until(loop, second)
    assert torch.isfinite(second.result().logits[0]).all()


def test_an_answer_that_cannot_be_decoded_fails_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Scheduler(model, Limits())
    good, bad, other = (loop.submit(encoded(model, text), OFF, 60.0) for text in ("a film", "a plot", "a story"))
    decode = model.decode

    def picky(given: Any, *rest: Any) -> Any:
        if ("a plot",) in given.texts:
            raise ArithmeticError
        return decode(given, *rest)

    monkeypatch.setattr(model, "decode", picky)
    turn_until(loop, good, bad, other)
    assert isinstance(bad.exception(), ArithmeticError)
    assert [each.result().predictions for each in (good, other)] == [[each] for each in model.predict(
        ["a film", "a story"], OFF)]  # fmt: skip


def test_waiting_for_the_batch_does_not_wait_for_who_has_left(model: Any) -> None:
    loop = Scheduler(model, Limits(wait_for_batch=True))
    hard, easy = (loop.submit(encoded(model, "a film"), dial, 60.0) for dial in (OFF, FIRST))
    loop.turn()
    hard.cancel()
    turn_until(loop, easy, most=2)


def test_stopping_answers_what_was_accepted(model: Any) -> None:
    loop = Scheduler(model, Limits())
    futures = [loop.submit(encoded(model, "a film"), OFF, 60.0) for _ in range(20)]
    called = loop.call(lambda: "done")
    loop.start()
    loop.stop()
    assert all(future.done() and not future.exception() for future in futures) and called.result() == "done"
    with pytest.raises(Stopping):
        loop.submit(encoded(model, "a film"), OFF, 60.0)
    with pytest.raises(Stopping):
        loop.call(lambda: None)
