"""Answer spans: windows and offsets, losses by hand, SQuAD scores against torchmetrics, no answer, and bad rows."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import jsonl, write
from tiny import tiny_model, tiny_questions, tiny_tokenizer
from torchmetrics.functional.text import squad as torchmetrics_squad

from stretto.data import Dataset, Gold, load, split_off
from stretto.data.tokenise import IGNORED
from stretto.errors import StrettoError
from stretto.tasks import Span
from stretto.tasks.squad import f1, normalised, squad_scores
from stretto.tasks.windows import END, START, Place, spans, token_span

QUESTION, CONTEXT = "how many ?", "the film was very  good , one city and two man !"
TOKENIZER = tiny_tokenizer()
TOKENIZER.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]


# ---- windows -----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(9, 20), st.integers(0, 6), st.integers(0, 99))
def test_windows_are_those_of_the_tokenizer(words: int, longest: int, stride: int, seed: int) -> None:
    dice = random.Random(seed)
    pairs = [("how many ?", " ".join(dice.choices(["city", "one", "film", "good !"], k=words))), ("who", "the man .")]
    encoded = Span(stride=stride).encode(TOKENIZER, pairs, longest)
    theirs = TOKENIZER(
        *map(list, zip(*pairs, strict=True)), truncation="only_second", max_length=longest,
        stride=min(stride, (longest - 6) // 2), return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    if stride <= (longest - 6) // 2:
        assert [feature["input_ids"] for feature in encoded.features] == theirs["input_ids"]
        assert [feature["token_type_ids"] for feature in encoded.features] == theirs["token_type_ids"]
        assert encoded.example_of == theirs["overflow_to_sample_mapping"]
    assert all(len(feature["input_ids"]) <= longest for feature in encoded.features)
    for example, place, feature in zip(encoded.example_of, encoded.places, encoded.features, strict=True):
        shown = [pairs[example][1][a:b].lower() for a, b in place.offsets]
        ids = feature["input_ids"][place.first : place.first + len(shown)]
        assert [TOKENIZER.unk_token if i == 1 else TOKENIZER.decode([i]) for i in ids] == shown
    assert encoded.truncated == 0


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 12))
def test_spans_cover_everything_with_their_overlap(n: int, room: int, stride: int) -> None:
    overlap = min(stride, room // 2)
    parts = list(spans(n, room, overlap))
    assert {i for part in parts for i in range(part.start, part.stop)} == set(range(n))
    assert all(part.stop - part.start <= room for part in parts)
    for one, next_one in itertools.pairwise(parts):
        assert next_one.start == one.stop - overlap


def test_an_answer_is_marked_in_the_windows_that_show_all_of_it() -> None:
    answer = Gold("very  good", CONTEXT.index("very"))
    task = Span(stride=2)
    encoded = task.encode(TOKENIZER, [(QUESTION, CONTEXT), (QUESTION, CONTEXT)], 10, [(answer,), ()])
    assert encoded.labels is not None
    head = 5  # [CLS] how many ? [SEP]
    marked = 0
    for example, place, labels in zip(encoded.example_of, encoded.places, encoded.labels, strict=True):
        assert place.first == head
        readable = [0, *range(head, head + len(place.offsets))]
        assert [i for i, label in enumerate(labels) if label != IGNORED] == readable
        starts, ends = ([i for i in readable if labels[i] & bit] for bit in (START, END))
        assert len(starts) == len(ends) == 1
        shown = CONTEXT[place.offsets[0][0] : place.offsets[-1][1]]
        if example == 0 and answer.text in shown:
            marked += 1
            first, last = (place.offsets[i - head] for i in (starts[0], ends[0]))
            assert CONTEXT[first[0] : last[1]] == answer.text
        else:
            assert (starts, ends) == ([0], [0])
    assert marked >= 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Gold("bc", 1), (3, 3)),  # within a token
        (Gold("abcd ef", 0), (3, 4)),
        (Gold("d e", 3), (3, 4)),
        (Gold("ef gh", 5), (0, 0)),  # the window ends before it does
        (Gold("xx", 40), (0, 0)),
        (Gold(" ", 4), (0, 0)),  # between the tokens
        (Gold("abcd ", 0), (3, 3)),  # outer spaces are nobody's
        (Gold(" ef", 4), (4, 4)),
    ],
)
def test_characters_become_tokens(answer: Gold, expected: tuple[int, int]) -> None:
    assert token_span(Place(3, [(0, 4), (5, 7)]), answer) == expected


def test_a_question_that_leaves_no_room() -> None:
    with pytest.raises(StrettoError, match=r"leaves room for its context in 8 tokens, got one of 13 .*'a a a"):
        Span().encode(TOKENIZER, [("a " * 10, "good")], 8)
    for bad in ("text", ("a",), ("a", 3), None, ("a", "b", "c")):
        with pytest.raises(StrettoError, match=r"a pair \(question, context\), got"):
            Span().check_input(bad)
    with pytest.raises(StrettoError, match="a stride from 0 and n_best from 1, got -1 and 5"):
        Span(stride=-1)


# ---- losses ------------------------------------------------------------------------------------------------

LABELS = torch.tensor([[0, IGNORED, START, END, IGNORED], [START | END, IGNORED, 0, IGNORED, IGNORED]])


def wild(values: list[list[float]]) -> torch.Tensor:
    """[B, T, 2] with these logits for both ends, and anything where nothing is read."""
    both = torch.tensor(values).unsqueeze(-1).repeat(1, 1, 2)
    return torch.where((LABELS == IGNORED).unsqueeze(-1), 1000.0 * torch.randn_like(both), both)


def test_the_loss_reads_start_and_end_among_the_readable() -> None:
    logits = wild([[0.0, 0, math.log(2.0), 0, 0], [math.log(3.0), 0, 0, 0, 0]])
    # first: start 2/4, end 1/4; second: both 3/4
    expected = torch.tensor([(math.log(2) + math.log(4)) / 2, math.log(4 / 3)])
    torch.testing.assert_close(Span().loss(logits, LABELS), expected)


def test_distillation_and_the_right_logit() -> None:
    teacher, student = wild([[0.0] * 5, [0.0] * 5]), wild([[0.0] * 5, [math.log(3.0), 0, 0, 0, 0]])
    expected = torch.tensor([0.0, 0.5 * math.log(2) + 0.5 * math.log(2 / 3)])  # KL(½, ½ ‖ ¾, ¼)
    torch.testing.assert_close(Span().distillation(student, teacher, LABELS), expected)
    logits = wild([[1.0, 0, 2, 3, 0], [4.0, 0, 5, 0, 0]])
    torch.testing.assert_close(Span().right_logit(logits, LABELS), torch.tensor([5.0, 8.0]))


# ---- answers -----------------------------------------------------------------------------------------------


def logits_for(task: Span, pairs: list[tuple[str, str]], longest: int, wanted: dict[str, float]) -> Any:
    """Features, and logits that favour the tokens of these words by so much."""
    encoded = task.encode(TOKENIZER, pairs, longest)
    rows = []
    for example, place, feature in zip(encoded.example_of, encoded.places, encoded.features, strict=True):
        row = torch.zeros(len(feature["input_ids"]), 2)
        for position, (a, b) in enumerate(place.offsets, start=place.first):
            row[position] = wanted.get(pairs[example][1][a:b], 0.0)
        row[0] = wanted.get("", 0.0)
        rows.append(row)
    return encoded, rows


def test_the_best_of_all_windows_is_a_part_of_the_context() -> None:
    context = "the  film was " * 10 + "very\tgood ! " + "it was dull . " * 10
    encoded, rows = logits_for(Span(stride=3), [(QUESTION, context)], 16, {"very": 3.0, "good": 5.0})
    assert len(rows) > 5
    rows = [row + torch.tensor([1.0, 0.0]) for row in rows]  # a constant changes nothing
    (answer,) = Span(stride=3).decode(rows, encoded)
    assert answer.answer == "good" == context[answer.start : answer.end]
    assert [candidate.text for candidate in answer.best[:3]] == ["good", "very\tgood", "very"]
    assert len({(c.start, c.end) for c in answer.best}) == 5  # each span once, though windows overlap
    assert answer.score == answer.best[0].score
    assert answer.best[0].score / answer.best[1].score == pytest.approx(math.exp(2), rel=1e-4)


@pytest.mark.parametrize(("threshold", "answer"), [(0.0, ""), (3.9, ""), (4.0, "good"), (-9.0, "")])
def test_no_answer_if_it_is_likelier_by_the_threshold(threshold: float, answer: str) -> None:
    task = Span(no_answer=True, null_threshold=threshold)
    encoded, rows = logits_for(task, [(QUESTION, "it was good .")], 32, {"good": 1.0, "": 3.0})
    (found,) = task.decode(rows, encoded)
    assert found.answer == answer
    assert {candidate.text for candidate in found.best} >= {"", "good"}
    assert (found.start is None) == (answer == "")
    assert Span().decode(rows, encoded)[0].answer == "good"  # a model that must answer


def test_one_window_that_sees_an_answer_outweighs_those_that_do_not() -> None:
    task = Span(no_answer=True, stride=0)
    encoded, rows = logits_for(task, [(QUESTION, "it was . " * 8 + "good")], 12, {"good": 1.0, "": 3.0})
    rows[-1][0] = -3.0
    assert task.decode(rows, encoded)[0].answer == "good"


def test_spaces_around_an_answer_are_not_of_it() -> None:
    """Some tokenizers count the space before a word among its characters."""
    answer = Span().choose(("where ?", "in Paris ."), {(2, 8): 1.0}, 0.0)
    assert (answer.answer, answer.start, answer.end) == ("Paris", 3, 8)


def test_odd_contexts() -> None:
    model = tiny_model("full", task=Span())
    empty = model.predict((QUESTION, ""))
    assert (empty.answer, empty.start, empty.score) == ("", None, 1.0)
    for context in ("   ", "city", "日本語 🎬 \u202e ﬃ é\u0301", "one " * 500):
        answer = model.predict((QUESTION, context), dial=0.0)
        assert answer.answer in context
        if answer.start is not None:
            assert context[answer.start : answer.end] == answer.answer
        assert sum(candidate.score for candidate in answer.best) <= 1 + 1e-6


def test_windows_share_the_dial_of_their_question_and_add_up() -> None:
    model = tiny_model("length_adaptive", task=Span(stride=8))
    pairs = [(QUESTION, "one city " * 80), (QUESTION, "two man")]
    together = model.predict(pairs, dial=torch.tensor([0.7, 1.0]), batch_size=2)
    alone = [model.predict(pair, dial=dial) for pair, dial in zip(pairs, (0.7, 1.0), strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert (one.answer, one.depth, one.cost) == (other.answer, other.depth, pytest.approx(other.cost))
    assert together[0].cost < together[1].cost == 1.0


# ---- scores ------------------------------------------------------------------------------------------------

PIECES = ["The", "a", "an", "cat", "Cat's", "U.S.", "--", "1,000", "of", "theory", "é", " ", "\t"]
PHRASES = st.lists(st.sampled_from(PIECES), max_size=5).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PHRASES, st.lists(PHRASES, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_scores_equal_torchmetrics(cases: list[tuple[str, list[str]]]) -> None:
    answers, golds = zip(*cases, strict=True)
    # SQuAD 2.0 passes over gold answers of which nothing is left; torchmetrics is SQuAD 1.1 and does not
    kept = [[gold for gold in given if normalised(gold)] or [""] for given in golds]
    theirs = torchmetrics_squad(
        [{"prediction_text": answer, "id": str(i)} for i, answer in enumerate(answers)],
        [{"answers": {"text": given, "answer_start": [0] * len(given)}, "id": str(i)} for i, given in enumerate(kept)],
    )
    ours = squad_scores(answers, golds)
    assert ours["f1"] == pytest.approx(float(theirs["f1"]) / 100, abs=1e-6)
    assert ours["exact_match"] == pytest.approx(float(theirs["exact_match"]) / 100, abs=1e-6)


def test_scores_by_hand() -> None:
    assert normalised("The  Cat's, an 'A'-team!") == "cats ateam"
    assert f1("the black cat", "a black dog") == pytest.approx(0.5)
    assert squad_scores(["cat", "", "dog"], [["Cats", "the cat!"], [], []]) == {
        "f1": pytest.approx(2 / 3), "exact_match": pytest.approx(2 / 3),
    }  # fmt: skip


def test_perfect_logits_score_one() -> None:
    task, data = Span(no_answer=True, stride=4), tiny_questions(12, no_answer=True, longest=40)
    encoded = task.encode(TOKENIZER, data.texts, 24, data.labels)
    assert encoded.labels is not None
    rows = []
    for labels in encoded.labels:
        marks = torch.tensor(labels).clamp(min=0)
        rows.append(20.0 * torch.stack([marks & START, (marks & END) // 2], dim=1).float())
    got = task.scores(rows, encoded, data.labels)
    assert got == {"f1": 1.0, "exact_match": 1.0}


# ---- data --------------------------------------------------------------------------------------------------

ROW: dict[str, Any] = {"question": "who?", "context": "Jane Doe did.", "answers": [{"text": "Jane", "start": 0}]}


@pytest.mark.parametrize(
    ("answers", "golds"),
    [
        ([{"text": "Jane", "start": 0}, {"text": "Doe", "start": 5}], (Gold("Jane", 0), Gold("Doe", 5))),
        ([{"text": "Doe", "answer_start": 5}], (Gold("Doe", 5),)),
        ({"text": ["Doe"], "answer_start": [5]}, (Gold("Doe", 5),)),
        ({"text": [], "answer_start": []}, ()),
        ([], ()),
    ],
)
def test_questions_are_read(answers: Any, golds: tuple[Gold, ...], tmp_path: Path) -> None:
    data = load(write(tmp_path / "q.jsonl", jsonl({**ROW, "answers": answers, "id": "x"})), task=Span)
    assert (data.texts, data.labels) == ([("who?", "Jane Doe did.")], [golds])
    assert data.label_names is None
    assert Span.posed_by(data).no_answer == (golds == ())
    assert Span.posed_by(data, stride=7).stride == 7


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({**ROW, "answers": [{"text": "Jane", "start": 1}]}, "'Jane' at character 1 of the context, got 'ane '"),
        ({**ROW, "answers": [{"text": "Jane", "start": -13}]}, "the answer 'Jane' at character -13"),
        ({**ROW, "answers": [{"text": "Jane"}]}, "the number of its first character, got 'Jane' at None"),
        ({**ROW, "answers": [{"text": "", "start": 0}]}, "leave the list empty if there is no answer"),
        ({**ROW, "answers": [{"text": "Jane", "start": "0"}]}, "got 'Jane' at '0'"),
        ({**ROW, "answers": "Jane"}, r"expected answers in 'answers' as .*got 'Jane'\. Use this format"),
        ({**ROW, "answers": {"text": ["a"], "answer_start": []}}, "expected answers in 'answers' as"),
        ({**ROW, "answers": None}, "expected a label in 'answers', got none"),
        ({**ROW, "context": None}, "expected a text in 'context', got null"),
        ({"question": "who?", "answers": []}, "a text in 'context', got only the fields 'question', 'answers'"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], answer: str, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=rf"q\.jsonl:2: .*{answer}"):
        load(write(tmp_path / "q.jsonl", jsonl(ROW, row)), task=Span)


def test_other_columns_and_missing_ones(tmp_path: Path) -> None:
    from stretto.data import Columns

    path = write(tmp_path / "q.jsonl", jsonl({"ask": "who?", "body": "Jane", "gold": []}))
    assert load(path, task=Span, columns=Columns("ask", "body", "gold")).texts == [("who?", "Jane")]
    with pytest.raises(StrettoError, match="expected a column 'context', got the columns 'ask', 'body', 'gold'"):
        load(path, task=Span, columns=Columns(text="ask"))


def test_a_split_keeps_contexts_together() -> None:
    golds = [(), (Gold("x", 0),)]
    data = Dataset(
        [(f"q{i}", f"x{i // 3}") for i in range(30)], [golds[i % 2] for i in range(30)], None, ["w"] * 30, Span.form
    )
    left, held = split_off(data, 0.1, seed=1)
    assert len(held) == 3
    assert {context for _, context in left.texts}.isdisjoint(context for _, context in held.texts)
    assert split_off(data, 0.1, seed=1)[1] == held
    with pytest.raises(StrettoError, match="about two contexts or more to split, got 1"):
        split_off(Dataset(data.texts[:3], data.labels[:3], None, ["w"] * 3, Span.form), 0.5, seed=0)  # type: ignore[index]
