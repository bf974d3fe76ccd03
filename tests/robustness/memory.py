"""Answer a million short lines in one process and watch its memory (`make memory`; minutes, not part of the tests).

Memory may grow while the first tenth of the lines is answered: kernels are built, buffers reach their sizes. After that
it has to stay flat. The summary is written to memory-summary.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from forked import run_main  # noqa: E402
from tiny import WORDS, tiny_model  # noqa: E402

from stretto.saving.versions import versions  # noqa: E402

SUMMARY = HERE / "memory-summary.json"
#: How much higher the memory may rise after the first tenth.
MOST = 1.05


def write_lines(path: Path, count: int) -> None:
    dice = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            file.write(" ".join(dice.choices(WORDS, k=dice.randrange(1, 8))) + "\n")


def lines_in(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lines", type=int, default=1_000_000)
    count = options.parse_args().lines
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model("full", n_layers=1).save_pretrained(folder / "model")
        write_lines(folder / "lines.txt", count)
        child = os.fork()
        if child == 0:
            os._exit(run_main(["predict", f"{name}/model", f"{name}/lines.txt", "--output", f"{name}/out.jsonl"]))
        watched, started = psutil.Process(child), time.monotonic()
        samples: list[tuple[float, float]] = []
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            samples.append((time.monotonic() - started, watched.memory_info().rss / 2**20))
            time.sleep(0.2)
        written = lines_in(folder / "out.jsonl")
    seconds = samples[-1][0]
    early = max(megabytes for at, megabytes in samples if at <= seconds / 10)
    late = max(megabytes for at, megabytes in samples if at > seconds / 10)
    found = {
        "lines": count, "answers": written, "seconds": round(seconds),
        "most MB in the first tenth": round(early), "most MB after it": round(late), "versions": versions(),
    }  # fmt: skip
    print(json.dumps(found))
    if count == 1_000_000:
        SUMMARY.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(f"memory rose from {early:.0f} to {late:.0f} MB" if written != count or late > MOST * early else 0)


if __name__ == "__main__":
    main()
