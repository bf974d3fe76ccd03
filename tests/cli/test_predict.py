"""`stretto predict`: order, streaming, odd texts; a failure leaves what was there."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet
import pytest
from commands import run
from forked import Piped, stretto_child
from sources import jsonl, write

from stretto import AdaptiveModel, StrettoError

ODD_TEXTS = [
    "a good film",
    "",
    "   ",
    "dull " * 10_000,
    "日本語 🎬 \u202e \u200b ﬃ é\u0301",
    'he said "no", twice',
    "[red]not markup",
]


def test_predict_from_file_to_file_keeps_order_and_texts(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", jsonl(*({"text": text, "id": i} for i, text in enumerate(ODD_TEXTS))))
    expected = AdaptiveModel.from_pretrained(model).predict(ODD_TEXTS)
    result = run("predict", model, source, "--output", tmp_path / "out.jsonl", "--batch-size", 2, "--probabilities")
    assert result.exit_code == 0, result.stderr
    assert "truncated to 64 tokens: 1 of 7 texts" in result.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ODD_TEXTS
    assert [(row["label"], row["depth"]) for row in rows] == [(p.label, p.depth) for p in expected]
    assert [row["cost"] for row in rows] == pytest.approx([p.cost for p in expected])
    assert all(row["score"] == row["probabilities"][row["label"]] for row in rows)

    assert (
        run("predict", model, source, "--output", tmp_path / "out.csv", "--dial", 0, "--probabilities").exit_code == 0
    )
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["text", "label", "score", "depth", "cost", "p_bad", "p_good"]
    assert [row["text"] for row in table] == ODD_TEXTS
    assert {row["depth"] for row in table} == {"4"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.csv", "out.jsonl"]


def test_every_format_holds_the_same_rows(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", 'text,id\na good film,1\n"dull, \nlong",2\n\tquite poor,3\n')
    read = {
        "out.jsonl": lambda path: [json.loads(line) for line in path.read_text().splitlines()],
        "out.json": lambda path: json.loads(path.read_text()),
        "out.jsonl.gz": lambda path: [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()],
        "out.csv": lambda path: list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline=""))),
        "out.tsv.gz": lambda path: list(
            csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode(), newline=""), dialect="excel-tab")
        ),
        "out.parquet": lambda path: pyarrow.parquet.read_table(path).to_pylist(),
    }
    rows = {}
    for name, reader in read.items():
        result = run("predict", model, source, "--keep", "id", "--output", tmp_path / name, "--batch-size", 1)
        assert result.exit_code == 0, result.stderr
        assert f"wrote 3 answers to {tmp_path / name}" in result.stderr
        rows[name] = [{key: str(value) for key, value in row.items()} for row in reader(tmp_path / name)]
        assert rows[name] == rows["out.jsonl"]
    assert [row["text"] for row in rows["out.json"]] == ["a good film", "dull, \nlong", "\tquite poor"]


def test_the_average_cost_is_that_of_evaluate(model: Path, data: Path, tmp_path: Path) -> None:
    result = run("predict", model, data, "--output", tmp_path / "out.jsonl", "--dial", 0.97, "--batch-size", 3)
    points = json.loads(run("evaluate", model, data, "--dials", "0.97", "--json").stdout)["points"]
    assert f"average cost {points[0]['cost']:.3f}" in result.stderr


def test_progress_knows_how_many_there_are(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.data.records import read

    totals = []
    monkeypatch.setattr("stretto.cli.predict.on_terminal", lambda: True)
    monkeypatch.setattr("tqdm.auto.tqdm", lambda total, **_: totals.append(total) or nullcontext(mock.Mock()))
    csv_file = write(tmp_path / "in.csv", 'text\na\n"b\nc"\n\n')
    assert run("predict", model, csv_file, "--output", tmp_path / "o.jsonl").exit_code == 0
    assert totals == [2]
    assert read(write(tmp_path / "in.jsonl", '{"text": "a"}\n\n{"text": "b"}'), labelled=False).count() == 2
    assert read(write(tmp_path / "in.txt", "a\n\nb\n"), labelled=False).count() == 3
    assert read(write(tmp_path / "in.csv.gz", "text\na\n"), labelled=False).count() is None
    assert read(write(tmp_path / "bad.csv", b"text\n\xff\n"), labelled=False).count() is None


def test_predict_pairs_and_named_columns(model: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.csv", "premise,hypothesis\nthe plot,was good\n,\n")
    rows = [json.loads(line) for line in run("predict", model, pairs).stdout.splitlines()]
    assert [(row["premise"], row["hypothesis"]) for row in rows] == [("the plot", "was good"), ("", "")]
    named = write(tmp_path / "named.csv", "body,label\na film,good\n")
    assert json.loads(run("predict", model, named, "--text", "body").stdout)["body"] == "a film"


def test_columns_may_be_kept_beside_the_answers(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", "id,text,date\n7,a good film,1999\n8,dull,2001\n")
    assert run("predict", model, source, "--keep", "id,date", "--output", tmp_path / "out.csv").exit_code == 0
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["date"], row["text"]) for row in rows] == [
        ("7", "1999", "a good film"),
        ("8", "2001", "dull"),
    ]
    refused = run("predict", model, source, "--keep", "id,day")
    assert refused.exit_code == 1
    assert "expected the column 'day' to keep, got 'id', 'text', 'date'" in refused.stderr


def test_the_input_is_not_overwritten(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", "text\na good film\n")
    refused = run("predict", model, source, "--output", tmp_path / "." / "in.csv")
    assert refused.exit_code == 1
    assert "Expected an output that is not the input" in refused.stderr
    assert source.read_text() == "text\na good film\n"


@pytest.mark.parametrize("flags", [["--text", "score"], ["--keep", "score"]])
def test_a_column_called_as_a_part_of_the_answer(flags: list[str], model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", "text,score\na good film,fine\n")
    refused = run("predict", model, source, *flags, "--output", tmp_path / "out.jsonl")
    assert refused.exit_code == 1
    assert "not called as parts of an answer (label, score, depth, cost), got 'score'" in refused.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_predict_from_stdin_to_stdout(model: Path) -> None:
    lines = ["a good film", "", '{"text": "dull"}']
    for args in ((), ("-",)):
        result = run("predict", model, *args, stdin="\n".join(lines) + "\n")
        assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["a good film", "", "dull"]


def test_answers_stream(model: Path) -> None:
    """Lines are answered while the input is still open, half a batch too; Ctrl-C ends it with 130."""
    with Piped("predict", model, "--batch-size", 2) as process:
        process.stdin.write("one\ntwo\nthree\nfo")
        process.stdin.flush()
        assert [json.loads(process.stdout.readline())["text"] for _ in range(3)] == ["one", "two", "three"]
        process.stdin.write("ur\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["text"] == "four"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "interrupted. The same command starts from the beginning.\n"


def test_memory_is_bounded_by_a_few_batches(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are answered before the next ones are read."""
    from stretto.data.records import Record, Records
    from stretto.data.sources import Table

    events = []

    def read(*_: Any, **__: Any) -> Any:
        def records() -> Any:
            for i in range(7):
                events.append("read")
                yield Record((f"film {i}",), None, f"made:{i}")

        return Records(records(), Table(iter(())))

    answer = AdaptiveModel.answer
    monkeypatch.setattr("stretto.data.records.read", read)
    monkeypatch.setattr("stretto.model.WINDOW", 3)
    monkeypatch.setattr(AdaptiveModel, "answer", lambda *args: events.append("answer") or answer(*args))
    assert run("predict", model, "any", "--batch-size", 1, "--output", tmp_path / "o.jsonl").exit_code == 0
    assert events == ["read"] * 3 + ["answer"] + ["read"] * 3 + ["answer", "read", "answer"]


@pytest.mark.parametrize(
    "failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), StrettoError("no")]
)
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_failure_leaves_what_was_there(
    failure: BaseException, name: str, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = write(tmp_path / name, "earlier answers")
    answer, calls = AdaptiveModel.answer, []

    def fail_later(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise failure
        return answer(*args)

    monkeypatch.setattr(AdaptiveModel, "answer", fail_later)
    monkeypatch.setattr("stretto.model.WINDOW", 1)
    result = run("predict", model, data, "--output", output, "--batch-size", 4)
    assert result.exit_code == (130 if isinstance(failure, KeyboardInterrupt) else 1)
    assert result.stderr.splitlines()[-1].startswith("interrupted" if result.exit_code == 130 else "error: ")
    assert output.read_text() == "earlier answers"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("args", "answer"),
    [
        (["predict", "MODEL", "DATA", "--output", "/dev/full"], "No space left on device"),
        (["evaluate", "MODEL", "DATA", "--dials", "0", "--json", "/dev/full"], "No space left on device"),
        (["predict", "MODEL", "DATA", "--output", "nowhere/out.csv"], "No such file or directory"),
        (["predict", "MODEL", "DATA", "--output", "out.xlsx"], "(also with .gz) or .parquet, got 'out.xlsx'"),
        (["predict", "MODEL", "DATA", "--output", "MODEL"], "Is a directory"),
        (["predict", "MODEL", "DATA", "--dial", "7"], "the dial 'entropy' between 0 and 1, got 7"),
        (["predict", "MODEL", "nowhere.csv"], "file not found"),
        (["predict", "MODEL", "DATA", "--text", "body"], "expected a column 'body'"),
    ],
)
def test_what_cannot_be_predicted_or_written(args: list[str], answer: str, model: Path, data: Path) -> None:
    names = {"MODEL": model, "DATA": data}
    result = run(*(names.get(arg, arg) for arg in args))
    assert result.exit_code == 1
    assert answer in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_has_enough_and_a_full_disk_behind_stdout(model: Path, tmp_path: Path) -> None:
    many = write(tmp_path / "many.jsonl", jsonl(*({"text": "a good film"} for _ in range(2000))))
    with Piped("predict", model, many) as process:
        assert json.loads(process.stdout.readline())["text"] == "a good film"
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (141, "")
    done = stretto_child("predict", model, many, stdout="/dev/full")
    assert done.code == 1
    assert done.stderr == (
        "error: Expected to read or write a file, got: No space left on device. "
        "Free some space or choose another place.\n"
    )
