"""Explanations tell what the run did, at no cost, for every method and any text."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Terminal, run
from tiny import LABELLING, tiny_model, tiny_tokenizer

from stretto import AdaptiveModel, StrettoError
from stretto.data.batches import batches
from stretto.data.tokenise import Origin, origins
from stretto.methods import METHODS
from stretto.methods.base import Dial
from stretto.methods.deebert import entropy
from stretto.methods.full import Full
from stretto.state import Decision, State
from stretto.view.explain import Explanation, explain, pieces, visible
from stretto.view.explain_html import DROPPED, FROZEN, SCORES, WORD, explanation_page
from stretto.view.explain_terminal import layer_rows, show_explanation, token_rows

TEXT = "a very good movie , never dull !"
ODD: list[Any] = [
    "", "dull " * 3000, "日本語 🎬 \u202e \x00 ﬃ <b>&amp;",
    ("the plot", "was good"), ("", ""), ("very " * 60, "dull " * 90),
]  # fmt: skip


class Freezer(Full):
    """Layer 2 freezes the second half of each sequence, layer 4 all of it."""

    points = frozenset({"before"})
    dial = Dial("none", "nothing", off=0.0, sweep=(0.0,))

    def decide(self, state: State) -> Decision | None:
        if state.layer == 2:
            return Decision(freeze=state.position >= state.lengths[state.sequence] // 2)
        return Decision(freeze=torch.ones_like(state.protected)) if state.layer == 4 else None


def with_method(method: type[Any]) -> AdaptiveModel:
    model: AdaptiveModel = tiny_model("full")
    model.method = method(model.method.config, model.method.shape, model.task)
    return model


def shown(explanation: Explanation, stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    show_explanation(explanation, stream)
    return stream.getvalue()


@pytest.mark.parametrize("name", LABELLING)
def test_the_same_answer_and_cost_as_predict(name: str) -> None:
    model = tiny_model(name)
    for dial in (model.method.dial.off, model.method.dial.sweep[-1]):
        explanation = explain(model, TEXT, dial)
        assert explanation.prediction == model.predict(TEXT, dial)
        assert explanation.lives.shape == (5, 10)
        assert explanation.scores.shape == explanation.frozen.shape == (4, 10)
        assert explanation.lives[: explanation.answered_after + 1].any(dim=1).all()
        assert not explanation.lives[explanation.answered_after + 1 :].any()
        never_back = explanation.lives[:-1] | ~explanation.lives[1:]
        assert never_back.all()
        json.dumps(explanation.to_json(), allow_nan=False)


def test_dropped_tokens_are_those_the_ledger_misses() -> None:
    model = tiny_model("length_adaptive")
    dial = model.method.dial.sweep[-1]
    explanation = explain(model, TEXT, dial)
    (inputs,) = batches(model.encode([(TEXT,)]).features, model.tokenizer.pad_token_id, 1)
    trace = model.packed.run(inputs, model.method, dial, keep_hidden=True).trace  # all rows of the last layer, too
    assert explanation.lives[1:].sum(dim=1).tolist() == trace.n_ffn[0].tolist()
    assert explanation.last_layers[0] == 4  # [CLS] stays
    ranked = ~explanation.scores.isnan()
    assert ranked.any()
    assert (explanation.lives[:-1] | ~ranked).all()  # only what was there is ranked
    layer = int(ranked.any(dim=1).int().argmax())
    kept, gone = explanation.lives[layer + 1], ranked[layer] & ~explanation.lives[layer + 1]
    free = kept.clone()
    free[0] = False
    assert explanation.scores[layer, free].min() >= explanation.scores[layer, gone].max()


def test_exits_are_told_as_far_as_they_were_asked() -> None:
    model = tiny_model("deebert")
    explanation = explain(model, TEXT, 1.0)
    assert explanation.depth == 1
    assert explanation.exits == [explanation.prediction.probabilities, None, None, None]
    full = explain(model, TEXT, 0.0)
    assert [said is None for said in full.exits] == [False, False, False, True]
    assert [row["layer"] for row in layer_rows(full)] == [1, 2, 3, 4]
    (row,) = layer_rows(explanation)
    assert list(row.values())[:2] == [1, 10]
    assert list(row) == ["layer", "tokens left", "exit says", "entropy", ""]
    assert row[""] == "answered here"
    regression = explain(tiny_model("pabee", n_labels=1), TEXT, 2.0)
    assert regression.exits[0] is not None and list(regression.exits[0]) == [""]
    assert f"{regression.prediction.label:.4g}" in shown(regression)


@pytest.mark.parametrize("name", [name for name in LABELLING if METHODS[name].verbs & {"exit"} and "+" not in name])
def test_what_exits_compare_with_the_dial(name: str) -> None:
    """Each layer where the method decides has a number, whose bound is the dial."""
    model = tiny_model(name)
    dial = model.method.dial.sweep[len(model.method.dial.sweep) // 2]
    explanation = explain(model, TEXT, dial)
    found = [layer for layer in explanation.compared if layer]
    assert found
    assert all(len(layer) == 1 for layer in found)
    for (what, each), row in zip([*found[-1].items()], layer_rows(explanation)[-1:], strict=True):
        assert isinstance(each.value, float)
        assert each.bound == pytest.approx(dial)
        assert what in row
    assert explanation.to_json()["compared"][explanation.compared.index(found[0])] == {
        what: {"value": each.value, "bound": each.bound} for what, each in found[0].items()
    }


def test_the_entropy_is_that_of_the_exit() -> None:
    explanation = explain(tiny_model("deebert"), TEXT, 0.5)
    said = explanation.exits[0]
    assert said is not None
    logits = torch.tensor([*said.values()]).log()
    compared = explanation.compared[0]["entropy"]
    assert compared.value == pytest.approx(float(entropy(logits)), abs=1e-5)
    assert compared.summary in shown(explanation)
    assert f"entropy {compared.summary}" in explanation_page(explanation)


def test_tokens_below_the_threshold_are_those_that_leave() -> None:
    model = tiny_model("adapler")
    explanation = explain(model, TEXT, 1.0)
    compared = explanation.compared[0]["contribution"]
    assert isinstance(compared.value, list)
    for place, value in enumerate(compared.value[1:], start=1):  # the first one is protected
        assert value is not None
        assert bool(explanation.lives[1, place]) == (value >= compared.bound)
    assert " to " in layer_rows(explanation)[0]["contribution"]
    assert f"(bound {compared.bound:.4g})" in explanation_page(explanation)


def test_frozen_tokens_stay_and_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    model = with_method(Freezer)
    explanation = explain(model, TEXT)
    assert explanation.prediction == model.predict(TEXT)
    assert explanation.depth == 3  # before layer 4 all is frozen, so nothing is left to do
    assert explanation.frozen[1, 5:].all() and explanation.frozen[2, 5:].all()
    assert not explanation.frozen[:, :5].any() and not explanation.frozen[0].any()
    assert explanation.lives[:4].all()
    assert token_rows(explanation)[-1] == {"token": "[SEP]", "layers": "#**.", "last": 3}
    assert layer_rows(explanation)[1]["frozen"] == 5
    assert explanation_page(explanation).count('class="live frozen"') == 10 + 1  # and one in the key
    assert "frozen on the way" in shown(explanation, Terminal())


@pytest.mark.parametrize("name", ["deebert", "length_adaptive"])
@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_texts(text: Any, name: str) -> None:
    model = tiny_model(name)
    explanation = explain(model, text, model.method.dial.sweep[-1])
    assert explanation.prediction == model.predict(text, model.method.dial.sweep[-1])
    assert len(explanation.tokens) == len(explanation.joined) == explanation.lives.shape[1]
    assert explanation.truncated == (explanation.lives.shape[1] == 64)
    assert explanation.tokens[0] == "[CLS]" and explanation.tokens[-1] == "[SEP]"
    page = explanation_page(explanation)
    for output in (shown(explanation), shown(explanation, Terminal()), page):
        assert "\x00" not in output and "\u202e" not in output
        output.encode()
    assert "<b>" not in page


def test_the_page_shows_layers_and_scores() -> None:
    model = tiny_model("length_adaptive")
    explanation = explain(model, "good <i>film</i>", model.method.dial.sweep[-1])
    page = explanation_page(explanation)
    assert page.startswith("<!doctype html>")
    assert page.count("<tr class=") == 5  # the tokens and four layers
    assert page.count('class="exit"') == 1
    assert 'class="gone"' in page and "--score: 1.000" in page
    assert "&lt;" in page and "<i>" not in page
    assert "http" not in page and "<script" not in page


def test_the_legend_has_what_the_page_shows() -> None:
    entries = {"high score": SCORES, "dropped": DROPPED, "frozen": FROZEN, "word": WORD}

    def legend(explanation: Explanation) -> set[str]:
        page = explanation_page(explanation)
        return {name for name, entry in entries.items() if entry in page}

    dropping = tiny_model("length_adaptive")
    assert legend(explain(dropping, TEXT, dropping.method.dial.sweep[-1])) == {"high score", "dropped"}
    assert legend(explain(with_method(Freezer), TEXT)) == {"frozen"}
    full = explain(tiny_model("full"), TEXT)
    assert legend(full) == set()
    assert 'class="key"' not in explanation_page(full)
    assert "Hover" not in explanation_page(full)
    full.joined[2] = True
    assert legend(full) == {"word"}
    early = explanation_page(explain(tiny_model("deebert", n_layers=2), TEXT, 1.0))
    assert "The 1 layer after it did not run." in early


def test_pieces_of_a_word_hang_together() -> None:
    found = [Origin(None, None, 0, 0), Origin(0, 0, 0, 2), Origin(0, 0, 2, 6), Origin(0, 1, 6, 11), Origin(1, 0, 0, 2)]
    names = ["<s>", "un", "##like", "▁ness", "Ġno"]
    assert pieces(names, ("unlike this", "no"), found) == (
        ["<s>", "un", "like", "this", "no"],
        [False, False, True, False, False],
    )
    assert pieces(names, ("", ""), None) == (["<s>", "un", "like", "▁ness", "Ġno"], [False, False, True, False, False])
    places = origins(tiny_tokenizer(), ("A fine film " * 50,), 8)
    assert places is not None
    assert [(place.start, place.end) for place in places[:3]] == [(0, 0), (0, 1), (2, 6)]
    assert len(places) == 8
    assert visible("a\x00b\u202e") == "a\\u0000b\\u202e"


def test_text_is_joined_in_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    explanation = explain(tiny_model("full"), "good film")
    joined = Explanation(**{**vars(explanation), "joined": [False, False, True, False]})
    assert "[CLS] goodfilm [SEP]" in re.sub(r"\x1b\[[\d;]*m", "", shown(joined, Terminal()))
    assert "\x1b[30;42mgood" in shown(joined, Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[38;5;" in shown(joined, Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert "+film" in shown(joined, Terminal())  # without colours a line per token
    assert token_rows(joined)[2]["token"] == "+film"
    assert 'class="live opens"' in explanation_page(joined) and 'class="live joined"' in explanation_page(joined)


def test_explain_command(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "tokens.html"
    result = run("explain", model, TEXT, "--dial", 0.97, "--html", page)
    assert result.exit_code == 0, result.stderr
    assert "(deebert, dial 0.97)" in result.stdout.splitlines()[0]
    assert "[CLS]" in result.stdout and "\x1b" not in result.stdout
    assert "never" in page.read_text(encoding="utf-8")
    content = json.loads(run("explain", model, "the plot", "--text-b", "was good", "--json").stdout)
    assert content["tokens"] == ["[CLS]", "the", "plot", "[SEP]", "was", "good", "[SEP]"]
    assert run("explain", model, "-", "--json", stdin="good film").exit_code == 0
    lines = json.loads(run("explain", model, "-", "--json", stdin="good film\n").stdout)
    assert lines["tokens"] == json.loads(run("explain", model, "good film", "--json").stdout)["tokens"]
    long = run("explain", model, "good " * 100)
    assert "longer than 64 tokens and was truncated" in long.stderr


def test_what_cannot_be_explained(model: Path, tmp_path: Path) -> None:
    assert "the dial 'entropy' between 0 and 1" in run("explain", model, "good", "--dial", 3).stderr
    assert run("explain", tmp_path / "nowhere", "good").exit_code == 1
    result = run("explain", model, "good", "--html", tmp_path / "no" / "page.html")
    assert "Expected to write" in result.stderr
    with pytest.raises(StrettoError, match="eval mode"):
        explain(tiny_model("full").train(), "good")
