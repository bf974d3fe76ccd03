"""A spec says all there is to say of a layer: run as it says, a layer equals Hugging Face's own modules."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import ARCHITECTURES, random_inputs, tiny_encoder, uses_types

from stretto.backbones import Backbone, Rotary, backbone_for
from stretto.backbones.positions import within
from stretto.engine.reference import ReferenceEngine, undisturbed_bias

CASES = [(name, training) for name in ARCHITECTURES for training in (False, True)]
CASES.remove(("alberta", True))  # its own code leaves the dropout of attention to the fused kernel, with other dice


@pytest.mark.parametrize(("model_type", "training"), CASES)
def test_a_layer_run_by_its_spec_is_hugging_faces(model_type: str, training: bool) -> None:
    """With dropout too: the same dice fall in the same places."""
    model = copy.deepcopy(tiny_encoder(model_type, n_layers=2))
    model.set_attn_implementation("eager")
    backbone, inputs = backbone_for(model), random_inputs([7, 4], types=uses_types(model_type))
    engine = ReferenceEngine(backbone)
    with torch.no_grad():
        hidden = engine.embed(inputs)
        model.train(training)
        for layer, spec in enumerate(backbone.specs):
            bias = undisturbed_bias(inputs, hidden)(spec.attention)
            torch.manual_seed(5)
            expected = backbone.attend(layer, hidden, bias, inputs.positions)
            expected = backbone.feed_forward(layer, expected)
            torch.manual_seed(5)
            got = Backbone.attend(backbone, layer, hidden, bias, inputs.positions)
            got = Backbone.feed_forward(backbone, layer, got)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            hidden = expected


def test_rotary_positions_by_hand() -> None:
    """A head of 4: values 0 and 2 turn by a quarter of a circle per position, 1 and 3 by none at all."""
    rotary = Rotary(torch.tensor([torch.pi / 2, 0.0]), factor=2.0)
    x = torch.tensor([[[1.0, 5.0, 3.0, 7.0]]]).expand(2, 1, 4)  # two rows of one head
    turned = rotary.turned(x, torch.tensor([1, 2]))
    torch.testing.assert_close(turned, torch.tensor([[[-6.0, 10.0, 2.0, 14.0]], [[-2.0, 10.0, -6.0, 14.0]]]))
    torch.testing.assert_close(Rotary.of(100.0, 4).frequencies, torch.tensor([1.0, 0.1]))


def test_a_window_counts_positions_in_the_input() -> None:
    position = torch.tensor([[0, 1, 5]])
    assert within(1, position, position)[0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert within(4, position[:, 1:], position)[0].int().tolist() == [[1, 1, 1], [0, 1, 1]]
