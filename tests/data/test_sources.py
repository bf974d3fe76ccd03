"""Every format, the hub and stdin; every bad file is met by an error that says where and what to do."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sources import CSV, give_hub, give_stdin, hub_dataset, jsonl, pairs, write

from stretto.data import Columns, load, read
from stretto.errors import StrettoError

# ---- formats -----------------------------------------------------------------------------------------------

CONTENTS = {
    "r.csv": CSV,
    "r.tsv": CSV.replace(",", "\t"),
    "r.jsonl": jsonl({"text": "good film", "label": "pos"}, {"text": "dull film", "label": "neg"}),
    "r.json": '{"text": "good film", "label": "pos"}\n\n{"text": "dull film", "label": "neg"}',
}


@pytest.mark.parametrize("name", [*CONTENTS, *(name + ".gz" for name in CONTENTS), "R.CSV"])
def test_text_formats(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, CONTENTS[name.lower().removesuffix(".gz")])
    assert pairs(path) == pairs(str(path)) == [(("good film",), "pos"), (("dull film",), "neg")]


def test_reading_is_streaming(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "r.csv", CSV + 'never reached,"'))
    assert next(rows).texts == ("good film",)
    assert next(rows).texts == ("dull film",)
    with pytest.raises(StrettoError, match=r"r\.csv:4: expected closed quotes"):
        next(rows)


def test_bom_crlf_and_blank_lines_are_tolerated(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode() + b"\r\n\r\n")
    assert pairs(path) == [(("good film",), "pos"), (("dull film",), "neg")]


def test_where_is_the_line_on_which_a_row_begins(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", 'text,label\n\n"two\nlines, ""quoted""",a\nplain,b\n')
    records = list(read(path))
    assert records[0].texts == ('two\nlines, "quoted"',)
    assert [record.where for record in records] == [f"{path}:3", f"{path}:5"]


@pytest.mark.parametrize("name", ["r.txt", "R.TXT", "r.txt.gz"])
def test_lines_of_text(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, "a film\r\n\n{not json\n")
    assert pairs(source, labelled=False) == [(("a film",), None), (("",), None), (("{not json",), None)]
    assert pairs(source, labelled=False, columns=Columns(text="line"))[0] == (("a film",), None)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    datasets.Dataset.from_dict({"text": ["a", ""], "label": [1, 0], "other": [[1], []]}).to_parquet(path)
    assert pairs(path) == [(("a",), 1), (("",), 0)]
    assert [record.where for record in read(path)] == [f"{path}:1", f"{path}:2"]


def test_stdin_takes_texts_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, 'plain, with "commas"\r\n\n{"text": "object"}\n[not json]\nlast')
    records = list(read("-", labelled=False))
    assert [record.texts[0] for record in records] == ['plain, with "commas"', "", "object", "[not json]", "last"]
    assert records[-1].where == "stdin:5"
    assert not sys.stdin.buffer.closed


def test_stdin_takes_the_named_column_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, '{"body": "x", "label": 1}\n{"body": "y", "label": 0}\n')
    assert pairs("-", columns=Columns(text="body")) == [(("x",), 1), (("y",), 0)]
    give_stdin(monkeypatch, "x\n")
    assert pairs("-", columns=Columns(text="body"), labelled=False) == [(("x",), None)]


ODD_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ODD_TEXT, min_size=1, max_size=5))
def test_any_text_survives_every_format(tmp_path: Path, texts: list[str]) -> None:
    for dialect, name in (("excel", "r.csv"), ("excel-tab", "r.tsv.gz")):
        buffer = io.StringIO(newline="")
        csv.writer(buffer, dialect, quoting=csv.QUOTE_ALL).writerows([["text", "n"], *([t, "1"] for t in texts)])
        path = write(tmp_path / name, buffer.getvalue())
        assert [r.texts[0] for r in read(path, labelled=False)] == texts
    for ascii_only in (True, False):
        lines = "".join(json.dumps({"text": text}, ensure_ascii=ascii_only) + "\n" for text in texts)
        path = write(tmp_path / "r.jsonl", lines)
        assert [r.texts[0] for r in read(path, labelled=False)] == texts
    path = tmp_path / "r.parquet"
    datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    assert [r.texts[0] for r in read(path, labelled=False)] == texts


# ---- hub datasets and their folders ------------------------------------------------------------------------


def test_hub_dataset_is_streamed_with_its_class_names_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = give_hub(monkeypatch, "train", "test")
    data = load("owner/news:small", split="test")
    assert calls == [("owner/news", "small", True)]
    assert data.label_names == ["world", "sports", "arts"]
    assert data.labels == [1, 0, 1]
    assert data.where[0] == "owner/news:small[test]:1"


def test_hub_dataset_with_a_single_split_needs_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = give_hub(monkeypatch, "train")
    assert pairs("owner/news") == [(("a",), "sports"), (("b",), "world"), (("c",), "sports")]
    assert calls == [("owner/news", None, True)]


@pytest.mark.parametrize("split", [None, "dev"])
def test_hub_dataset_with_several_splits_asks(monkeypatch: pytest.MonkeyPatch, split: str | None) -> None:
    give_hub(monkeypatch, "train", "test")
    with pytest.raises(StrettoError, match=rf"splits 'train', 'test', got {split}\. Choose it with --split\."):
        read("owner/news", split=split)


@pytest.mark.parametrize(
    "error", [ConnectionError("No route\nto host"), datasets.exceptions.DatasetNotFoundError("No route")]
)
def test_an_unreachable_hub_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("stretto.data.sources.reachable", lambda: True)
    with pytest.raises(
        StrettoError, match=r"^owner/news: expected a file or a hub dataset that can be reached, got 'No route'"
    ) as info:
        read("owner/news")
    assert "Check the name and the network" in str(info.value)
    monkeypatch.setattr("stretto.data.sources.reachable", lambda: False)
    with pytest.raises(StrettoError, match="got no answer from the hub"):
        read("owner/news")


def test_a_hub_lost_on_the_way_is_told_with_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        yield {"text": "a", "label": 0}
        raise ConnectionError("gone")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: datasets.IterableDatasetDict(train=stream))
    monkeypatch.setattr("stretto.data.sources.reachable", lambda: True)
    with pytest.raises(StrettoError, match=r"owner/news\[train\]:2: expected another row, got 'gone'"):
        list(read("owner/news"))


def test_saved_folder(tmp_path: Path) -> None:
    hub_dataset().save_to_disk(tmp_path / "one")
    assert load(tmp_path / "one").labels == [1, 0, 1]
    datasets.DatasetDict(train=hub_dataset(), test=hub_dataset().select([0, 1])).save_to_disk(tmp_path / "two")
    assert len(load(tmp_path / "two", split="test")) == 2
    with pytest.raises(StrettoError, match=r"one: expected no split.*, got 'test'\. Leave the split out"):
        load(tmp_path / "one", split="test")


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"expected a folder made by save_to_disk, got .*give the data file itself"):
        read(tmp_path)


def test_class_names_survive_in_parquet(tmp_path: Path) -> None:
    hub_dataset().to_parquet(tmp_path / "r.parquet")
    data = load(tmp_path / "r.parquet")
    assert (data.label_names, data.labels) == (["world", "sports", "arts"], [1, 0, 1])


def test_lists_in_the_schema_of_older_versions(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a"], "label": ["x"], "spans": [["s"]]})
    features = {"spans": [{"dtype": "string", "_type": "Value"}], "none": []}
    about = json.dumps({"info": {"features": features}})
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": about}), tmp_path / "r.parquet")
    assert pairs(tmp_path / "r.parquet") == [(("a",), "x")]


def test_hidden_hub_labels_count_as_missing(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y"])})
    datasets.Dataset.from_dict({"text": ["a"], "label": [-1]}, features=features).to_parquet(tmp_path / "r.parquet")
    assert pairs(tmp_path / "r.parquet", labelled=False) == [(("a",), None)]
    with pytest.raises(StrettoError, match=r"r\.parquet:1: expected a label in 'label', got none"):
        load(tmp_path / "r.parquet")


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("r.csv", "", [": expected at least one row", "got none", "Check"]),
        ("r.csv", "text,label\n", [": expected at least one row", "got none"]),
        ("r.jsonl", "\n\n", [": expected at least one row", "got none"]),
        ("r.csv.gz", "", [": expected at least one row"]),
        ("r.csv", "text,text\na,b\n", [":1: expected different column names, got 'text', 'text'", "Rename"]),
        ("r.csv", CSV + "one, two,pos\n", [":4: expected 2 fields ('text', 'label'), got 3", "Quote"]),
        ("r.csv", CSV + "alone\n", [":4: expected 2 fields", "got 1", "Quote"]),
        ("r.csv", CSV + '"open,pos\nx,y\n', [":4: expected closed quotes", "unexpected end of data", "Close"]),
        ("r.tsv", 'text\tlabel\n"Hi" he said\ta\n', [":2: expected closed quotes", ".jsonl"]),
        ("r.csv", CSV + "x" * (2**24 + 1) + ",pos\n", [":4: expected closed quotes", "field larger than field limit"]),
        ("r.csv", CSV + "fine, \n", [":4: expected a label in 'label', got none", "Fill it in"]),
        ("r.csv", CSV.encode() + b"caf\xe9,pos\n", [":4: expected UTF-8, got the byte 0xe9 at byte 4", "iconv"]),
        ("r.csv", CSV.encode("utf-16"), [": expected text in UTF-8, got text in UTF-16", "Save it as UTF-8"]),
        ("r.csv", CSV.encode("utf-16-le"), [": expected text in UTF-8, got text in UTF-16", "iconv -f utf-16"]),
        ("r.csv", CSV.encode("utf-16-be"), [": expected text in UTF-8, got text in UTF-16", "iconv -f utf-16"]),
        ("r.csv", gzip.compress(CSV.encode(), mtime=0), [": expected text in UTF-8, got a gzip file", "Rename it"]),
        ("r.jsonl", b"PK\x03\x04\0\0", [": expected text in UTF-8, got a zip archive (an .xlsx", "export"]),
        ("r.txt", b"PAR1\x15\0\0", [": expected text in UTF-8, got a parquet file", "Rename it to end in .parquet"]),
        ("r.txt", b"BZh91AY&SY\xff", [": expected text in UTF-8, got a bzip2 file", "bunzip2"]),
        ("r.csv", "text;label\na;b\n", [":1: expected columns separated by ','", "by ';'", "Add --delimiter ';'"]),
        ("r.csv", "text\tlabel\na\tb\n", [":1: expected columns separated by ','", "Add --delimiter tab"]),
        ("r.tsv", "text,label\na,b\n", [":1: expected columns separated by '\\t'", "Add --delimiter ','"]),
        ("r.jsonl", '{"text": "a", "label": 1}\n{"text": \n', [":2: expected one JSON object", "at character", "jq"]),
        ("r.jsonl", '[{"text": "a", "label": 1}]', [":1: expected one JSON object per line, got a JSON list", "jq"]),
        ("r.jsonl", '[\n  {"text": "a"}\n]', [":1: expected one JSON object per line, got bad JSON", "jq -c"]),
        ("r.json", '[\n  {"text": "a"},\n]', [": expected a JSON list of objects, got bad JSON", "per line"]),
        ("r.json", '[{"text": "a", "label": 1}, 3]', [":2: expected a JSON list of objects, got 3 in it", "Write"]),
        ("r.jsonl", '{"text": ' + "1" * 5000 + "}", [":1: expected one JSON object per line, got bad JSON"]),
        ("r.jsonl", "[" * 100_000, [":1: expected one JSON object per line, got bad JSON"]),
        ("r.jsonl", '{"text": "a", "label": 1}\n{"txt": "b", "label": 0}', [":2: expected a text in 'text'", "'txt'"]),
        ("r.jsonl", jsonl({"text": None, "label": 1}), [":1: expected a text in 'text', got null", "Fill"]),
        ("r.jsonl", jsonl({"text": 5, "label": 1}), [":1: expected a text in 'text', got 5 (int)", "--text"]),
        ("r.jsonl", jsonl({"text": "ok \ud83d", "label": 1}), [":1: expected Unicode", "'\\ud83d'", "character 4"]),
        ("r.jsonl", jsonl({"text": "a", "label": 1}, {"text": "b"}), [":2: expected a label in 'label', got none"]),
        ("r.jsonl", '{"text": "a", "label": NaN}', [":1: expected a label in 'label', got none"]),
        ("r.jsonl", jsonl({"text": "a", "label": [0, 1]}), [":1: expected a word or a number", "[0, 1]", "--label"]),
        ("r.parquet", "text,label\n", [": expected a parquet file, got ", "again"]),
        ("r.md", "a\n", [": expected a name ending in .csv", "got 'r.md'"]),
        ("r.gz", "a\n", [": expected a name ending in .csv", "got 'r.gz'"]),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, name: str, content: str | bytes, words: list[str]) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(StrettoError) as info:
        list(read(path))
    assert str(info.value).startswith(f"{path}{words[0]}"), str(info.value)
    assert all(word in str(info.value) for word in words), str(info.value)


def test_a_long_text_in_a_csv_file(tmp_path: Path) -> None:
    text = "good " * 100_000
    (record,) = read(write(tmp_path / "long.csv", f"text,label\n{text},1\n"))
    assert record.texts == (text,)


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv.gz", CSV)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(StrettoError, match=r"r\.csv\.gz:\d: expected a complete gzip file, got a truncated.*Copy"):
        list(read(path))


def test_a_gzip_file_by_name_only(tmp_path: Path) -> None:
    (tmp_path / "r.csv.gz").write_text(CSV)
    with pytest.raises(StrettoError, match=r"r\.csv\.gz: expected a gzip file .* got another kind of file\. Remove"):
        list(read(tmp_path / "r.csv.gz"))


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "r.csv", CSV)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(
        StrettoError, match=r"expected a readable file, got 'Permission denied'\. Check its permissions"
    ):
        list(read(path))


def test_a_missing_file_is_told_at_once_with_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", CSV)
    with pytest.raises(StrettoError, match=r"tran\.csv': file not found\. Did you mean '.*/train\.csv'\?"):
        read(tmp_path / "tran.csv")
    with pytest.raises(StrettoError, match=r"zzz\.csv': file not found\. Check the path; .*owner/name"):
        read(tmp_path / "zzz.csv")
    with pytest.raises(StrettoError, match=r"There is no folder '.*nowhere' either"):
        read(tmp_path / "nowhere" / "train.csv")


@pytest.mark.parametrize("source", ["data/train.csv", "data/train.jsonl.gz", "reviews", "a/b/c", "../x"])
def test_paths_are_not_taken_for_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    calls = give_hub(monkeypatch, "train")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrettoError, match="file not found"):
        read(source)
    assert calls == []


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"r\.csv' and the split 'test'\. Leave the split out"):
        read(write(tmp_path / "r.csv", CSV), split="test")


def test_bad_json_on_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    give_stdin(monkeypatch, "fine\n{broken\n")
    with pytest.raises(StrettoError, match=r"^stdin:2: expected one JSON object per line"):
        list(read("-", labelled=False))
    give_stdin(monkeypatch, "")
    with pytest.raises(StrettoError, match=r"^stdin: expected at least one row"):
        list(read("-", labelled=False))


@pytest.mark.parametrize(("delimiter", "between"), [(";", ";"), ("tab", "\t"), ("\\t", "\t"), ("|", "|")])
def test_another_delimiter(delimiter: str, between: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", CSV.replace(",", between))
    assert pairs(path, columns=Columns(delimiter=delimiter)) == pairs(write(tmp_path / "c.csv", CSV))


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n"])
def test_what_is_no_delimiter(delimiter: str, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="Expected one character or 'tab' as the delimiter"):
        pairs(write(tmp_path / "r.csv", CSV), columns=Columns(delimiter=delimiter))
    with pytest.raises(StrettoError, match=r"Expected a \.csv or \.tsv file with --delimiter"):
        pairs(write(tmp_path / "r.jsonl", "{}"), columns=Columns(delimiter=";"))


def test_a_list_of_objects(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    listed = write(tmp_path / "r.json", json.dumps(rows, indent=1))
    assert pairs(listed) == [(("a",), "x"), (("b",), "y")] == pairs(write(tmp_path / "l.json", jsonl(*rows)))
