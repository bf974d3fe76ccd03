"""The equations of PoWER-BERT, on numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from equations import build, log, training_batch
from scripted import by_sequence, ragged_state
from tiny import random_inputs
from torch import Tensor

from stretto.errors import StrettoError
from stretto.methods.power_bert import (
    configuration,
    elimination_penalty,
    interpolate,
    places,
    retention,
    soft_extract,
)


def test_places_start_behind_the_protected() -> None:
    state = ragged_state([0.1, 0.5, 0.9, 0.4], [9.0, 1.0, 2.0])
    assert by_sequence(places(state.attention_received, state), state) == [[0, 2, 1, 3], [0, 2, 1]]
    state = ragged_state([0.1, 0.5, 0.9, 0.4], [9.0, 1.0, 2.0], protect=(3,))  # the second sequence has no position 3
    assert by_sequence(places(state.attention_received, state), state) == [[0, 2, 1, 0], [0, 2, 1]]


def test_retention_is_clipped_and_place_zero_is_kept() -> None:
    weights = torch.tensor([[-3.0, 1.7, 0.5, -0.2]], requires_grad=True)
    r = retention(weights)
    assert r.tolist() == [[1.0, 1.0, 0.5, 0.0]]
    r.sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [[0.0, 0.0, 1.0, 0.0]]
    # at the edges, where all weights start, the gradient still flows
    ones = torch.ones(1, 3, requires_grad=True)
    retention(ones).sum().backward()
    assert ones.grad is not None
    assert ones.grad.tolist() == [[0.0, 1.0, 1.0]]


def test_soft_extraction_and_its_penalty() -> None:
    r = torch.tensor([[1.0, 0.9, 0.8], [1.0, 0.5, 0.1]])
    assert soft_extract(r[1], torch.tensor([0, 2, 1, 7])).tolist() == pytest.approx([1.0, 0.1, 0.5, 0.1])
    # 1/2 · 2.7 + 2/2 · 1.6
    assert elimination_penalty(r).item() == pytest.approx(2.95)


def test_the_configuration_is_the_rounded_sum_that_never_rises() -> None:
    r = torch.tensor([[1, 1, 1, 0.6, 0.1], [1, 0.9, 0.4, 0.1, 0], [1, 1, 1, 0, 0], [1, 0.2, 0, 0, 0]])
    # sums 3.7, 2.4, 3.0, 1.2: rounded 4, 2, 3, 1; at least 2; the third may not rise again
    assert configuration(r).tolist() == [4, 2, 2, 2]


def test_strength_interpolates_from_all_tokens() -> None:
    n = torch.tensor([10, 10, 10, 10, 3])
    strength = torch.tensor([0.0, 0.5, 0.51, 1.0, 1.0], dtype=torch.float64)
    # 10 - s·6: 10, 7, 6.94, 4; three tokens are fewer than four
    assert interpolate(n, torch.tensor(4.0, dtype=torch.float64), strength).tolist() == [10, 7, 7, 4, 3]


def test_power_bert_drops_the_least_significant_at_its_strength() -> None:
    method = build("power_bert", max_tokens=6)
    with torch.no_grad():
        method.weights.copy_(torch.tensor([[1, 1, 1, 0.0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]))
    scores = [0.0, 0.3, 0.1, 0.5, 0.2], [0.0, 0.1, 0.2]
    state = ragged_state(*scores, dial=1.0)
    decision = method.decide(state)
    assert by_sequence(decision.drop, state) == [[False, False, True, False, True], [False] * 3]
    assert torch.equal(decision.score, state.attention_received)
    state = ragged_state(*scores, dial=[0.5, 0.0])  # 5 - 0.5·2 = 4 stay
    assert by_sequence(method.decide(state).drop, state) == [[False, False, True, False, False], [False] * 3]
    # the protected count for one: position 2 and the best two others stay
    state = ragged_state(*scores, dial=1.0, protect=(2,))
    assert by_sequence(method.decide(state).drop, state) == [[False, False, False, False, True], [False] * 3]


def test_power_bert_measures_strength_from_the_length_that_came_in() -> None:
    method = build("power_bert", max_tokens=6)
    with torch.no_grad():
        method.weights.copy_(torch.tensor([[1, 1, 0.0, 0, 0, 0]]).expand(3, 6))
    state = ragged_state([0.0, 0.3, 0.1, 0.5], dial=0.5, layer=2)
    state.notes_of(method).sequences["places"] = torch.tensor([6])  # six came in; layer 1 left four: 6 - 0.5·4 = 4
    assert method.decide(state) is None
    first = ragged_state([0.0, 0.3, 0.1, 0.5, 0.2, 0.4], dial=0.5)
    method.decide(first)
    assert first.notes_of(method).sequences["places"].tolist() == [6]  # for the layers that follow


def test_power_bert_without_strength_does_not_ask_for_attention() -> None:
    method = build("power_bert", max_tokens=6)
    with torch.no_grad():
        method.weights.zero_()
    assert method.decide(ragged_state([0.0, 0.3, 0.1, 0.5], dial=0.0, providers={})) is None
    # nor where all texts are short
    assert method.decide(ragged_state([0.0, 0.3], [0.0], dial=1.0, providers={})) is None


def test_power_bert_weighs_tokens_only_while_it_searches() -> None:
    method = build("power_bert", max_tokens=4, penalty=0.1)
    with torch.no_grad():
        method.weights.copy_(torch.tensor([[1, 0.8, 0.6, 0.4], [1, 0.5, 0.25, 0.0], [1, 1, 1, 1]]))
    search, retrain = method.stages()[-2:]
    seen: list[Any] = []

    def run(dial: float, context: Any = None) -> Tensor:
        state = ragged_state([0.0, 0.3, 0.1, 0.5, 0.2, 0.4], dial=dial, layer=2, context=context)
        seen.append((dial, method.decide(state)))
        return log(0.25, 0.75)

    loss = search.objective(training_batch(run, [1]))
    # 1/3 · 2.8 + 2/3 · 1.75 + 3/3 · 4 = 6.1
    assert loss.item() == pytest.approx(-math.log(0.75) + 0.1 * 6.1)
    dial, decision = seen.pop()
    assert dial == 0.0
    # places 0 3 5 1 4 2; from the fourth on they share the last weight
    assert decision.output_factor.tolist() == pytest.approx([1, 0, 0, 0.5, 0, 0.25])
    loss.backward()
    assert method.weights.grad[:, 1:].tolist() == pytest.approx(torch.tensor([[0.1 / 3] * 3, [0.2 / 3] * 3, [0.1] * 3]))

    loss = retrain.objective(training_batch(run, [1]))
    assert loss.item() == pytest.approx(-math.log(0.75))
    dial, decision = seen.pop()
    assert dial == 1.0
    assert decision.output_factor is None
    assert decision.drop.tolist() == [False, True, True, False, True, True]  # round 1.75 = 2 stay


def test_power_bert_clips_its_weights_after_a_step_of_the_search() -> None:
    method = build("power_bert", max_tokens=4)
    search, retrain = method.stages()[-2:]
    assert dict(search.rates) == {"weights": method.config.retention_learning_rate}
    assert search.best_by == "last"
    with torch.no_grad():
        method.weights[0] = torch.tensor([1.0, 1.3, 0.5, -0.2])
    assert retrain.after_step is None
    search.after_step()
    assert method.weights[0].tolist() == [1.0, 1.0, 0.5, 0.0]
    with pytest.raises(StrettoError, match="at least 2, got 1"):
        build("power_bert", max_tokens=1)


def test_power_bert_starts_without_the_places_no_text_has() -> None:
    method = build("power_bert", select="attention", max_tokens=6)
    batches = [(random_inputs([3, 2]), torch.tensor([0, 1])), (random_inputs([4]), torch.tensor([0]))]
    search, retrain = method.stages()[-2:]
    assert retrain.prepare is None
    assert method.weights.sum() == 18
    assert search.prepare(None, iter(batches)) == {}
    assert method.weights.tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]] * 3
