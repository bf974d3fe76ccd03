"""The first checks of every request: the key, the size of the body, and whether the server is stopping or full.

A refusal here costs almost no time, so that the engine keeps working under overload."""

from __future__ import annotations

import hmac
import json
import time
from typing import Any

from starlette.exceptions import HTTPException

from stretto.deploy.served import FULL, STOPPING

#: Routes that show nothing of the models: they need no key.
OPEN = ("/", "/health")
STATIC = "/static/"
#: Digits of a content-length that are read: enough for any limit, and few enough for `int`.
MOST_DIGITS = 20
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
)


class Gate:
    """ASGI middleware. It also counts and times requests."""

    def __init__(self, app: Any, server: Any) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, code, read = time.perf_counter(), 500, 0
        limit = self.server.settings.body

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise HTTPException(413, too_large(limit))
            return message

        async def answered(message: Any) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                took = f"{1000 * (time.perf_counter() - start):.3f}".encode()
                message["headers"] = [*message.get("headers", ()), *HEADERS, (b"x-total-time", took)]
            await send(message)

        try:
            if (refusal := self.refusal(scope)) is not None:
                await respond(answered, *refusal)
            else:
                await self.app(scope, counted, answered)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.server.metrics.requests.labels(route, str(code)).inc()
            self.server.metrics.duration.labels(route).observe(time.perf_counter() - start)

    def refusal(self, scope: Any) -> tuple[int, str, str] | None:
        """A code, its kind and the reason, or None if the request may pass."""
        headers, path = dict(scope["headers"]), scope["path"]
        key = self.server.settings.api_key
        if key is not None and path not in OPEN and not path.startswith(STATIC):
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, b"Bearer " + key.encode()):
                return 401, "Unauthorized", "Expected 'Authorization: Bearer KEY', got no key or a wrong one. Send it."
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length.lstrip(b"0")[:MOST_DIGITS] or 0) > self.server.settings.body:
            return 413, "TooLarge", too_large(self.server.settings.body)
        if self.server.stopping and scope["method"] == "POST":
            return STOPPING
        if scope["method"] == "POST" and self.server.full:
            return FULL
        return None


def too_large(limit: int) -> str:
    return f"Expected a body of at most {limit} bytes, got more. Send fewer or shorter texts."


async def respond(send: Any, code: int, kind: str, why: str) -> None:
    body = json.dumps({"error": why, "error_type": kind}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if code in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
