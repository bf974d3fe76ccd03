"""`stretto serve`: models over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from stretto.cli.options import Dtype
from stretto.cli.output import open_model, say
from stretto.errors import StrettoError

EXAMPLES = """
stretto serve reviews-model                                     # http://127.0.0.1:8080, with a page to try it
stretto serve reviews-model names-model --dtype int8            # several models; /predict/reviews-model, /tokens
stretto serve fast=reviews-model --port 9000 --threads 2        # under another name
stretto serve reviews-model --host 0.0.0.0 --api-key-file key.txt
curl localhost:8080/predict -H 'content-type: application/json' -d '{"inputs": "A fine film.", "dial": 0.3}'
"""

Folders = Annotated[list[str], Argument(metavar="[NAME=]DIR...", help="Model folders; the first is the default model.")]
LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    models: Folders,
    host: Annotated[str, Option(help="Address to listen on; default: this machine only.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
    api_key_file: Annotated[
        str | None, Option(metavar="FILE", help="A file with the key that clients must send (Bearer); default: no key.")
    ] = None,
    dial: Annotated[float | None, Option(help="Dial of the first model; default: the model's own.")] = None,
    dtype: Dtype = "float32",
    threads: Annotated[int | None, Option(min=1, help="Threads of the engine; default: as torch chooses.")] = None,
    max_batch_tokens: Annotated[int, Option(min=1, help="Tokens in the engine at once.")] = 4096,
    max_queue: Annotated[int, Option(min=1, help="Sequences that may wait; more are refused (429).")] = 512,
    max_batch: Annotated[int, Option(min=1, help="Inputs per request (413).")] = 32,
    max_body: Annotated[int, Option(min=1, help="Bytes per request (413).")] = 2_000_000,
    timeout: Annotated[float, Option(min=0.001, help="Seconds for an answer, if a request has no deadline_ms.")] = 30.0,
    wait_for_batch: Annotated[
        bool, Option("--wait-for-batch", help="Answer in batches, as other servers do; for comparison.")
    ] = False,
) -> None:
    """Serve models over HTTP. An answer is sent as soon as its text leaves the model; new texts are admitted between
    two layers. Routes: /predict, /tokens, /answer, /generate, /explain, /info, /health, /metrics, and a page at /."""
    require_server()
    from stretto.deploy.run import run_server
    from stretto.deploy.scheduler import Limits
    from stretto.deploy.server import Settings

    key = None if api_key_file is None else read_key(api_key_file)
    if key is None and host not in LOCAL:
        say(f"listening on {host} without --api-key-file: anyone who can reach this machine can use the models")
    loaded = {name: open_model(folder, dtype) for name, folder in named(models).items()}
    if dial is not None:
        first = next(iter(loaded.values()))
        first.dial = float(first.dials_of(dial, 1)[0])
    limits = Limits(max_batch_tokens, max_queue, wait_for_batch)
    settings = Settings(limits, max_batch, max_body, timeout, key, threads)
    run_server(loaded, settings, host, port, say)


def named(models: list[str]) -> dict[str, str]:
    """'name=folder' or 'folder', whose last part is then the name."""
    found: dict[str, str] = {}
    for given in models:
        name, separator, folder = given.partition("=")
        if not separator or Path(given).exists():
            name, folder = Path(given).resolve().name, given
        if name in found:
            raise StrettoError(f"Expected models of different names, got two called '{name}'. Write NAME={folder}.")
        found[name] = folder
    return found


def read_key(file: str) -> str:
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StrettoError(f"Expected a readable file with a key, got '{file}' ({error}). Check the name.") from None
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise StrettoError(
            f"Expected a key of at least 8 printable ASCII characters without spaces in '{file}', got {len(key)}. "
            "Make one, for example with: openssl rand -hex 32."
        )
    return key


def require_server() -> None:
    import importlib.util

    wanted = ("fastapi", "uvicorn", "prometheus_client")
    if missing := [name for name in wanted if importlib.util.find_spec(name) is None]:
        raise StrettoError(
            f"Expected the packages of the server, got none called {', '.join(missing)}. "
            "Run `pip install 'stretto[serve]'`."
        )
