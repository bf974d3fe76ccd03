"""What methods may say while they train: soft drops, skipped layers, notes, and gradients through all of it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from scripted import Scripted
from tiny import STACKS, random_inputs, tiny_backbone, tiny_encoder, uses_types
from torch import Tensor, nn

from stretto.backbones import backbone_for
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine, undisturbed_bias
from stretto.errors import StrettoError
from stretto.methods.exits import ExitHeads
from stretto.state import Decision, Inputs, State

LENGTHS = [9, 5, 1, 12, 5]


def batch(model_type: str = "bert", side: str = "right") -> Inputs:
    return random_inputs(LENGTHS, types=uses_types(model_type), side=side)


def named(inputs: Inputs) -> dict[str, Tensor]:
    """A batch as Hugging Face takes it."""
    tensors = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    return tensors if inputs.token_type_ids is None else {**tensors, "token_type_ids": inputs.token_type_ids}


def going(state: State) -> Tensor:
    """[N] bool: every third token, never the first."""
    return state.position % 3 == 2


# ---- attention_bias and output_factor ----------------------------------------------------------------------


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_large_negative_bias_is_a_drop_for_those_that_stay(model_type: str, side: str) -> None:
    """Said once, before layer 2; it holds for all later layers."""

    def soft(state: State) -> Decision | None:
        return Decision(attention_bias=going(state) * -1e4) if state.layer == 2 else None

    def hard(state: State) -> Decision | None:
        return Decision(drop=going(state)) if state.layer == 2 else None

    engine, inputs = ReferenceEngine(tiny_backbone(model_type)), batch(model_type, side)
    with torch.no_grad():
        expected = engine.run(inputs, Scripted(hard, "before"), 0.0, keep_hidden=True)
        got = engine.run(inputs, Scripted(soft, "before"), 0.0, keep_hidden=True)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert got.hidden is not None
    assert expected.hidden is not None
    stay = torch.arange(max(LENGTHS)) % 3 != 2
    torch.testing.assert_close(got.hidden[:, stay], expected.hidden[:, stay], atol=1e-5, rtol=1e-5)
    assert got.trace.n_query[:, 1].tolist() == LENGTHS  # softly dropped tokens are still computed


@pytest.mark.parametrize("model_type", STACKS)
def test_bias_zero_and_factor_one_are_the_full_model(model_type: str) -> None:
    def neutral(state: State) -> Decision:
        if state.point == "before":
            return Decision(attention_bias=torch.zeros(state.n_rows))
        return Decision(output_factor=torch.ones(state.n_rows))

    engine, inputs = ReferenceEngine(tiny_backbone(model_type)), batch(model_type)
    with torch.no_grad():
        expected = engine.run(inputs, Silent(), 0.0, keep_hidden=True)
        got = engine.run(inputs, Scripted(neutral, "before", "between"), 0.0, keep_hidden=True)
    assert torch.equal(got.logits, expected.logits)
    assert got.hidden is not None
    assert expected.hidden is not None
    assert torch.equal(got.hidden, expected.hidden)


@pytest.mark.parametrize("model_type", STACKS)
def test_a_factor_acts_between_attention_and_ffn(model_type: str) -> None:
    backbone, inputs = tiny_backbone(model_type, n_layers=2), batch(model_type)
    factor = 1 / (1 + inputs.positions)  # [B, T], known by position

    def weigh(state: State) -> Decision | None:
        return Decision(output_factor=1 / (1 + state.position)) if state.layer == 2 else None

    engine = ReferenceEngine(backbone)
    with torch.no_grad():
        got = engine.run(inputs, Scripted(weigh, "between"), 0.0, keep_hidden=True).hidden
        visible, hidden = inputs.attention_mask.bool(), engine.hidden_states(inputs)[1]
        bias = undisturbed_bias(inputs, hidden)(backbone.specs[1].attention)
        attended = backbone.attend(1, hidden, bias, inputs.positions)
        expected = backbone.for_head(backbone.feed_forward(1, attended * factor.unsqueeze(-1)))
    assert got is not None
    torch.testing.assert_close(got[visible], expected[visible], atol=1e-5, rtol=1e-5)


def test_gradients_flow_into_bias_and_factor() -> None:
    inputs, count = batch(), sum(LENGTHS)
    bias, factor = torch.zeros(count, requires_grad=True), torch.ones(count, requires_grad=True)

    def soft(state: State) -> Decision | None:
        if state.layer > 1:
            return None
        return Decision(attention_bias=bias) if state.point == "before" else Decision(output_factor=factor)

    engine = ReferenceEngine(tiny_backbone("bert"))

    def loss() -> Tensor:
        return engine.run(inputs, Scripted(soft, "before", "between"), 0.0).logits.square().sum()

    found = torch.autograd.grad(loss(), (bias, factor))
    row = LENGTHS[0] + 2  # a token of the second sequence
    for parameter, gradient in zip((bias, factor), found, strict=True):
        assert (
            int((gradient != 0).sum()) >= count - 1
        )  # the single token of the third sequence has none to compete with
        ends = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                parameter[row] += step
                ends.append(float(loss()))
                parameter[row] -= step
        assert float(gradient[row]) == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=0.05, abs=1e-4)


def test_the_packed_engine_refuses_soft_verbs() -> None:
    engine, inputs = PackedEngine(tiny_backbone("bert")), batch()
    with pytest.raises(
        StrettoError, match=r"'drop', 'freeze', 'gate', 'skip'\] before a layer of the packed engine.*'attention_bias'"
    ):
        engine.run(inputs, Scripted(lambda s: Decision(attention_bias=torch.zeros(s.n_rows)), "before"), 0.0)
    with pytest.raises(StrettoError, match=r"'drop'\] between a layer of the packed engine.*soft verbs only while"):
        engine.run(inputs, Scripted(lambda s: Decision(output_factor=torch.ones(s.n_rows)), "between"), 0.0)


@pytest.mark.parametrize(
    ("point", "decide", "message"),
    [
        ("before", lambda s: Decision(output_factor=torch.ones(s.n_rows)), "got 'output_factor'"),
        ("between", lambda s: Decision(attention_bias=torch.zeros(s.n_rows)), "got 'attention_bias'"),
        ("before", lambda s: Decision(attention_bias=torch.zeros(3)), r"float tensor of shape \[32\]"),
        ("between", lambda s: Decision(output_factor=torch.ones(s.n_rows, dtype=torch.bool)), "float tensor"),
        ("between", lambda s: Decision(drop=torch.ones(s.n_rows)), r"bool tensor of shape \[32\], got torch.float32"),
    ],
)
def test_a_soft_verb_in_the_wrong_place_or_shape_is_refused(point: Any, decide: Any, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        ReferenceEngine(tiny_backbone("bert")).run(batch(), Scripted(decide, point), 0.0)


# ---- skipped layers and gradients --------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "stack"), [("bert", "encoder.layer"), ("distilbert", "transformer.layer")])
def test_skipped_layers_are_as_if_they_were_not_there(model_type: str, stack: str) -> None:
    whole = tiny_encoder(model_type)
    short, inputs = copy.deepcopy(whole), batch(model_type)
    owner, _, name = stack.rpartition(".")
    layers = short.base_model.get_submodule(stack)
    setattr(short.base_model.get_submodule(owner), name, nn.ModuleList([layers[1], layers[3]]))
    short.config.num_hidden_layers = short.config.n_layers = 2
    with torch.no_grad():
        expected = short(**named(inputs)).logits
        got = ReferenceEngine(backbone_for(whole)).run(inputs, Silent(), 0.0, skip=(1, 3))
    torch.testing.assert_close(got.logits, expected, atol=1e-5, rtol=1e-5)
    assert got.trace.depth.tolist() == [2] * len(LENGTHS)
    assert got.trace.n_query[3].tolist() == [0, 12, 0, 1]  # the last layer updates what the head reads


@pytest.mark.parametrize("model_type", STACKS)
def test_a_skipped_layer_is_not_asked_and_the_last_may_be_one(model_type: str) -> None:
    asked: list[tuple[str, int]] = []

    def listen(state: State) -> None:
        asked.append((state.point, state.layer))

    backbone, inputs = tiny_backbone(model_type), batch(model_type)
    engine = ReferenceEngine(backbone)
    with torch.no_grad():
        got = engine.run(inputs, Scripted(listen, "before", "between"), 0.0, skip=(2, 4)).logits
        hidden = engine.embed(inputs)
        bias_of = undisturbed_bias(inputs, hidden)
        for layer in (0, 2):
            bias = bias_of(backbone.specs[layer].attention)
            hidden = backbone.feed_forward(layer, backbone.attend(layer, hidden, bias, inputs.positions))
        torch.testing.assert_close(got, backbone.head(backbone.for_head(hidden[:, 0])), atol=1e-5, rtol=1e-5)
    assert asked == [("before", 1), ("between", 1), ("before", 3), ("between", 3)]


@pytest.mark.parametrize("model_type", STACKS)
def test_gradients_equal_those_of_hugging_face(model_type: str) -> None:
    model, inputs = copy.deepcopy(tiny_encoder(model_type)), batch(model_type)
    labels, loss = torch.tensor([0, 1, 2, 1, 0]), nn.CrossEntropyLoss()
    parameters = dict(model.named_parameters())

    def gradients(logits: Tensor) -> dict[str, Tensor | None]:
        found = torch.autograd.grad(loss(logits, labels), list(parameters.values()), allow_unused=True)
        return dict(zip(parameters, found, strict=True))

    expected = gradients(model(**named(inputs)).logits)
    got = gradients(ReferenceEngine(backbone_for(model)).run(inputs, Silent(), 0.0).logits)
    for name, gradient in expected.items():
        mine = got[name]
        if gradient is None or mine is None:
            assert gradient is mine, name
            continue
        torch.testing.assert_close(mine, gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_survive_shortened_tables() -> None:
    """Every sequence drops, so columns are given up: the gradient is that of masks alone."""
    backbone = backbone_for(copy.deepcopy(tiny_encoder("bert")))
    engine, inputs = ReferenceEngine(backbone), batch(side="left")
    weight = backbone.specs[0].attention.value.weight

    def soft(state: State) -> Decision | None:
        return Decision(attention_bias=going(state) * -1e4) if state.layer == 2 else None

    def hard(state: State) -> Decision | None:
        return Decision(drop=going(state)) if state.layer == 2 else None

    found = [
        torch.autograd.grad(engine.run(inputs, Scripted(decide, "before"), 0.0).logits.sum(), weight)[0]
        for decide in (soft, hard)
    ]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


# ---- notes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine_class", [ReferenceEngine, PackedEngine])
@pytest.mark.parametrize("side", ["right", "left"])
def test_notes_on_tokens_follow_their_rows(engine_class: Any, side: str) -> None:
    """Through drops before and between, and through exits."""
    backbone, inputs = tiny_backbone("bert"), batch(side=side)
    mark = 100 * torch.arange(len(LENGTHS)).unsqueeze(1) + inputs.positions
    pair = torch.stack([mark, -mark], dim=-1)  # a note may have further dimensions
    inputs = dataclasses.replace(inputs, notes={"mark": mark, "pair": pair})
    seen: list[int] = []

    def check(state: State) -> Decision:
        expected = 100 * state.ids[state.sequence] + state.position
        assert torch.equal(state.input_notes["mark"], expected)
        assert torch.equal(state.input_notes["pair"], torch.stack([expected, -expected], dim=-1))
        own = state.notes_of("check").rows.setdefault("own", 2 * expected)
        assert torch.equal(own, 2 * expected)
        assert torch.equal(state.notes_of("check").sequences.setdefault("who", state.ids), state.ids)
        seen.append(state.n_rows)
        if state.point == "after":
            return Decision(exit=(state.ids == 3) & (state.layer == 2))
        return Decision(drop=(state.position + state.layer) % (4 if state.point == "before" else 5) == 3)

    torch.manual_seed(0)
    exits = ExitHeads(backbone.d, backbone.n_layers - 1, backbone.n_labels, "mean", 0.0)
    with torch.no_grad():
        engine_class(backbone).run(inputs, Scripted(check, "before", "between", "after", exits=exits), 0.0)
    assert seen[0] == sum(LENGTHS)
    assert seen[-1] < len(LENGTHS) * 3  # much has gone


# ---- what a pass is for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [ReferenceEngine, PackedEngine])
def test_the_context_of_a_pass_reaches_every_decision_of_it_and_no_other(engine: Any) -> None:
    seen: list[Any] = []

    def note(state: State) -> Decision | None:
        seen.append(state.context)
        if state.point == "after":
            return Decision(exit=(state.ids % 2 == 0) & (state.layer == 2))
        return Decision(drop=going(state)) if state.point == "between" else None

    backbone, purpose = tiny_backbone("bert"), object()
    method, parts = Scripted(note, "before", "between", "after"), {} if engine is ReferenceEngine else {"batch_size": 1}
    with torch.no_grad():
        engine(backbone).run(batch(), method, 0.0, context=purpose, **parts)  # of several parts, which are joined
        assert len(seen) >= 3 * backbone.n_layers - 1
        assert all(each is purpose for each in seen)
        seen.clear()
        engine(backbone).run(batch(), method, 0.0, **parts)
    assert seen and all(each is None for each in seen)
