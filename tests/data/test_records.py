"""Which columns are read: guessed, named, or asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from sources import jsonl, pairs, write

from stretto.data import Columns, Dataset, load, read
from stretto.errors import StrettoError


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (["id", "text"], ["text"]),
        (["review", "title"], ["review"]),
        (["question"], ["question"]),
        (["text_b", "text_a"], ["text_a", "text_b"]),
        (["sentence1", "sentence2"], ["sentence1", "sentence2"]),
        (["premise", "hypothesis"], ["premise", "hypothesis"]),
        (["question1", "question2"], ["question1", "question2"]),
        (["sentence", "question"], ["question", "sentence"]),
    ],
)
def test_text_columns_are_guessed(tmp_path: Path, names: list[str], texts: list[str]) -> None:
    path = write(tmp_path / "r.jsonl", jsonl({name: f"<{name}>" for name in names}))
    assert [record.texts for record in read(path, labelled=False)] == [tuple(f"<{name}>" for name in texts)]


def test_a_list_of_words_is_a_text(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", jsonl({"tokens": ["a", "fine", "film"], "label": "good"}))
    assert pairs(path) == [(("a fine film",), "good")]


@pytest.mark.parametrize("label", ["label", "labels", "score", "category", "class", "target"])
def test_label_column_is_guessed(tmp_path: Path, label: str) -> None:
    assert pairs(write(tmp_path / "r.csv", f"text,{label}\na,b\n")) == [(("a",), "b")]


def test_a_column_called_label_beats_the_other_guesses(tmp_path: Path) -> None:
    assert pairs(write(tmp_path / "r.csv", "text,score,label\na,0.9,b\n")) == [(("a",), "b")]


def test_named_columns_beat_the_guesses(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", "text,body,reply,label,mood\na,b,c,d,e\n")
    assert pairs(path, columns=Columns("body", "reply", "mood")) == [(("b", "c"), "e")]
    assert pairs(path, columns=Columns(text="label", label="text")) == [(("d",), "a")]


@pytest.mark.parametrize(
    ("header", "columns", "words"),
    [
        ("body,label", Columns(), ["expected one column", "got none among the columns 'body', 'label'", "--text"]),
        ("text,review,label", Columns(), ["got text and review among", "--text"]),
        ("text,premise,hypothesis", Columns(), ["got premise+hypothesis and text among", "--text-b"]),
        ("text,mood", Columns(), ["hold the label, got none among the columns 'text', 'mood'", "--label"]),
        ("text,class,score", Columns(), ["hold the label, got score and class", "--label"]),
        ("text,label", Columns(text="txt"), ["expected a column 'txt', got the columns 'text', 'label'", "--text."]),
        ("text,label", Columns("text", "txt"), ["expected a column 'txt'", "--text-b."]),
        ("text,label", Columns(label="mood"), ["expected a column 'mood', got the columns 'label'", "--label."]),
        ("text,label", Columns(text_b="label"), ["Expected --text together with --text-b, got only --text-b label"]),
    ],
)
def test_columns_that_cannot_be_told(tmp_path: Path, header: str, columns: Columns, words: list[str]) -> None:
    path = write(tmp_path / "r.csv", header + "\n" + ",".join("x" * (header.count(",") + 1)) + "\n")
    with pytest.raises(StrettoError) as info:
        list(read(path, columns=columns))
    assert all(word in str(info.value) for word in words), str(info.value)


def test_an_unlabelled_file_is_fine_when_no_labels_are_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", "text\na\n")
    assert pairs(path, labelled=False) == [(("a",), None)]
    assert load(path, labelled=False) == Dataset([("a",)], None, None, [f"{path}:2"])
    assert pairs(write(path, "text,label\na,\nb,c\n"), labelled=False) == [(("a",), None), (("b",), None)]
    several = write(tmp_path / "r.jsonl", '{"text": "a", "labels": ["x", "y"]}\n')  # no label, but nobody asks
    assert pairs(several, labelled=False) == [(("a",), None)]
