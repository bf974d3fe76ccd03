"""Explanations of texts that were written: the exit of each token, and the number that was compared with the dial."""

from __future__ import annotations

import io
import json
import re
from statistics import median
from typing import IO

import pytest
import torch
from commands import Terminal
from tiny_seq2seq import fresh

from stretto.data.batches import batches
from stretto.methods import METHODS
from stretto.model import AdaptiveModel
from stretto.tasks import Seq2Seq
from stretto.view.explain_text import TextExplanation, explain_text, show_text_explanation, text_page

TEXT = "eins zwei drei vier"
MECHANISMS = {"geometric": "gate", "multinomial": "lead", "sequence": "lead", "confidence": "confidence"}


def writer(method: str = "depth_adaptive", **settings: object) -> AdaptiveModel:
    """An untrained translator whose tokens leave at different blocks."""
    model = fresh(method, **settings).eval()
    generator = torch.Generator().manual_seed(4)
    for name, weight in model.method.named_parameters():
        if name.endswith("weight"):
            torch.nn.init.normal_(weight, std=0.5, generator=generator)
    model.generation["max_new_tokens"] = 8
    return model


def shown(explanation: TextExplanation, file: IO[str] | None = None) -> str:
    stream = file or io.StringIO()
    show_text_explanation(explanation, stream)
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_token_leaves_where_its_number_passes_the_bound(mechanism: str, beams: int) -> None:
    model, what = writer(mechanism=mechanism), MECHANISMS[mechanism]
    model.generation["num_beams"] = beams
    deep = explain_text(model, TEXT, 1e-9)  # nobody leaves
    assert set(deep.exits) == {3}
    dial = 1 - 0.999 * median(token[what][1].value for token in deep.compared)
    explanation = explain_text(model, TEXT, dial)
    assert explanation.prediction == model.predict(TEXT, dial)
    assert len(explanation.tokens) == len(explanation.exits) == len(explanation.compared) > 0
    for exit, compared in zip(explanation.exits, explanation.compared, strict=True):
        assert list(compared) == [what]
        blocks = compared[what]
        assert list(blocks) == list(range(1, min(exit, 2) + 1))  # the last of the three blocks is not asked about
        passed = [block for block, each in blocks.items() if each.value > each.bound]
        assert passed == ([exit] if exit < 3 else [])
        assert all(each.bound == pytest.approx(1 - dial) for each in blocks.values())
    if beams == 1:
        assert len(set(explanation.exits)) > 1 or mechanism == "sequence"


def test_the_number_is_in_the_pipe_the_terminal_the_page_and_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    explanation = explain_text(writer(), TEXT, 0.6)
    first = explanation.compared[0]["gate"]
    last = first[max(first)]
    lines = shown(explanation).splitlines()
    assert lines[3].split() == ["token", "exit", "blocks", "gate"]
    assert last.summary in lines[4] or last.summary in lines[5]
    assert last.summary.endswith("(bound 0.4)")
    seen = re.sub(r"\x1b\[[\d;]*m", "", shown(explanation, Terminal()))
    assert f"{last.value:.2f} " in seen
    assert "the decoder block it left at, of 3; and its gate there (bound 0.4)" in " ".join(seen.split())
    page = text_page(explanation)
    assert f"<em>{last.value:.2f}</em>" in page
    assert f"gate after block 1: {first[1].summary}" in page
    assert "and its gate there (bound 0.4). Hover over a token" in page
    listed = json.loads(json.dumps(explanation.to_json(), allow_nan=False))
    assert listed["compared"][0]["gate"]["1"] == {"value": first[1].value, "bound": pytest.approx(0.4)}
    assert listed["encoder"] is None


def test_nothing_is_compared_by_a_full_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for explanation in (explain_text(writer(), TEXT, 0.0), explain_text(writer("full"), TEXT)):
        assert explanation.compared == [{}] * len(explanation.tokens)
        assert explanation.encoder is None
        page = text_page(explanation)
        assert "<em>" not in page and "Hover" not in page and "bound" not in page
        assert "gate" not in shown(explanation) and "bound" not in shown(explanation, Terminal())


#: Methods that translate, and work on the encoder.
ON_ENCODER = [
    name
    for name, method in METHODS.items()
    if method.needs.met_by(Seq2Seq) and method.points and "encoder" in method.stacks
]


@pytest.mark.parametrize("name", [*ON_ENCODER, "adapler+depth_adaptive"])
def test_the_encoder_is_shown_where_the_method_works_on_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    model = writer(name)
    dial = model.method.dial.sweep[-1]
    explanation = explain_text(model, TEXT, dial)
    encoder = explanation.encoder
    assert encoder is not None
    trace = model.run(next(batches(model.encode([(TEXT,)]).features, model.tokenizer.pad_token_id, 1)), dial).trace
    skipped = trace.encoder.n_ffn[0] == 0  # tokens pass a layer that is left out unchanged
    assert "skip" in METHODS[name].verbs or not skipped.any()
    assert encoder.lives[1:].sum(dim=1)[~skipped].tolist() == trace.encoder.n_ffn[0][~skipped].tolist()
    assert encoder.tokens[0].startswith("e") and encoder.depth == int(trace.encoder.depth[0])
    assert "In the encoder" in text_page(explanation) and "what the decoder reads" in text_page(explanation)
    for output in (shown(explanation), shown(explanation, Terminal())):
        assert "in the encoder:" in output and "read by the decoder" in output
    json.dumps(explanation.to_json(), allow_nan=False)
    if name.startswith("adapler"):
        assert encoder.compared[0]["contribution"].summary in shown(explanation)
        assert "contribution" in text_page(explanation)


def test_the_method_alberta_compares_gates_in_the_encoder() -> None:
    explanation = explain_text(writer("alberta"), TEXT, 0.9)
    assert explanation.encoder is not None
    compared = explanation.encoder.compared
    gates = [each.summary for layer in compared for what, each in layer.items() if what == "next gate"]
    assert gates and all(each in text_page(explanation) for each in gates)
