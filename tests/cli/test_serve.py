"""`stretto serve` as a process: it answers, and on SIGTERM it answers what it has accepted before it ends."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commands import run
from forked import Piped

from stretto.cli.serve import named


def accepted(address: str) -> int:
    with urllib.request.urlopen(address + "stats", timeout=60) as answer:
        return json.load(answer)["models"]["saved"]["accepted"]


def test_serves_until_it_is_told_to_stop(model: Path) -> None:
    with Piped("serve", model, "--port", 0, "--threads", 1) as process:
        line = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address, line

        def post(inputs: Any) -> Any:
            body = json.dumps({"inputs": inputs, "dial": 0}).encode()
            request = urllib.request.Request(address[0] + "predict", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)

        assert {each["label"] for each in post("a good film")} == {"bad", "good"}
        answers: list[Any] = []
        batch = [["a good film " * 15]] * 32
        clients = [threading.Thread(target=lambda: answers.append(post(batch))) for _ in range(4)]
        for client in clients:
            client.start()
        while accepted(address[0]) < 1 + 4 * 32:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(120)
        assert [len(each) for each in answers] == [32] * 4, "what was accepted is answered"
        assert process.wait(60) == 0, process.stderr.read()
        assert "Traceback" not in process.stderr.read()


def test_what_cannot_be_served_says_why(model: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("short\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, reason in (
            (["--api-key-file", tmp_path / "none"], "readable file with a key"),
            (["--api-key-file", tmp_path / "key"], "at least 8 printable"),
            ([model], "two called 'saved'"),
            (["--dial", 7], "between 0 and 1"),
            (["--port", taken.getsockname()[1]], "Choose another port"),
        ):
            done = run("serve", model, *arguments)
            assert done.exit_code == 1 and reason in done.stderr, done.stderr


@pytest.mark.parametrize(("given", "name"), [("a/reviews", "reviews"), ("fast=a/reviews", "fast")])
def test_names(given: str, name: str) -> None:
    assert list(named([given])) == [name]
