"""Agreement with rationales: hand-computed measures, words from tokens, and every source of scores."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from commands import run
from sources import jsonl, write
from tiny import random_inputs, tiny_model

from stretto import StrettoError
from stretto.data.tokenise import Origin
from stretto.methods.base import Dial
from stretto.methods.full import Full
from stretto.methods.saliency import layer_saliency, saliency
from stretto.state import Decision, State
from stretto.view.rationales import (
    Rationale,
    agreement,
    attention_received,
    attention_rollout,
    average_precisions,
    false_positive_rates,
    full_model_scores,
    gather,
    load_rationales,
    place_tokens,
    selected,
)

ROWS = [
    {"tokens": ["a", "very", "good", "movie"], "rationale": [0, 0, 1, 0], "label": "good", "id": "x"},
    {"tokens": ["dull", ",", "not", "good", "."], "rationale": [1, 0, 1, 1, 0], "label": "bad", "id": "y"},
]


class Reader(Full):
    """Ranks tokens by their place before every layer, and drops those below the uniform level; answers in layer 3."""

    points = frozenset({"before", "after"})
    dial = Dial("none", "nothing", off=0.0, sweep=(0.0,))

    def decide(self, state: State) -> Decision:
        if state.point == "after":
            return Decision(exit=torch.full_like(state.ids, state.layer == 3, dtype=torch.bool))
        score = state.position.double().add(1)
        score = score / score.sum()
        return Decision(drop=score < 1 / state.n_rows, score=score)


class Freezer(Reader):
    """Freezes before layer 2 what stands behind position 1, and drops nothing."""

    def decide(self, state: State) -> Decision:
        if state.point == "after":
            return super().decide(state)
        return Decision(freeze=(state.position > 1) & (state.layer > 1))


def reader(method: type[Reader] = Reader) -> Any:
    model = tiny_model("full")
    model.method = method(model.method.config, model.method.shape, model.task)
    return model


# ---- by hand -----------------------------------------------------------------------------------------------


def test_rollout_by_hand() -> None:
    first = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])  # two heads: swap and stay
    second = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]] * 2)
    # Â_1 = [[.75, .25], [.25, .75]]; Â_2 = [[.5, .5], [0, 1]]; first row of Â_2 Â_1 = (.5, .5)
    rolled = attention_rollout([first, second])
    torch.testing.assert_close(rolled, torch.tensor([[0.75, 0.25], [0.5, 0.5]]))


def test_attention_received_by_hand() -> None:
    layer = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.0, 1.0], [0.5, 0.5]]])
    torch.testing.assert_close(attention_received([layer]), torch.tensor([[0.5, 0.5]]))
    torch.testing.assert_close(attention_received([layer[:1]]), torch.tensor([[0.75, 0.25]]))


def test_the_uniform_level() -> None:
    scores = np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0.3, np.nan, 0.2], [1.0, 0.0, np.nan, np.nan]])
    assert selected(scores).tolist() == [[True] * 4, [True, False, False, False], [True, False, False, False]]


def test_measures_by_hand() -> None:
    marks = np.array([1, 0, 1, 0])
    scores = np.array([[4.0, 3.0, 2.0, 1.0], [1.0, 4.0, 2.0, 3.0]])
    # hits at ranks 1 and 3: (1/1 + 2/3) / 2; at ranks 3 and 4: (1/3 + 2/4) / 2
    assert average_precisions(scores, marks) == pytest.approx([5 / 6, 5 / 12])
    chosen = np.array([[True, True, False, False], [False] * 4, [True] * 4])
    assert false_positive_rates(chosen, marks).tolist() == [0.5, 0.0, 1.0]


def test_tokens_become_words() -> None:
    # "ab cde f": tokens <s>, ab, c, de, " f" (with the space before it), </s>
    found = [Origin(None, None, 0, 0), Origin(0, 0, 0, 2), Origin(0, 1, 3, 4), Origin(0, 1, 4, 6)]
    found += [Origin(0, 2, 6, 8), Origin(None, None, 0, 0)]
    word_of = place_tokens(["ab", "cde", "f"], found)
    assert word_of.tolist() == [-1, 0, 1, 1, 2, -1]
    assert gather(np.array([[9.0, 1.0, 2.0, 3.0, 4.0, 9.0]]), word_of, 3).tolist() == [[1.0, 5.0, 4.0]]


# ---- on models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bert", "mpnet", "distilbert"])
def test_scores_of_the_full_model(model_type: str) -> None:
    model = tiny_model("full", model_type)
    inputs = random_inputs([9], types=False)
    scores = full_model_scores(model, inputs, 1)
    for values in scores.values():
        assert values.shape == (4, 9)
        torch.testing.assert_close(values.sum(dim=1), torch.ones(4))
    torch.testing.assert_close(
        scores["saliency"][0], saliency(model.reference, model.task, inputs, torch.tensor([1]))[0]
    )
    padded, short = random_inputs([9, 5], types=False), random_inputs([9, 5], types=False)
    assert layer_saliency(model.reference, model.task, padded, torch.tensor([1, 0])).shape == (4, 2, 9)
    assert (layer_saliency(model.reference, model.task, short, torch.tensor([1, 0]))[:, 1, 5:] == 0).all()


def test_attention_is_that_of_hugging_face() -> None:
    model = tiny_model("full")
    inputs = random_inputs([9, 5], types=False)
    model.encoder.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model.encoder(inputs.input_ids, inputs.attention_mask, output_attentions=True).attentions
    for mine, reference in zip(model.reference.attentions(inputs), theirs, strict=True):
        torch.testing.assert_close(mine[0], reference[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine[1, :, :5], reference[1, :, :5], atol=1e-5, rtol=1e-5)


def load(rows: list[Any], model: Any, tmp_path: Path) -> list[Rationale]:
    return load_rationales(str(write(tmp_path / "r.jsonl", jsonl(*rows))), model)


def test_every_source_is_compared(tmp_path: Path) -> None:
    model = reader()
    found = agreement(model, load(ROWS, model, tmp_path), progress=False)
    assert list(found.curves) == ["contribution", "kept", "saliency", "attention", "rollout"]
    assert (found.texts, found.left_out, found.words, found.unscored) == (2, 0, 9, 0)
    assert found.marked == pytest.approx(4 / 9)
    own = found.curves["contribution"]
    # scores rise with the place. [CLS] a very good movie [SEP]: ranks 2 of 4; the other: ranks 2, 3 and 5 of 5
    assert own.average_precision[0] == pytest.approx((1 / 2 + (1 / 2 + 2 / 3 + 3 / 5) / 3) / 2)
    # six tokens, level 3.5 / 21: good, movie, [SEP] are selected, so movie of a, very, movie is false;
    # seven tokens, level 4 / 28: not, good, . and [SEP], so "." of "," and "."
    assert own.false_positive_rate[0] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert own.average_precision[3] is None and own.false_positive_rate[3] is None  # layer 4 did not run
    kept = found.curves["kept"]
    assert kept.average_precision == [None] * 4
    assert kept.false_positive_rate[0] == own.false_positive_rate[0]
    for name in ("saliency", "attention", "rollout"):
        assert all(value is not None and 0 < value <= 1 for value in found.curves[name].average_precision)


def test_class_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    names = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "rationale": datasets.Sequence(datasets.Value("int64")),
            "label": datasets.ClassLabel(names=["good", "bad"]),
        }
    )  # fmt: skip
    rows = {key: [row[key] for row in ROWS] for key in ("tokens", "rationale", "label")}
    datasets.Dataset.from_dict(rows, features=names).to_parquet(tmp_path / "r.parquet")
    loaded = load_rationales(str(tmp_path / "r.parquet"), tiny_model("full"))  # whose labels are bad and good
    assert [example.label for example in loaded] == [1, 0]


def test_texts_left_out_do_not_count(tmp_path: Path) -> None:
    model = reader()
    unmarked = {"tokens": ["a", "film"], "rationale": [0, 0], "label": "good"}
    found = agreement(model, load([*ROWS, unmarked], model, tmp_path), progress=False)
    assert (found.texts, found.left_out, found.words) == (3, 1, 11)
    assert found.marked == pytest.approx(4 / 9)


def test_methods_without_scores_before_layers(tmp_path: Path) -> None:
    for name, own in (("full", []), ("deebert", []), ("length_adaptive", ["kept"])):
        model = tiny_model(name)
        found = agreement(model, load(ROWS, model, tmp_path), progress=False)
        assert list(found.curves) == [*own, "saliency", "attention", "rollout"]
    number = tiny_model("full", n_labels=1)
    assert agreement(number, load(ROWS, number, tmp_path), progress=False).texts == 2


def test_frozen_words_are_not_kept(tmp_path: Path) -> None:
    model = reader(Freezer)
    kept = agreement(model, load(ROWS, model, tmp_path), progress=False).curves["kept"]
    # position 1 stays: "a", one of three unmarked words; "dull", which is marked
    assert kept.false_positive_rate[:3] == pytest.approx([1, 1 / 6, 1 / 6])


def test_words_beyond_the_limit_are_not_counted(tmp_path: Path) -> None:
    model = tiny_model("full")
    long = {"tokens": ["good"] * 100, "rationale": [1, 0] * 50, "label": "good"}
    late = {"tokens": ["good"] * 100, "rationale": [0] * 90 + [1] * 10, "label": "good"}
    found = agreement(model, load([long, late], model, tmp_path), progress=False)
    assert (found.words, found.unscored, found.left_out) == (200, 2 * 38, 1)
    assert found.marked == pytest.approx(31 / 62)
    with pytest.raises(StrettoError, match="got none among 1"):
        agreement(model, load([late], model, tmp_path), progress=False)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"tokens": "good film"}, r"r\.jsonl:1: expected a list of words in 'tokens', got 'good film'"),
        ({"rationale": [1]}, "expected 4 numbers, 0 or 1, in 'rationale'"),
        ({"rationale": [0, 0, 2, 0]}, "0 or 1"),
        ({"rationale": [[0], [1], [0], [0]]}, "0 or 1"),
        ({"tokens": ["a", "very", "\ud83d", "film"]}, "expected Unicode words in 'tokens', got half a surrogate pair"),
        ({"label": None}, "expected a label in 'label', got none"),
        ({"label": "terrible"}, r"r\.jsonl:1: expected one of the labels 'bad', 'good', got 'terrible'"),
    ],
)
def test_bad_rows(row: dict[str, Any], answer: str, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=answer):
        load([{**ROWS[0], **row}], tiny_model("full"), tmp_path)


def test_rationales_command(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "marked.jsonl.gz"
    late = {"tokens": ["good"] * 100, "rationale": [0] * 90 + [1] * 10, "label": "good"}
    data.write_bytes(gzip.compress(jsonl(*ROWS, late).encode()))
    files = [tmp_path / "agreement.json", tmp_path / "agreement.png"]
    result = run("rationales", model, data, "--json", files[0], "--plot", files[1])
    assert result.exit_code == 0, result.stderr
    assert "beyond 64 tokens, not counted: 38 of 109 words" in result.stderr
    assert "no marked or no unmarked words, left out: 1 of 3 texts" in result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Mean average precision on 2 texts (chance: 0.4")
    assert lines[1].split() == ["layer", "saliency", "attention", "rollout"]
    assert "False-positive rate on 2 texts" in lines
    content = json.loads(files[0].read_text())
    assert len(content["curves"]["rollout"]["average_precision"]) == 4
    assert files[1].read_bytes().startswith(b"\x89PNG")
    few = json.loads(run("rationales", model, data, "--limit", 1, "--seed", 1, "--json").stdout)
    assert few["texts"] == 1
    assert "the dial 'entropy'" in run("rationales", model, data, "--dial", 2).stderr
    assert "ending in .png" in run("rationales", model, data, "--plot", "p.doc").stderr
