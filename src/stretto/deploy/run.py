"""The server as a process: its socket, signals, and a shutdown that answers all accepted requests."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

import uvicorn

from stretto.deploy.server import Settings, create_app
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel

#: Seconds for the accepted requests after a signal to stop; more if they may take longer.
GRACE = 30.0


class Process(uvicorn.Server):
    """Calls `ready` when it accepts requests, and `stopping` at once on a signal."""

    def __init__(
        self, config: uvicorn.Config, ready: Callable[[], None], stopping: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self.ready, self.stopping = ready, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stopping()
        super().handle_exit(sig, frame)


def run_server(
    models: Mapping[str, AdaptiveModel], settings: Settings, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM. `say` is called with the address when requests are accepted."""
    listening = listen(host, port)
    app = create_app(models, settings)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=math.ceil(max(GRACE, settings.seconds)), timeout_keep_alive=30,
    )  # fmt: skip
    address = f"[{host}]" if ":" in host else host
    line = f"serving {', '.join(models)} at http://{address}:{listening.getsockname()[1]}/ (Ctrl-C stops)"
    process = Process(config, lambda: say(line), app.state.server.stop_accepting)
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn raises the signal again after its shutdown
        process.run([listening])
    if not process.started:
        raise StrettoError("Expected the server to start, got the error above. Correct it and start again.")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket: a port that is in use is reported before the app is made."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, port))
        except OSError:
            found.close()
            raise
        return found
    except OSError as error:
        raise StrettoError(
            f"Expected to listen on {host}, port {port}, got: {error.strerror or error}. "
            "Choose another port or address."
        ) from None
