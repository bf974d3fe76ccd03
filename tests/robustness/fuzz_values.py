"""What damaged files hold: values, lines and bytes for hypothesis, and valid files with parts of them replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(), st.text(max_size=20),
    st.sampled_from([0, 1, -1, 10**9, 1e308, "", "bert", "gpt2", "full", "deebert", "0", "\ud83d", "🎬"]),
)  # fmt: skip
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip

# ---- data files --------------------------------------------------------------------------------------------

words = st.sampled_from(["text", "label", "tokens", "tags", "question", "context", "answers", "a", "score", "1", ""])
rows = st.dictionaries(words, values, max_size=5)
likely = st.fixed_dictionaries({"text": st.text(max_size=9) | values}, optional={"label": values, "tokens": values})
good = st.fixed_dictionaries({"text": st.text("ab c", max_size=9), "label": st.sampled_from(["good", "bad"])})
pieces = st.sampled_from([*'text label,;\t\n\r"a1\0\ufeffé{}[]', "text", "label", "\r\n", '""', "0.5"])
starts = st.sampled_from(["", "", "text\n", "text,label\n", "text\tlabel\n", '{"text": "a"}\n', "[{}, "])
lines = st.tuples(starts, st.lists(pieces, max_size=30).map("".join)).map("".join)
table = st.lists(st.text("ab c1", max_size=9), min_size=1, max_size=5).map(lambda them: "\n".join(["text", *them, "a"]))
jsonl = st.lists(likely | rows | good, max_size=6).map(lambda them: "\n".join(json.dumps(row) for row in them))
listed = st.lists(rows | values, max_size=6).map(json.dumps)
encodings = st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
texts = st.tuples(st.one_of(lines, table, jsonl, listed, st.text(max_size=60)), encodings)
contents = st.one_of(texts.map(lambda it: it[0].encode(it[1], "replace")), st.binary(max_size=200))
ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".parquet", ".csv.gz", ".jsonl.gz")
delimiters = st.sampled_from([None, None, None, ";", "tab", "||"])

# ---- files of a model --------------------------------------------------------------------------------------

edits = st.lists(st.tuples(st.integers(0, 10**6), st.none() | values), min_size=1, max_size=4)
cuts = st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=8)), max_size=3)
absurd = st.sampled_from(
    [10**9, 10**12, 2**63, 2**31 - 1, 10**6, 30_000, -1, -(10**9), 0, 1, 1.5, 1e9, 1e308, "12", "", None, True, []]
)  # fmt: skip


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
