"""Tags: words to pieces and back, losses by hand, entity scores, and what cannot be tagged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from sources import jsonl, write
from tiny import TAGS, tiny_model, tiny_tokenizer
from tokenizers import pre_tokenizers
from transformers import ByT5Tokenizer, RobertaTokenizer

from stretto.data import load
from stretto.data.tokenise import IGNORED
from stretto.errors import StrettoError
from stretto.tasks import Entity, Tokens

NAMES = ["O", "B-person", "I-person", "B-place"]
TASK = Tokens(NAMES)


# ---- alignment ---------------------------------------------------------------------------------------------


def test_the_first_piece_of_a_word_carries_its_tag() -> None:
    # the tiny tokenizer cuts at punctuation: [CLS] the film ! ? [SEP]
    encoded = TASK.encode(tiny_tokenizer(), [("the", "film!?", "was"), ()], 64, [[0, 1, 3], []])
    assert [len(feature["input_ids"]) for feature in encoded.features] == [6, 2]
    assert encoded.places[0] == [1, 2, 4]
    assert encoded.labels == [[IGNORED, 0, 1, IGNORED, 3, IGNORED], [IGNORED, IGNORED]]
    assert encoded.truncated == 0


def test_words_beyond_the_limit_are_answered_outside_and_counted() -> None:
    words = ("city",) * 10
    encoded = TASK.encode(tiny_tokenizer(), [words, words[:6]], 8, [[3] * 10, [3] * 6])
    assert encoded.truncated == 1
    assert [len(feature["input_ids"]) for feature in encoded.features] == [8, 8]
    assert encoded.features[0]["input_ids"][-1] == tiny_tokenizer().sep_token_id
    assert encoded.places[0] == [1, 2, 3, 4, 5, 6, *[IGNORED] * 4]
    sure = torch.zeros(8, 4)
    sure[:, 3] = 50.0
    first, second = TASK.decode([sure, sure], encoded)
    assert first.tags == ["B-place"] * 6 + ["O"] * 4
    assert first.scores == [1.0] * 6 + [0.0] * 4
    assert second.tags == ["B-place"] * 6
    got = TASK.scores([sure, sure], encoded, [[3] * 10, [3] * 6])
    assert got == {"f1": pytest.approx(24 / 28), "precision": 1.0, "recall": 0.75, "accuracy": 0.75}


def test_a_word_without_a_piece_is_outside() -> None:
    encoded = TASK.encode(tiny_tokenizer(), [("city", "", "  ", "film")], 64, [[3, 1, 1, 0]])
    assert encoded.places == [[1, IGNORED, IGNORED, 2]]
    assert encoded.labels == [[IGNORED, 3, 0, IGNORED]]


def byte_level(folder: Path) -> Path:
    """A RoBERTa tokenizer of single bytes, which tells "a b" from "ab" by the space alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *alphabet, "Ġa"])}
    RobertaTokenizer(vocab=vocab, merges=[("Ġ", "a")]).save_pretrained(folder)
    return folder


def test_words_of_byte_level_tokenizers_keep_their_space(tmp_path: Path) -> None:
    model = tiny_model("full", "roberta", task=Tokens(TAGS))
    model.save_pretrained(tmp_path / "saved")
    byte_level(tmp_path / "saved")
    from stretto.saving.folder import load_tokenizer

    tokenizer = load_tokenizer(str(tmp_path / "saved"), TASK)
    encoded = TASK.encode(tokenizer, [("a", "ba")], 64)
    assert tokenizer.convert_ids_to_tokens(encoded.features[0]["input_ids"]) == ["<s>", "Ġa", "Ġ", "b", "a", "</s>"]
    assert encoded.places == [[1, 2]]
    tokenizer.save_pretrained(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again"), TASK).add_prefix_space


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(StrettoError, match=r"leaves room for words, got 2\. Raise"):
        TASK.encode(tiny_tokenizer(), [("a",)], 2)
    with pytest.raises(StrettoError, match="got ByT5Tokenizer, written in Python"):
        TASK.encode(ByT5Tokenizer(), [("a",)], 64)
    for bad in (3, None, ["a", 3], {"a": 1}):
        with pytest.raises(StrettoError, match="a text or a list of words"):
            TASK.check_input(bad)
    assert TASK.check_input(" Jane  Doe\n") == ("Jane", "Doe")
    assert TASK.check_input(["Jane", "van Doe"]) == ("Jane", "van Doe")


@pytest.mark.parametrize("names", [[], ["O"], ["O", "O"]])
def test_tags_are_several_and_different(names: list[str]) -> None:
    with pytest.raises(StrettoError, match=r"two or more different tags, got"):
        Tokens(names)


# ---- losses ------------------------------------------------------------------------------------------------

LOGITS = torch.tensor([[[9.0, 0.0], [0.0, math.log(3.0)], [math.log(3.0), 0.0]], [[0.0, 0.0]] * 3])
LABELS = torch.tensor([[IGNORED, 1, 1], [IGNORED] * 3])


def test_the_loss_is_the_mean_over_tagged_tokens() -> None:
    loss = Tokens(["a", "b"]).loss(LOGITS, LABELS)
    torch.testing.assert_close(loss, torch.tensor([(math.log(4 / 3) + math.log(4.0)) / 2, 0.0]))


def test_distillation_reads_tagged_tokens_only() -> None:
    task, teacher = Tokens(["a", "b"]), torch.zeros(2, 3, 2)
    student = torch.where((LABELS == IGNORED).unsqueeze(-1), 100.0 * torch.randn(2, 3, 2), LOGITS)
    # KL(½, ½ ‖ ¼, ¾) = ½ log 2 + ½ log ⅔, for both tagged tokens
    expected = torch.tensor([0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.0])
    torch.testing.assert_close(task.distillation(student, teacher, LABELS), expected)


def test_the_right_logit_sums_over_tagged_tokens() -> None:
    torch.testing.assert_close(Tokens(["a", "b"]).right_logit(LOGITS, LABELS), torch.tensor([math.log(3.0), 0.0]))


# ---- scores ------------------------------------------------------------------------------------------------


def scores(truth: list[list[str]], predicted: list[list[str]], names: list[str] = NAMES) -> dict[str, float]:
    task = Tokens(names)
    texts = [("city",) * len(tags) for tags in truth]
    encoded = task.encode(tiny_tokenizer(), texts, 64)
    logits = []
    for feature, tags in zip(encoded.features, predicted, strict=True):
        row = torch.zeros(len(feature["input_ids"]), len(names))
        for position, tag in enumerate(tags, start=1):
            row[position, names.index(tag)] = 9.0
        logits.append(row)
    return task.scores(logits, encoded, [[names.index(tag) for tag in tags] for tags in truth])


def test_entities_count_whole() -> None:
    truth = [["B-person", "I-person", "O", "B-place"], ["O", "B-person"]]
    predicted = [["B-person", "O", "O", "B-place"], ["O", "B-person"]]
    # right: the place and the second person; the first person has the wrong end
    two_thirds = dict.fromkeys(("f1", "precision", "recall"), 2 / 3)
    assert scores(truth, predicted) == pytest.approx({**two_thirds, "accuracy": 5 / 6})
    assert scores(truth, truth)["f1"] == 1.0


@pytest.mark.parametrize("predicted", ["O", "B-place"])
@pytest.mark.parametrize("truth", ["O", "B-person"])
def test_scores_without_entities_are_defined(truth: str, predicted: str) -> None:
    assert scores([[truth]], [[predicted]])["f1"] == 0.0  # warnings are errors here
    assert scores([[]], [[]]) == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 0.0}


def test_plain_tags_are_scored_by_accuracy() -> None:
    names = ["NOUN", "VERB"]
    assert (Tokens(names).main_metric, Tokens(NAMES).main_metric) == ("accuracy", "f1")
    got = scores([["NOUN", "VERB", "VERB"]], [["NOUN", "NOUN", "VERB"]], names)
    assert got == pytest.approx({"accuracy": 2 / 3, "macro_f1": 2 / 3})
    encoded = Tokens(names).encode(tiny_tokenizer(), [("film",)], 64)
    assert Tokens(names).decode([torch.zeros(3, 2)], encoded)[0].entities == []


def test_entities_of_an_answer() -> None:
    model = tiny_model("full", task=TASK)
    answer = model.predict("the city")
    assert answer.words == ["the", "city"]
    assert (answer.depth, answer.cost) == (4, 1.0)
    assert len(answer.tags) == len(answer.scores) == 2
    words, sure = ["the", "man", "two", "city"], [0.5, 0.8, 0.6, 0.9]
    assert TASK.entities(words, ["O", "B-person", "I-person", "B-place"], sure) == [
        Entity("person", "man two", 1, 3, pytest.approx(0.7)),
        Entity("place", "city", 3, 4, 0.9),
    ]
    assert model.predict([["the", "city"], "the city", ("the", "city")]) == [answer] * 3
    assert model.predict(("the", "city")) == answer
    empty = model.predict("")
    assert (empty.tags, empty.entities) == ([], [])


def test_a_diverged_model_is_told() -> None:
    encoded = TASK.encode(tiny_tokenizer(), [("film",)], 64)
    with pytest.raises(StrettoError, match="Expected finite logits, got nan for example 0"):
        TASK.scores([torch.full((3, 4), torch.nan)], encoded, [[0]])


# ---- data --------------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {"tokens": ["Jane", "Doe", "left", "Paris"], "tags": ["B-person", "I-person", "O", "B-place"]}


@pytest.mark.parametrize(("words", "tags"), [("tokens", "tags"), ("words", "ner_tags"), ("tokens", "labels")])
def test_words_and_tags_are_read(words: str, tags: str, tmp_path: Path) -> None:
    rows = [{words: ROW["tokens"], tags: ROW["tags"], "id": 1}, {words: [], tags: []}]
    data = load(write(tmp_path / "d.jsonl.gz", jsonl(*rows)), task=Tokens)
    assert data.label_names == ["B-person", "B-place", "I-person", "O"]
    assert data.texts == [("Jane", "Doe", "left", "Paris"), ()]
    assert data.labels == [[0, 2, 3, 1], []]
    again = load(write(tmp_path / "d.jsonl", jsonl(*rows)), task=Tokens, label_names=NAMES)
    assert again.labels == [[1, 2, 0, 3], []]


def test_class_numbers_of_lists_get_their_names(tmp_path: Path) -> None:
    names = ["O", "B-x", "I-x"]
    features = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(datasets.ClassLabel(names=names))}
    )
    made = datasets.Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[0, 1]]}, features=features)
    made.to_parquet(tmp_path / "d.parquet")
    made.save_to_disk(tmp_path / "folder")
    for source in (tmp_path / "d.parquet", tmp_path / "folder"):
        data = load(source, task=Tokens)
        assert (data.label_names, data.labels) == (names, [[0, 1]])


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({**ROW, "tags": ["O"]}, r"expected a tag for each of 4 words, got 1 tags in 'tags'\. Correct"),
        ({**ROW, "tags": None}, r"expected a list of tags in 'tags', got nothing"),
        ({"tokens": ["a"]}, r"expected a list of tags in 'tags', got nothing"),
        ({"tags": ["O"]}, r"expected a list of words in 'tokens', got nothing"),
        ({**ROW, "tokens": "Jane Doe"}, r"expected a list of words .*, got 'Jane Doe' \(str\)\. Write lists as"),
        ({**ROW, "tokens": ["Jane", 3, "left", "Paris"]}, r"expected a text in 'tokens', got 3 \(int\)"),
        ({**ROW, "tags": ["O", "O", None, "O"]}, r"expected a tag for each word in 'tags', got None at word 3"),
        ({**ROW, "tags": ["O", "O", ["O"], "O"]}, r"expected a word or a number in 'tags', got \['O'\]"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], answer: str, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=rf"d\.jsonl:2: {answer}"):
        load(write(tmp_path / "d.jsonl", jsonl(ROW, row)), task=Tokens)


def test_bad_sources_are_named(tmp_path: Path) -> None:
    table = write(tmp_path / "d.csv", "tokens,tags\nJane left,O O\n")
    with pytest.raises(StrettoError, match=r"d\.csv:2: expected a list of words.*\.csv and \.tsv cannot hold them"):
        load(table, task=Tokens)
    with pytest.raises(StrettoError, match="known to hold the tags, got tags and labels among"):
        load(write(tmp_path / "d.jsonl", jsonl({**ROW, "labels": []})), task=Tokens)
    with pytest.raises(StrettoError, match="known to hold the words, got none among the columns 'text'"):
        load(write(tmp_path / "d.jsonl", jsonl({"text": "a", "tags": ["O"]})), task=Tokens)
    with pytest.raises(StrettoError, match=r"d\.jsonl:1: expected at least one word to learn from, got none"):
        load(write(tmp_path / "d.jsonl", jsonl({"tokens": [], "tags": []})), task=Tokens)
    with pytest.raises(StrettoError, match=r"d\.jsonl:1: expected one of the labels 'O', 'B-x', got 'B-person'"):
        load(write(tmp_path / "d.jsonl", jsonl(ROW)), task=Tokens, label_names=["O", "B-x"])
