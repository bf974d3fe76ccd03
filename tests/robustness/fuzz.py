"""Feed damaged files to everything that reads files (`make fuzz`; minutes, not part of the tests).

Each case is a file made by hypothesis (random bytes, random values, or a valid file with parts of it replaced) or, for
the readers, also by atheris, which is led by the branches that a file takes. Reading it ends with an answer or a
`StrettoError`; anything else is a traceback, and more than `LONGEST` seconds are a hang. The summary is written to
fuzz-summary.json beside this file; with --targets those rows of it are replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

SUMMARY = HERE / "fuzz-summary.json"
LONGEST = 20  # seconds
OUTCOMES = ("answered", "refused", "tracebacks", "hangs")
GUIDED = "readers, guided by coverage"
#: Cases of each target; 10,000 in all.
CASES = {
    "readers": 3500, GUIDED: 2500, "labelled data": 1500, "stretto.json": 700, "config.json": 400,
    "sizes in config.json": 400, "tokenizer.json": 400, "tokenizer_config.json": 200, "safetensors headers": 400,
}  # fmt: skip

# ---- counting ----------------------------------------------------------------------------------------------


class Hang(BaseException):
    """It took too long."""


class Count:
    """What became of the cases of one target."""

    def __init__(self, name: str) -> None:
        self.name, self.outcomes, self.bad, self.slowest = name, Counter[str](), Counter[str](), 0.0

    def case(self, action: Callable[[], Any], shown: Any) -> None:
        from stretto import StrettoError

        began = time.monotonic()
        signal.alarm(LONGEST)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                action()
            self.outcomes["answered"] += 1
        except StrettoError:
            self.outcomes["refused"] += 1
        except Hang:
            self.outcomes["hangs"] += 1
            print(f"{self.name}: hang on {shown!r:.600}", flush=True)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.outcomes["tracebacks"] += 1
            kind = f"{type(error).__name__}: {error!s:.80}"
            self.bad[kind] += 1
            if self.bad[kind] == 1:
                print(f"{self.name}: {kind} on {shown!r:.600}", flush=True)
        finally:
            signal.alarm(0)
            self.slowest = max(self.slowest, time.monotonic() - began)

    def to_json(self) -> dict[str, Any]:
        return {"cases": sum(self.outcomes.values()), **{name: self.outcomes[name] for name in OUTCOMES}}


def hypothesised(count: int, number: int) -> Callable[[Any], Any]:
    """As many random cases as asked for: no shrinking, nothing remembered."""
    from hypothesis import HealthCheck, Phase, seed, settings

    many = settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda function: seed(number)(many(function))


# ---- data --------------------------------------------------------------------------------------------------


def read_all(path: Path, delimiter: str | None = None) -> None:
    from stretto.data import Columns
    from stretto.data.records import read

    list(read(str(path), labelled=False, columns=Columns(delimiter=delimiter)))


def fuzz_readers(count: Count, cases: int, number: int, folder: Path) -> None:
    from fuzz_values import ENDINGS, contents, delimiters
    from hypothesis import given
    from hypothesis import strategies as st

    @hypothesised(cases, number)
    @given(contents, st.sampled_from(ENDINGS), delimiters)
    def check(content: bytes, ending: str, delimiter: str | None) -> None:
        path = folder / f"d{ending}"
        path.write_bytes(gzip.compress(content) if ending.endswith(".gz") and content[:1] != b"\1" else content)
        count.case(lambda: read_all(path, delimiter), (ending, content))

    check()


def fuzz_guided(count: Count, cases: int, number: int, folder: Path) -> None:
    """By atheris, in a process of its own: it ends the one it runs in."""
    report = folder / "report.json"
    command = [sys.executable, __file__, "--guided", str(cases), "--seed", str(number), "--report", str(report)]
    subprocess.run(command, check=False, stderr=subprocess.DEVNULL)  # libFuzzer tells its progress there
    found = json.loads(report.read_text())
    count.outcomes.update({name: found[name] for name in OUTCOMES})
    count.slowest = found["slowest"]


def guided(cases: int, number: int, report: Path) -> None:
    import atheris
    from fuzz_values import ENDINGS

    with atheris.instrument_imports(include=["stretto.data"]):
        from stretto.data import records, sources  # noqa: F401  # the first import of them counts branches
    count = Count(GUIDED)
    folder = Path(tempfile.mkdtemp())
    seeds = folder / "seeds"
    seeds.mkdir()
    valid = {".csv": "text,label\na,good\n", ".tsv": "text\tn\na\t1\n", ".jsonl": '{"text": "a"}\n{"text": "b"}'}
    for ending, text in {**valid, ".json": '[{"text": "a"}]', ".txt": "a\nb\n"}.items():
        (seeds / ending[1:]).write_bytes(bytes([ENDINGS.index(ending)]) + text.encode())

    def check(data: bytes) -> None:
        """The first byte is the kind of file, the others are the file."""
        path = folder / f"d{ENDINGS[data[0] % len(ENDINGS)] if data else '.csv'}"
        path.write_bytes(gzip.compress(data[1:]) if path.suffix == ".gz" else data[1:])
        count.case(lambda: read_all(path), (path.name, data[1:]))
        if sum(count.outcomes.values()) == cases:
            report.write_text(json.dumps({**count.to_json(), "slowest": count.slowest}))
            shutil.rmtree(folder)
            os._exit(0)

    atheris.Setup([sys.argv[0], f"-seed={number + 1}", "-max_len=300", "-runs=100000000", str(seeds)], check)
    atheris.Fuzz()


def fuzz_labelled(count: Count, cases: int, number: int, folder: Path) -> None:
    from fuzz_values import good, likely, rows
    from hypothesis import given
    from hypothesis import strategies as st

    from stretto.data import load
    from stretto.tasks import TASKS

    @hypothesised(cases, number)
    @given(st.lists(rows | likely, min_size=1, max_size=6) | st.lists(good, min_size=2), st.sampled_from([*TASKS]))
    def check(them: list[dict[str, Any]], task: str) -> None:
        path = folder / "d.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in them), encoding="utf-8")
        count.case(lambda: load(str(path), task=TASKS[task]), (task, them))

    check()


# ---- models ------------------------------------------------------------------------------------------------


def save_models(folder: Path) -> None:
    """A model with operating points, a budget and a certificate; and plain ones of other architectures."""
    from tiny import tiny_encoder, tiny_model, tiny_tokenizer

    from stretto.saving.folder import quiet_transformers
    from stretto.saving.points import Certificate, Latency, OperatingPoint

    model = tiny_model("deebert")
    proof = Certificate("right answers lost", 0.01, 0.95, 0.002, ((0.0, 0.01), (0.4, 0.04)), 42, {"stretto": "1"})
    model.operating_points = [
        OperatingPoint(0.0, 0.9, 1.0, 4.0, {"accuracy": 0.9}, n=300, data="abc"),
        OperatingPoint(0.4, 0.9, 0.5, 2.0, {"accuracy": 0.9}, name="fast", n=300, certificate=proof),
        OperatingPoint(0.6, 0.8, 0.4, 2.0, {}, name="soon", dials=(0.1, 0.2), latency=Latency(20.0, 8, 95.0, "cpu")),
    ]
    model.dial = 0.4
    model.save_pretrained(folder / "stretto")
    with quiet_transformers():
        for kind in ("albert", "distilbert", "mpnet", "roberta"):
            tiny_encoder(kind, 2).save_pretrained(folder / kind)
            tiny_tokenizer().save_pretrained(folder / kind)


def answer(place: Path) -> None:
    from stretto import AdaptiveModel
    from stretto.saving.folder import quiet_transformers
    from stretto.saving.points import promise

    with quiet_transformers():
        model = AdaptiveModel.from_pretrained(place)
        model.predict(["a good film", ""])
        for point in model.operating_points:
            promise(point)
            if point.name:
                model.predict("a good film", budget=point.name)
        model.folder().to_json()


def fuzz_json(count: Count, cases: int, number: int, folder: Path) -> None:
    """A JSON file of a model folder, with parts of it replaced."""
    from fuzz_values import cuts, edited, edits, overwritten
    from hypothesis import given

    save_models(folder)
    place = folder / "stretto"
    original = json.loads((place / count.name).read_text())

    @hypothesised(cases, number)
    @given(edits, cuts)
    def check(changes: list[tuple[int, Any]], breaks: list[tuple[int, bytes]]) -> None:
        content = json.dumps(edited(original, changes)).encode("utf-8", "replace")
        (place / count.name).write_bytes(overwritten(content, breaks if len(breaks) > 2 else []))
        count.case(lambda: answer(place), changes)

    check()


def fuzz_sizes(count: Count, cases: int, number: int, folder: Path) -> None:
    """Absurd sizes in the config.json of several architectures: nothing may be made of that size."""
    from fuzz_values import absurd
    from hypothesis import given
    from hypothesis import strategies as st

    save_models(folder)
    configs = {place.name: json.loads((place / "config.json").read_text()) for place in folder.iterdir()}
    changes = st.dictionaries(st.integers(0, 1000), absurd, min_size=1, max_size=2)

    @hypothesised(cases, number)
    @given(st.sampled_from(sorted(configs)), changes)
    def check(name: str, changes: dict[int, Any]) -> None:
        config = {**configs[name], "num_labels": 2}
        sizes = sorted(field for field, value in config.items() if type(value) is int)
        new = {sizes[spot % len(sizes)]: value for spot, value in changes.items()}
        (folder / name / "config.json").write_text(json.dumps({**config, **new}))
        count.case(lambda: answer(folder / name), (name, new))

    check()


def fuzz_safetensors(count: Count, cases: int, number: int, folder: Path) -> None:
    from fuzz_values import cuts, edited, edits, overwritten
    from hypothesis import given
    from hypothesis import strategies as st

    save_models(folder)
    place = folder / "stretto"
    originals = {name: (place / name).read_bytes() for name in ("model.safetensors", "stretto.safetensors")}

    @hypothesised(cases, number)
    @given(st.sampled_from(sorted(originals)), edits, cuts, st.sampled_from("header length weights".split()))
    def check(name: str, changes: list[tuple[int, Any]], breaks: list[tuple[int, bytes]], damaged: str) -> None:
        raw = originals[name]
        size = struct.unpack("<Q", raw[:8])[0]
        header, weights = raw[8 : 8 + size], raw[8 + size :]
        if damaged == "header":
            header = overwritten(json.dumps(edited(json.loads(header), changes)).encode("utf-8", "replace"), breaks)
        if damaged == "weights":
            weights = overwritten(weights, breaks)
        told = changes[0][0] * 1000 if damaged == "length" else len(header)
        (place / name).write_bytes(struct.pack("<Q", told) + header + weights)
        count.case(lambda: answer(place), (name, changes, breaks, damaged))
        (place / name).write_bytes(raw)

    check()


TARGETS: dict[str, Callable[[Count, int, int, Path], None]] = {
    "readers": fuzz_readers, GUIDED: fuzz_guided, "labelled data": fuzz_labelled, "sizes in config.json": fuzz_sizes,
    "safetensors headers": fuzz_safetensors,
    **dict.fromkeys(("stretto.json", "config.json", "tokenizer.json", "tokenizer_config.json"), fuzz_json),
}  # fmt: skip


def hang(*_: Any) -> None:
    raise Hang


def write_summary(found: dict[str, Any], number: int) -> None:
    """Keep the rows of targets that did not run now."""
    from stretto.saving.versions import versions

    before = json.loads(SUMMARY.read_text())["targets"] if SUMMARY.exists() else {}
    rows = {target: found.get(target, before.get(target)) for target in CASES if target in {*before, *found}}
    total = {name: sum(row[name] for row in rows.values()) for name in ("cases", *OUTCOMES)}
    summary = {**total, "seed": number, "targets": rows, "versions": versions()}
    SUMMARY.write_text(json.dumps(summary, indent=2) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=float, default=1.0, help="A factor of the number of cases; 1 is summarised.")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--targets", nargs="*", default=list(CASES), choices=list(CASES))
    options.add_argument("--guided", type=int, help=argparse.SUPPRESS)
    options.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    signal.signal(signal.SIGALRM, hang)
    if given.guided:
        guided(given.guided, given.seed, given.report)
    found = {}
    for target in given.targets:
        with tempfile.TemporaryDirectory() as name:
            count = Count(target)
            TARGETS[target](count, max(1, round(CASES[target] * given.cases)), given.seed, Path(name))
        found[target] = count.to_json()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(target, json.dumps(found[target]), f"slowest {count.slowest:.1f} s, memory {memory} MB", flush=True)
        if given.cases == 1:
            write_summary(found, given.seed)
    bad = sum(row["tracebacks"] + row["hangs"] for row in found.values())
    sys.exit(f"{bad} cases ended badly" if bad else 0)


if __name__ == "__main__":
    main()
