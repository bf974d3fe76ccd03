"""Requests that no client should send. Each has to be refused with a code between 400 and 499, and do no harm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from stretto.bench.load import post, request

ROUTES = ("/predict", "/predict/nobody", "/tokens", "/answer", "/explain", "/predict/../../etc/passwd")
JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, 10**30, "", [], {}, [[]], [None], {"a": 1}, [["a", "b", "c"]], [["a"], 3], ["a", ["b"]],
    {"inputs": "a"},
)  # fmt: skip


def wrong_value(dice: random.Random) -> bytes:
    """JSON, but not what a route takes."""
    return post(dice.choice(ROUTES), {"inputs": dice.choice(JUNK)})


#: Values that an option of `/predict` may not have.
WRONG: dict[str, tuple[Any, ...]] = {
    "dial": ("a", [], 1e300, -5, {}),
    "budget": (3, "no such budget", {"max_cost": -1}, {"max_cost": "a"}, {"cost": 1}, []),
    "deadline_ms": (0, -1, "soon", 1e99),
    "truncate": ("perhaps", 7, None, []),
    "no_such_option": (1,),
}


def wrong_option(dice: random.Random) -> bytes:
    name = dice.choice(list(WRONG))
    return post("/predict", {"inputs": "a text", name: dice.choice(WRONG[name])})


def no_json(dice: random.Random) -> bytes:
    """Bytes that are no JSON, or half of some."""
    body = json.dumps({"inputs": "a text that is cut somewhere", "dial": 0.5}).encode()
    cut = body[: dice.randrange(len(body))]
    return request(
        "POST", dice.choice(ROUTES), dice.choice([cut, dice.randbytes(dice.randrange(1, 200)), b"\xff" + cut])
    )


def deep(dice: random.Random) -> bytes:
    depth = dice.choice((50, 5000, 90_000))
    return request("POST", "/predict", b'{"inputs": ' + b"[" * depth + b"]" * depth + b"}")


def large(dice: random.Random) -> bytes:
    """A length that is not allowed; the body does not follow."""
    head = f"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: {10 ** dice.randrange(7, 18)}\r\n"
    return (head + "content-type: application/json\r\n\r\n").encode()


def other_kind(dice: random.Random) -> bytes:
    kind = dice.choice((b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"?"))
    return request("POST", "/predict", b'inputs={"a": 1}', kind)


def other_method(dice: random.Random) -> bytes:
    return request(dice.choice(("GET", "PUT", "DELETE", "PATCH", "BREW")), "/predict", b"{}")


def no_route(dice: random.Random) -> bytes:
    path = "/" + "".join(dice.choices("abc%/.;=&~'\"<>{}|", k=dice.randrange(1, 300)))
    return request(dice.choice(("GET", "POST")), path.replace('"', "%22").replace("<", "%3C"), b"{}")


def no_http(dice: random.Random) -> bytes:
    """Nothing that a parser of HTTP could read."""
    return dice.choice(
        (b"\x16\x03\x01\x02\x00\x01" + dice.randbytes(40), b"hello\r\n\r\n", b"GET\r\n\r\n", b"\0\0\r\n\r\n")
    )


def bad_header(dice: random.Random) -> bytes:
    line = dice.choice((b"content-length: -1", b"content-length: many", b"transfer-encoding: nothing", b"no colon"))
    return b"POST /predict HTTP/1.1\r\nhost: a\r\n" + line + b"\r\ncontent-type: application/json\r\n\r\n{}"


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    wrong_value, wrong_option, no_json, deep, large, other_kind, other_method, no_route, no_http, bad_header,
)  # fmt: skip


def malformed(count: int, seed: int) -> list[tuple[str, bytes]]:
    """So many of them, of all kinds, with the name of the kind."""
    dice = random.Random(seed)
    return [(kind.__name__, kind(dice)) for kind in (KINDS[number % len(KINDS)] for number in range(count))]
