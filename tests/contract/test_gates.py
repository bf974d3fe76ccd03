"""Gates: a factor on both residual branches of a layer, per sequence, in both engines and on every backbone.

That random gates agree between the engines, alone and in a batch, is in `test_engines.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import Scripted
from tiny import STACKS, random_inputs, tiny_backbone, uses_types
from torch import Tensor

from stretto.backbones import Backbone
from stretto.backbones.plain import affine, attention_probabilities
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine, attention_bias
from stretto.errors import StrettoError
from stretto.state import Decision, Inputs, State

LENGTHS = [9, 5, 1, 12, 5]
ENGINES = [ReferenceEngine, PackedEngine]


def batch(model_type: str, side: str = "right") -> Inputs:
    return random_inputs(LENGTHS, types=uses_types(model_type), side=side)


def run(engine: Any, inputs: Inputs, method: Scripted) -> Tensor:
    """[B, T, d] final states."""
    with torch.no_grad():
        hidden = engine.run(inputs, method, 0.0, keep_hidden=True).hidden
    assert hidden is not None
    return hidden


def gated_layer(backbone: Backbone, layer: int, rows: Tensor, gate: float) -> Tensor:
    """The formula from the layer's modules, for the [n, d] rows of one sequence.

    Twice LN(h + p f(h)), or h + p f(LN(h)) in pre-LN layers."""
    spec, position = backbone.specs[layer], torch.arange(len(rows)).unsqueeze(0)
    attention, ffn = spec.attention, spec.ffn
    read = spec.attention_norm(rows) if spec.pre_norm else rows
    everybody = attention_bias(position, torch.ones_like(position, dtype=torch.bool), torch.zeros(position.shape))
    weights = attention_probabilities(spec, rows.unsqueeze(0), everybody(attention), position)[0]
    v = affine(attention.value, read).view(len(rows), attention.heads, -1)
    hidden = rows + gate * attention.output(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    hidden = hidden if spec.pre_norm else spec.attention_norm(hidden)
    read = spec.ffn_norm(hidden) if spec.pre_norm else hidden
    inner = ffn.activation(affine(ffn.into, read))
    inner = inner if ffn.factor is None else inner * affine(ffn.factor, read)
    hidden = hidden + gate * ffn.out(inner)
    return hidden if spec.pre_norm else spec.ffn_norm(hidden)


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("engine_class", ENGINES)
def test_a_gate_scales_both_branches_of_its_layer_alone(engine_class: Any, model_type: str) -> None:
    backbone, inputs = tiny_backbone(model_type, n_layers=3), batch(model_type)
    gates = torch.tensor([0.3, 0.0, 1.0, 0.7, 1.5])

    def gate(state: State) -> Decision | None:
        return Decision(gate=gates[state.ids]) if state.layer == 2 else None

    got = run(engine_class(backbone), inputs, Scripted(gate, "before"))
    with torch.no_grad():
        states = ReferenceEngine(backbone).hidden_states(inputs)
        for index, length in enumerate(LENGTHS):
            rows = gated_layer(backbone, 1, states[1][index, :length], float(gates[index]))
            expected = backbone.for_head(gated_layer(backbone, 2, rows, 1.0))
            torch.testing.assert_close(got[index, :length], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("engine_class", [*ENGINES, lambda backbone: PackedEngine(backbone, "int8")])
def test_gates_of_one_change_no_bit(engine_class: Any, model_type: str) -> None:
    engine, inputs = engine_class(tiny_backbone(model_type)), batch(model_type)
    ones = Scripted(lambda state: Decision(gate=torch.ones(state.n_sequences, dtype=torch.float64)), "before")
    assert torch.equal(run(engine, inputs, ones), run(engine, inputs, Silent()))


@pytest.mark.parametrize("engine_class", ENGINES)
def test_a_sequence_is_not_touched_by_the_gates_of_others(engine_class: Any) -> None:
    engine, inputs = engine_class(tiny_backbone("bert")), batch("bert")
    others = Scripted(lambda state: Decision(gate=torch.where(state.ids == 3, 1.0, 0.4)), "before")
    got, full = run(engine, inputs, others), run(engine, inputs, Silent())
    assert torch.equal(got[3], full[3])
    assert not torch.allclose(got[0], full[0], atol=1e-2)


def test_int8_gates_as_float32_does() -> None:
    backbone, inputs = tiny_backbone("bert"), batch("bert")
    gates = Scripted(lambda state: Decision(gate=0.2 + 0.1 * state.ids), "before")
    exact, coarse = (run(PackedEngine(backbone, dtype), inputs, gates) for dtype in ("float32", "int8"))
    ungated = run(PackedEngine(backbone), inputs, Silent())
    assert float((coarse - exact).norm()) < 0.1 * float((ungated - exact).norm())


def test_gradients_flow_into_gates() -> None:
    engine, inputs = ReferenceEngine(tiny_backbone("bert")), batch("bert", "left")
    gates = torch.tensor([0.3, 0.5, 1.0, 0.7, 1.5], requires_grad=True)

    def loss() -> Tensor:
        def gate(state: State) -> Decision | None:
            return Decision(gate=gates[state.ids]) if state.layer == 2 else None

        return engine.run(inputs, Scripted(gate, "before"), 0.0).logits.square().sum()

    (gradient,) = torch.autograd.grad(loss(), gates)
    for index in range(len(LENGTHS)):
        ends = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                gates[index] += step
                ends.append(float(loss()))
                gates[index] -= step
        assert float(gradient[index]) == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=0.05, abs=1e-4)


@pytest.mark.parametrize("engine_class", ENGINES)
@pytest.mark.parametrize(
    ("point", "gate", "message"),
    [
        ("before", lambda state: torch.ones(state.n_rows), r"'gate' to be a float tensor of shape \[5\].*per live seq"),
        ("before", lambda state: torch.ones(state.n_sequences, dtype=torch.bool), "float tensor"),
        ("after", lambda state: torch.ones(state.n_sequences), r"\['exit'\] after a layer.*got 'gate'"),
    ],
)  # fmt: skip
def test_a_gate_in_the_wrong_place_or_shape_is_refused(engine_class: Any, point: Any, gate: Any, message: str) -> None:
    method = Scripted(lambda state: Decision(gate=gate(state)), point)
    with pytest.raises(StrettoError, match=message):
        engine_class(tiny_backbone("bert")).run(batch("bert"), method, 0.0)
