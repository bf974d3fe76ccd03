"""Kill commands with SIGKILL at random moments and give them again (`make chaos`; minutes, not part of the tests).

Each verb first runs undisturbed. Then it is started in a fresh folder, killed at a random moment of that time, and
given again, until so many kills have met a running process. After the kill its output is there as a whole or not at
all (of `compare`: its results are, row by row); in the end it is the same, byte for byte, but for the hours that rows
took, and nothing else is left. The summary is written to chaos-summary.json
beside this file; with --verbs those rows of it are replaced.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from commands import save_encoder, write_reviews  # noqa: E402
from forked import run_main  # noqa: E402
from tiny import tiny_model  # noqa: E402

import stretto.bench.compare  # noqa: E402  # loaded once, not by every child
import stretto.budget.search  # noqa: E402
import stretto.training.pretraining  # noqa: E402, F401
from stretto.bench.results import Results  # noqa: E402
from stretto.saving.versions import versions  # noqa: E402

SUMMARY = HERE / "chaos-summary.json"
#: The commands; OUT is what they write, the other names are files that `prepare` makes.
COMMANDS = {
    "train": "train train.jsonl --model encoder --output OUT --num-train-epochs 2 --exit-epochs 2 "
    "--per-device-train-batch-size 8",
    "search": "search adaptive test.jsonl --output OUT --iterations 3 --population 5 --mutations 5 --crossovers 5",
    "pretrain": "pretrain corpus.txt OUT --vocab-size 60 --max-steps 24 --save-steps 4 --eval-steps 8 --hidden-size 32 "
    "--embedding-size 16 --intermediate-size 64 --num-hidden-layers 3 --per-device-train-batch-size 8",
    "predict": "predict model many.jsonl --output OUT.jsonl --batch-size 8",
    "compare": "compare suite.yaml --data . --models . --output OUT",
}
RESULTS = "results.json"
SUITE = """
name: chaos
about: Every kind of row.
model: encoder
baselines: [huggingface, onnx, onnx_int8]
int8: true
sets: {reviews: {train: reviews, epochs: 2}}
recipes:
  full: {}
  deebert: {settings: {exit_epochs: 2}}
  length_adaptive:
    settings: {drop_epochs: 2, random_models: 1}
    search: {limit: 6, iterations: 2, mutations: 2, crossovers: 2, population: 3}
"""
KILLS = 20
#: What may be wrong after a kill, and what is not: the process had ended before; its result was there already, as a
#: whole, and the command given again said so.
BAD = ("half-written", "failed", "another result", "left behind")
GOOD = ("killed", "ended before", "finished at the kill")
#: What a command says that finds its work done: the kill came between the result and the removal of the work folder.
DONE = "which holds a finished"


def prepare(folder: Path) -> None:
    save_encoder(folder / "encoder")
    tiny_model("length_adaptive").save_pretrained(folder / "adaptive")
    tiny_model("deebert").save_pretrained(folder / "model")
    write_reviews(folder / "train.jsonl", 64)
    write_reviews(folder / "test.jsonl", 100, seed=1)
    write_reviews(folder / "many.jsonl", 1500, seed=2)
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    (folder / "corpus.txt").write_text("\n".join(texts) + "\n")
    (folder / "suite.yaml").write_text(SUITE)
    (folder / "reviews.jsonl.gz").write_bytes(gzip.compress((folder / "train.jsonl").read_bytes()))


def start(command: str, folder: Path, shared: Path) -> int:
    """The process of a command, started as a child of this one, which has loaded torch already."""
    words = [str(shared / word) if (shared / word).exists() else word for word in command.split()]
    args = [word.replace("OUT", str(folder / "out")) for word in words]
    child = os.fork()
    if child == 0:
        log = os.open(folder.parent / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for number in (1, 2):
            os.dup2(log, number)
        os._exit(run_main(args))
    return child


def finish(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def result(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder, hidden ones and leftovers too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(content(path)).hexdigest() for path in files}


def content(path: Path) -> bytes:
    if path.name != RESULTS:
        return path.read_bytes()
    results = json.loads(path.read_bytes())
    for row in results["rows"]:
        row.pop("hours", None)
    return json.dumps(results).encode()


def is_whole(verb: str, folder: Path, after: dict[str, str], expected: dict[str, str]) -> bool:
    """Whether the output is there as a whole or not at all; of `compare`, which resumes in it, the rows that are."""
    if verb != "compare":
        return after in ({}, expected)
    path = folder / "out" / RESULTS
    return not path.exists() or all(row.points for row in Results.load(path).rows)


def outputs(found: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in found.items() if name.startswith(("out/", "out.jsonl"))}


def torment(verb: str, kills: int, dice: random.Random, shared: Path, place: Path) -> dict[str, Any]:
    command = COMMANDS[verb]
    place.mkdir()
    folder = place / "run"  # always the same: a model trained from another one keeps its place
    folder.mkdir()
    began = time.monotonic()
    code = finish(start(command, folder, shared))
    lasted = time.monotonic() - began
    if code != 0:
        sys.exit(f"{verb} failed undisturbed: {(place / 'log').read_text()}")
    expected = result(folder)
    shutil.rmtree(folder)
    counts = dict.fromkeys((*GOOD, *BAD), 0)
    for _ in range(5 * kills):
        if counts["killed"] == kills:
            break
        folder.mkdir()
        child = start(command, folder, shared)
        time.sleep(dice.uniform(0, lasted))
        os.kill(child, signal.SIGKILL)
        ended = finish(child)
        counts["killed" if ended == -signal.SIGKILL else "ended before"] += 1
        after = outputs(result(folder))
        counts["half-written"] += not is_whole(verb, folder, after, expected)
        code = 0 if ended == 0 else finish(start(command, folder, shared))
        if code != 0 and after == expected and DONE in (place / "log").read_text():
            counts["finished at the kill"] += 1
            code = finish(start(f"{command} --overwrite", folder, shared))  # clears up, and does it again
        counts["failed"] += code != 0
        final = result(folder)
        counts["another result"] += outputs(final) != expected
        counts["left behind"] += set(final) != set(expected)
        if code != 0 or final != expected:
            other = sorted(name for name in {*final, *expected} if final.get(name) != expected.get(name))
            print(f"{verb}: {other} {(place / 'log').read_text():.600}", flush=True)
        shutil.rmtree(folder)
    return counts


def write_summary(found: dict[str, Any], seed: int) -> None:
    """Keep the rows of verbs that did not run now."""
    before = json.loads(SUMMARY.read_text())["verbs"] if SUMMARY.exists() else {}
    rows = {verb: found.get(verb, before.get(verb)) for verb in COMMANDS if verb in {*before, *found}}
    total = {name: sum(row[name] for row in rows.values()) for name in (*GOOD, *BAD)}
    SUMMARY.write_text(json.dumps({**total, "seed": seed, "verbs": rows, "versions": versions()}, indent=2) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=KILLS, help=f"Of each verb; {KILLS} are summarised.")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--verbs", nargs="*", default=list(COMMANDS), choices=list(COMMANDS))
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name) / "shared"
        shared.mkdir()
        prepare(shared)
        found = {}
        for verb in given.verbs:
            found[verb] = torment(verb, given.kills, random.Random(f"{given.seed} {verb}"), shared, Path(name) / verb)
            print(verb, json.dumps(found[verb]), flush=True)
            if given.kills == KILLS:
                write_summary(found, given.seed)
    bad = sum(row[name] for row in found.values() for name in BAD)
    few = sum(row["killed"] < given.kills for row in found.values())
    sys.exit(f"{bad} outcomes were bad, {few} verbs were killed less often than asked" if bad or few else 0)


if __name__ == "__main__":
    main()
