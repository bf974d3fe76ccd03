"""Which tokens stay, in all methods that drop tokens: ranks, and no influence of padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equations import build
from scripted import by_sequence, ragged_state
from tiny import random_inputs, tiny_backbone

from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.methods import Method, Shape
from stretto.methods.selection import drop_all_but, ranks
from stretto.state import Inputs, State


def test_ranks_count_within_each_sequence_protected_first_and_ties_by_position() -> None:
    state = ragged_state([0.1, 0.5, 0.9, 0.5], [9.0, 1.0, 2.0], [0.3])
    assert by_sequence(ranks(state.attention_received, state), state) == [[0, 2, 1, 3], [0, 2, 1], [0]]
    state = ragged_state([0.1, 0.5, 0.9, 0.5], [9.0, 1.0, 2.0], protect=(3,))
    assert by_sequence(ranks(state.attention_received, state), state) == [[0, 3, 2, 1], [0, 2, 1]]


def test_drop_all_but_the_best() -> None:
    state = ragged_state([0.1, 0.5, 0.9, 0.5], [9.0, 1.0, 2.0], [0.3])
    dropped = drop_all_but(torch.tensor([3, 2, 2]), state.attention_received, state)
    assert by_sequence(dropped, state) == [[False, False, False, True], [False, True, False], [False]]


def kept_by(engine: Any, method: Method, dial: float, inputs: Inputs, names: list[int]) -> set[tuple[int, int, int]]:
    """(sequence, layer, position) of every token that stayed."""
    stayed = set()
    decide = type(method).decide

    def spy(state: State) -> Any:
        decision = decide(method, state)
        keep = torch.ones_like(state.protected)
        if decision is not None and decision.drop is not None:
            keep = ~decision.drop | state.protected
        for sequence, position in zip(state.sequence[keep].tolist(), state.position[keep].tolist(), strict=True):
            stayed.add((names[int(state.ids[sequence])], state.layer, position))
        return decision

    method.decide = spy  # type: ignore[method-assign]
    with torch.no_grad():
        engine.run(inputs, method, dial)
    return stayed


@pytest.mark.parametrize("engine_class", [ReferenceEngine, PackedEngine])
@pytest.mark.parametrize(("name", "dial"), [("power_bert", 1.0), ("length_adaptive", 0.6), ("constant_ratio", 0.8)])
def test_padding_does_not_change_which_tokens_stay(name: str, dial: float, engine_class: Any) -> None:
    backbone, lengths = tiny_backbone("bert"), [9, 5, 1, 14, 5]
    settings = {"max_tokens": 16} if name == "power_bert" else {}
    method = build(name, Shape(backbone.d, backbone.n_layers, backbone.n_labels), **settings)
    if name == "power_bert":
        with torch.no_grad():
            method.weights.copy_(torch.linspace(0.8, 0.2, backbone.n_layers).unsqueeze(1).expand(-1, 16))
    engine, names = engine_class(backbone), list(range(len(lengths)))
    right = random_inputs(lengths)
    expected = kept_by(engine, method, dial, right, names)
    assert 0 < sum(layer == 4 for _, layer, _ in expected) < sum(lengths)
    assert kept_by(engine, method, dial, random_inputs(lengths, side="left"), names) == expected
    alone = set()
    for index, length in enumerate(lengths):
        unpadded = [table[index : index + 1, :length] for table in (right.input_ids, right.attention_mask)]
        assert right.token_type_ids is not None
        types = right.token_type_ids[index : index + 1, :length]
        alone |= kept_by(engine, method, dial, Inputs(*unpadded, types), [index])
    assert alone == expected
