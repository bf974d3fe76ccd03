"""Backbones that answer every token: both engines give Hugging Face's logits, and dropped tokens keep an answer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from executed import executed_flops
from scripted import Scripted
from tiny import STACKS, random_inputs, tiny_config, uses_types
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

from stretto.backbones import Backbone, backbone_for
from stretto.engine.cost import Cost, flops
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.state import Decision, Inputs, State

LENGTHS = [9, 5, 1, 12, 5]
HEADS = {"tokens": (AutoModelForTokenClassification, 5), "span": (AutoModelForQuestionAnswering, 2)}
ENGINES = [ReferenceEngine, PackedEngine]


@functools.cache
def token_backbone(model_type: str, head: str) -> Backbone:
    auto, n_labels = HEADS[head]
    torch.manual_seed(0)
    model = auto.from_config(tiny_config(model_type, n_labels))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return backbone_for(model.eval())


def batch(model_type: str, side: str = "right") -> Inputs:
    return random_inputs(LENGTHS, types=uses_types(model_type), side=side)


def hugging_face(backbone: Backbone, inputs: Inputs) -> Tensor:
    """[B, T, C]"""
    types = {} if inputs.token_type_ids is None else {"token_type_ids": inputs.token_type_ids}
    with torch.no_grad():
        output = backbone.model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, **types)
    return output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], dim=-1)


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("head", HEADS)
def test_every_token_gets_hugging_faces_answer(head: str, model_type: str) -> None:
    backbone, inputs = token_backbone(model_type, head), batch(model_type)
    expected, valid = hugging_face(backbone, inputs), inputs.attention_mask.bool()
    assert expected.shape == (5, 12, HEADS[head][1])
    for engine_class in ENGINES:
        for side in ("right", "left"):  # column = position, whatever the padding
            with torch.no_grad():
                output = engine_class(backbone).run(batch(model_type, side), Silent(), 0.0)
            assert output.logits.shape == expected.shape
            torch.testing.assert_close(output.logits[valid], expected[valid], atol=1e-5, rtol=1e-5)
            assert not bool(output.logits[~valid].any())
            assert Cost.of(output.trace, backbone).total == 1.0


def drop_some(state: State) -> Decision:
    """Every third token before layer 2, more between the attention and FFN of layer 3."""
    if state.point == "before":
        return Decision(drop=(state.position % 3 == 2) & (state.layer == 2))
    return Decision(drop=(state.position % 4 == 3) & (state.layer == 3))


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("restore", [True, False])
def test_engines_agree_when_tokens_go(restore: bool, head: str, model_type: str) -> None:
    backbone, method = token_backbone(model_type, head), Scripted(drop_some, "before", "between", restore=restore)
    with torch.no_grad():
        expected = ReferenceEngine(backbone).run(batch(model_type), method, 0.0)
        for engine_class, side in ((PackedEngine, "right"), (PackedEngine, "left"), (ReferenceEngine, "left")):
            got = engine_class(backbone).run(batch(model_type, side), method, 0.0)
            torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
            assert torch.equal(flops(got.trace, backbone), flops(expected.trace, backbone))


@pytest.mark.parametrize("engine_class", ENGINES)
def test_a_dropped_token_is_answered_from_its_last_state(engine_class: Any) -> None:
    backbone, inputs = token_backbone("bert", "tokens"), batch("bert")
    reference = ReferenceEngine(backbone)
    with torch.no_grad():
        output = engine_class(backbone).run(inputs, Scripted(drop_some, "before", "between", restore=True), 0.0)
        after_one = backbone.head(reference.hidden_states(inputs)[1])  # nothing had gone yet
        whole = hugging_face(backbone, inputs)
    gone = (inputs.positions % 3 == 2) & inputs.attention_mask.bool()
    torch.testing.assert_close(output.logits[gone], after_one[gone], atol=1e-5, rtol=1e-5)
    stay = (inputs.positions % 3 != 2) & inputs.attention_mask.bool()
    assert not torch.allclose(output.logits[stay], whole[stay], atol=1e-3)
    assert output.trace.n_ffn[0].tolist() == [9, 6, 4, 4]  # 2, 5 and 8 go first, then 3 and 7


def test_the_ledger_counts_the_head_of_every_token() -> None:
    backbone, inputs = token_backbone("bert", "tokens"), random_inputs([9, 5, 30, 5, 17])
    for method in (Silent(), Scripted(drop_some, "before", "between", restore=True)):
        executed, output = executed_flops(PackedEngine(backbone), inputs, method, 0.0)
        assert executed == pytest.approx(int(flops(output.trace, backbone).sum()), rel=0.01)
    assert backbone.head.macs == backbone.d * 5


def test_gradients_reach_dropped_tokens_too() -> None:
    backbone, inputs = token_backbone("bert", "tokens"), batch("bert")
    method = Scripted(drop_some, "before", "between", restore=True)
    logits = ReferenceEngine(backbone).run(inputs, method, 0.0).logits
    (gradient,) = torch.autograd.grad(logits[:, 2].sum(), backbone.specs[0].ffn.out.weight)  # dropped before layer 2
    assert bool(gradient.any())
