"""Feed damaged files to everything that reads files (`make fuzz`; minutes, not part of the tests).

Each case is a file made by hypothesis: random bytes, random values, or a valid file with parts of it replaced. Reading
it ends with an answer or a `StrettoError`; anything else is a traceback, and more than `LONGEST` seconds are a hang.
The summary is written to fuzz-summary.json beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from tiny import tiny_model  # noqa: E402

from stretto import AdaptiveModel, StrettoError  # noqa: E402
from stretto.data import Columns, load  # noqa: E402
from stretto.data.records import read  # noqa: E402
from stretto.saving.folder import quiet_transformers  # noqa: E402
from stretto.saving.versions import versions  # noqa: E402
from stretto.tasks import TASKS  # noqa: E402

SUMMARY = HERE / "fuzz-summary.json"
LONGEST = 20  # seconds
#: Cases of each target; 10,000 in all.
CASES = {
    "readers": 4000, "labelled data": 1500, "stretto.json": 1200, "config.json": 1200, "tokenizer.json": 700,
    "tokenizer_config.json": 600, "safetensors headers": 800,
}  # fmt: skip

# ---- what files may hold -----------------------------------------------------------------------------------

plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(), st.text(max_size=20),
    st.sampled_from([0, 1, -1, 10**9, 1e308, "", "bert", "gpt2", "full", "deebert", "0", "\ud83d", "🎬"]),
)  # fmt: skip
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
words = st.sampled_from(["text", "label", "tokens", "tags", "question", "context", "answers", "a", "score", "1", ""])
rows = st.dictionaries(words, values, max_size=5)
likely = st.fixed_dictionaries({"text": st.text(max_size=9) | values}, optional={"label": values, "tokens": values})
pieces = st.sampled_from([*'text label,;\t\n\r"a1\0\ufeffé{}[]', "text", "label", "\r\n", '""', "0.5"])
starts = st.sampled_from(["", "", "text\n", "text,label\n", "text\tlabel\n", '{"text": "a"}\n', "[{}, "])
lines = st.tuples(starts, st.lists(pieces, max_size=30).map("".join)).map("".join)
jsonl = st.lists(likely | rows, max_size=6).map(lambda them: "\n".join(json.dumps(row) for row in them))
listed = st.lists(rows | values, max_size=6).map(json.dumps)
encodings = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
texts = st.tuples(st.one_of(lines, jsonl, listed, st.text(max_size=60)), encodings)
contents = st.one_of(st.binary(max_size=200), texts.map(lambda it: it[0].encode(it[1], "replace")))
endings = st.sampled_from([".csv", ".tsv", ".jsonl", ".json", ".txt", ".parquet", ".csv.gz", ".jsonl.gz"])
edits = st.lists(st.tuples(st.integers(0, 10**6), st.none() | values), min_size=1, max_size=4)
cuts = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=8)), max_size=3)


def edited(original: Any, changes: list[tuple[int, Any]]) -> Any:
    """A JSON value with some of its parts, at any depth, replaced (or, with None, removed)."""
    value = copy.deepcopy(original)
    for number, new in changes:
        places = list(spots(value))
        if not places:
            break
        holder, key = places[number % len(places)]
        if new is None and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = new
    return value


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from spots(inner)


def overwritten(raw: bytes, changes: list[tuple[int, bytes]]) -> bytes:
    for place, new in changes:
        at = place % (len(raw) + 1)
        raw = raw[:at] + new + raw[at + len(new) :] if new else raw[:at]
    return raw


# ---- counting ----------------------------------------------------------------------------------------------


class Hang(BaseException):
    """It took too long."""


class Count:
    """What became of the cases of one target."""

    def __init__(self, name: str) -> None:
        self.name, self.outcomes, self.bad, self.slowest = name, Counter[str](), Counter[str](), 0.0

    def case(self, action: Callable[[], Any], shown: Any) -> None:
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
        outcomes = {name: self.outcomes[name] for name in ("answered", "refused", "tracebacks", "hangs")}
        return {"cases": sum(self.outcomes.values()), **outcomes}


def hypothesised(count: int, number: int) -> Callable[[Any], Any]:
    """As many random cases as asked for: no shrinking, nothing remembered."""

    def decorate(function: Any) -> Any:
        many = settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        return seed(number)(many(function))

    return decorate


# ---- targets -----------------------------------------------------------------------------------------------


def fuzz_readers(count: Count, cases: int, number: int, folder: Path) -> None:
    delimiters = st.sampled_from([None, None, None, ";", "tab", "||"])

    @hypothesised(cases, number)
    @given(contents, endings, delimiters)
    def check(content: bytes, ending: str, delimiter: str | None) -> None:
        path = folder / f"d{ending}"
        path.write_bytes(gzip.compress(content) if ending.endswith(".gz") and content[:1] != b"\1" else content)
        count.case(lambda: list(read(path, labelled=False, columns=Columns(delimiter=delimiter))), (ending, content))

    check()


def fuzz_labelled(count: Count, cases: int, number: int, folder: Path) -> None:
    tasks = st.sampled_from(list(TASKS.values()))

    @hypothesised(cases, number)
    @given(st.lists(rows | likely, min_size=1, max_size=6), tasks)
    def check(them: list[dict[str, Any]], task: Any) -> None:
        path = folder / "d.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in them), encoding="utf-8")
        count.case(lambda: load(path, task=task), (task.name, them))

    check()


def fuzz_json(count: Count, cases: int, number: int, folder: Path) -> None:
    """A JSON file of a model folder, with parts of it replaced."""
    original = json.loads((folder / count.name).read_text())
    place = folder.with_name("damaged")

    @hypothesised(cases, number)
    @given(edits, cuts)
    def check(changes: list[tuple[int, Any]], breaks: list[tuple[int, bytes]]) -> None:
        content = json.dumps(edited(original, changes)).encode("utf-8", "replace")
        (place / count.name).write_bytes(overwritten(content, breaks if len(breaks) > 2 else []))
        count.case(lambda: answer(place), changes)

    shutil.copytree(folder, place, dirs_exist_ok=True)
    check()


def fuzz_safetensors(count: Count, cases: int, number: int, folder: Path) -> None:
    place = folder.with_name("damaged")
    shutil.copytree(folder, place, dirs_exist_ok=True)
    originals = {name: (folder / name).read_bytes() for name in ("model.safetensors", "stretto.safetensors")}

    @hypothesised(cases, number)
    @given(st.sampled_from(sorted(originals)), edits, cuts, st.booleans())
    def check(name: str, changes: list[tuple[int, Any]], breaks: list[tuple[int, bytes]], honest: bool) -> None:
        raw = originals[name]
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.dumps(edited(json.loads(raw[8 : 8 + size]), changes)).encode("utf-8", "replace")
        told = len(header) if honest else changes[0][0] * 1000
        (place / name).write_bytes(overwritten(struct.pack("<Q", told) + header + raw[8 + size :], breaks))
        count.case(lambda: answer(place), (name, changes, breaks, honest))
        (place / name).write_bytes(raw)

    check()


def answer(place: Path) -> None:
    with quiet_transformers():
        AdaptiveModel.from_pretrained(place).predict(["a good film", ""])


TARGETS: dict[str, Callable[[Count, int, int, Path], None]] = {
    "readers": fuzz_readers, "labelled data": fuzz_labelled, "safetensors headers": fuzz_safetensors,
    **dict.fromkeys(("stretto.json", "config.json", "tokenizer.json", "tokenizer_config.json"), fuzz_json),
}  # fmt: skip


def hang(*_: Any) -> None:
    raise Hang


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=float, default=1.0, help="A factor of the number of cases.")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--targets", nargs="*", default=list(CASES))
    given_options = options.parse_args()
    signal.signal(signal.SIGALRM, hang)
    found = {}
    for target in given_options.targets:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            tiny_model("deebert").save_pretrained(folder)
            count = Count(target)
            TARGETS[target](count, max(1, round(CASES[target] * given_options.cases)), given_options.seed, folder)
            found[target] = count.to_json()
            print(target, json.dumps(found[target]), f"slowest {count.slowest:.1f} s", flush=True)
    bad = sum(row["tracebacks"] + row["hangs"] for row in found.values())
    if given_options.targets == list(CASES) and given_options.cases == 1:
        total = sum(row["cases"] for row in found.values())
        summary = {"cases": total, "seed": given_options.seed, "targets": found, "versions": versions()}
        SUMMARY.write_text(json.dumps(summary, indent=2) + "\n")
    sys.exit(f"{bad} cases ended badly" if bad else 0)


if __name__ == "__main__":
    main()
