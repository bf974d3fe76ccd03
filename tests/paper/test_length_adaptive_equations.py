"""The equations of the Length-Adaptive Transformer and its constant ratio, on numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from equations import build, log, training_batch
from scripted import by_sequence, ragged_state
from tiny import random_inputs, tiny_backbone
from torch import Tensor

from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.methods.constant_ratio import chance
from stretto.methods.length_adaptive import (
    FixedLengths,
    constant_ratio_lengths,
    dropped_lengths,
    nominal_cost,
    sample_drops,
    sample_skips,
)


def test_constant_ratios() -> None:
    assert constant_ratio_lengths(0.5, 3).tolist() == [0.5, 0.25, 0.125]
    assert constant_ratio_lengths(torch.tensor([1.0, 0.5]), 2).tolist() == [[1.0, 1.0], [0.5, 0.25]]
    # a third of a layer runs at the old length, two thirds at the new: ((1 + 2·.5) + (.5 + 2·.25)) / 3 / 2
    assert nominal_cost(torch.tensor([[0.5, 0.25], [1.0, 1.0]])).tolist() == pytest.approx([0.5, 1.0])


def test_sampled_drops_are_at_most_p() -> None:
    torch.manual_seed(0)
    drops = torch.stack([sample_drops(0.2, 5) for _ in range(500)])
    assert drops.min().item() >= 0 and drops.max().item() <= 0.2
    assert drops.mean().item() == pytest.approx(0.1, abs=0.01)  # uniform
    assert sample_drops(0.0, 3).tolist() == [0.0, 0.0, 0.0]


def test_a_skipped_layer_drops_nothing() -> None:
    drops = torch.tensor([0.2, 0.5, 0.25, 0.2], dtype=torch.float64)
    assert dropped_lengths(drops, ()).tolist() == pytest.approx([0.8, 0.4, 0.3, 0.24])
    assert dropped_lengths(drops, (2, 3)).tolist() == pytest.approx([0.8, 0.8, 0.8, 0.64])
    assert drops.tolist() == [0.2, 0.5, 0.25, 0.2]


def test_a_step_with_skipped_layers_shortens_by_those_that_run() -> None:
    method, backbone = build("length_adaptive", length_drop=0.2), tiny_backbone("bert")
    lengths = FixedLengths(dropped_lengths(torch.full((4,), 0.2, dtype=torch.float64), (1, 3)))
    trace = (
        ReferenceEngine(backbone)
        .run(random_inputs([30]), method, 1.0, skip=(1, 3), context=lengths, keep_hidden=True)  # all rows of layer 4
        .trace
    )
    assert trace.n_ffn.tolist() == [[0, 24, 0, 20]]  # ceil(0.8 · 30), ceil(0.64 · 30)


def test_sampled_skips_never_take_all_layers() -> None:
    torch.manual_seed(0)
    assert sample_skips(0.0, 4) == ()
    assert len(sample_skips(1.0, 4)) == 3
    drawn = [sample_skips(0.5, 3) for _ in range(300)]
    assert all(set(skipped) < {1, 2, 3} for skipped in drawn)
    assert sum(map(len, drawn)) / 300 == pytest.approx(1.5 - 1 / 8, abs=0.15)  # one in eight would be all


def test_the_sandwich_of_full_smallest_and_random_models() -> None:
    method = build("length_adaptive", random_models=2, length_drop=0.2, layer_drop=1.0)
    full, student = log(0.5, 0.5).requires_grad_(), log(0.25, 0.75)
    ran: list[tuple[Any, ...]] = []

    def run(dial: float, skip: tuple[int, ...] = (), context: Any = None) -> Tensor:
        ran.append((dial, context, skip))
        return student if ran[1:] else full

    loss = method.stages()[-1].objective(training_batch(run, [1]))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)  # of the full model to a sub-model
    assert loss.item() == pytest.approx((math.log(2) + 3 * kl) / 4)
    dials, contexts, skips = zip(*ran, strict=True)
    assert dials == (1.0,) * 4
    assert [len(skipped) for skipped in skips] == [0, 2, 2, 2]  # the teacher runs whole
    assert contexts[0] is None
    lengths = [context.fractions for context in contexts[1:]]
    (ran_alone,) = {1, 2, 3} - set(skips[1])  # the only layer of the smallest model
    assert lengths[0].tolist() == pytest.approx([0.8 if layer >= ran_alone else 1.0 for layer in (1, 2, 3)])
    assert all(0.8 <= sample[-1] <= 1 for sample in lengths[1:])
    loss.backward()  # the teacher learns from the labels alone: (p - y) / 4
    assert full.grad is not None
    assert full.grad.flatten().tolist() == pytest.approx([0.125, -0.125])


FRONTIER = {"costs": (0.7, 0.4), "frontier": ((0.8, 0.6, 0.4), (0.5, 0.4, 0.2))}


def test_a_budget_selects_the_most_expensive_configuration_within_it() -> None:
    method = build("length_adaptive", **FRONTIER)
    assert method.dial.sweep == (1.0, 0.7, 0.4)
    budgets = torch.tensor([1.0, 0.99, 0.7, 0.69, 0.4, 0.1], dtype=torch.float64)
    whole, dear, cheap = (1.0, 1.0, 1.0), *FRONTIER["frontier"]
    expected = [whole, dear, dear, cheap, cheap, cheap]
    assert method.lengths(budgets).tolist() == [list(lengths) for lengths in expected]
    # ceil: of 5 tokens 0.8 are 4, of 3 tokens 2.4 are 3
    state = ragged_state([0.0, 0.3, 0.1, 0.5, 0.2], [0.0, 0.1, 0.2], dial=0.7)
    assert by_sequence(method.decide(state).drop, state) == [[False, False, True, False, False], [False] * 3]


def test_before_the_search_the_ratio_is_constant() -> None:
    method = build("length_adaptive")
    assert all(dear > cheap for dear, cheap in itertools.pairwise(method.dial.sweep))
    cheapest = method.lengths(torch.tensor([0.0], dtype=torch.float64))
    assert cheapest.flatten().tolist() == pytest.approx([0.7, 0.49, 0.343])


@pytest.mark.parametrize(
    "wrong",
    [
        {"costs": (0.7,)},  # a cost is missing
        {"costs": (0.4, 0.7)},  # rising
        {"costs": (1.0, 0.4)},  # not below the full model
        {"frontier": ((0.8, 0.6), (0.5, 0.4))},  # a layer is missing
        {"frontier": ((0.8, 0.9, 0.4), (0.5, 0.4, 0.2))},  # a length rises
        {"frontier": ((1.2, 0.9, 0.4), (0.5, 0.4, 0.2))},  # more than all
        {"frontier": ((0.8, 0.6, 0.4), (0.5, 0.4, 0.0))},  # nothing
    ],
)
def test_a_frontier_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(StrettoError, match="Expected a frontier of falling costs below 1, each with 3 fractions"):
        build("length_adaptive", **{**FRONTIER, **wrong})


# ---- constant ratio, and what tokens are chosen by ---------------------------------------------------------


def test_a_constant_ratio_counts_from_the_length_that_came_in() -> None:
    method = build("constant_ratio")
    state = ragged_state([0.0, 0.3, 0.1, 0.5, 0.2], dial=0.5)  # ceil 2.5 = 3
    assert method.decide(state).drop.tolist() == [False, False, True, False, True]
    assert state.notes_of(method).sequences["length"].tolist() == [5]  # for the layers that follow
    state = ragged_state([0.0, 0.3, 0.5], dial=0.5, layer=2)
    state.notes_of(method).sequences["length"] = torch.tensor([5])  # ceil 1.25 = 2
    assert method.decide(state).drop.tolist() == [False, True, False]


def test_two_tokens_stay_and_nobody_is_asked_for_their_attention() -> None:
    method, state = build("constant_ratio"), ragged_state([0.0, 0.3], [0.0, 0.1], dial=0.1)
    decision = method.decide(state)
    assert decision.drop is None and decision.score is None


def test_a_length_is_not_a_little_more_than_it_is() -> None:
    method, state = build("constant_ratio"), ragged_state([0.0] * 20, dial=0.8, layer=2)
    state.notes_of(method).sequences["length"] = torch.tensor([25])  # 0.8² · 25 = 16
    assert int(method.decide(state).drop.sum()) == 20 - 16


def test_constant_ratio_selects_by_attention_chance_or_saliency() -> None:
    scores, salient = [0.0, 0.3, 0.1, 0.5], torch.tensor([0.0, 0.1, 0.7, 0.2])
    dropped = {}
    for select in ("attention", "random", "saliency"):
        state = ragged_state(scores, dial=0.5, input_notes={"saliency": salient})
        decision = build("constant_ratio", select=select, selection_seed=3).decide(state)
        dropped[select] = decision.drop.tolist()
        assert decision.score is not None
    assert dropped["attention"] == [False, True, True, False]
    assert dropped["saliency"] == [False, True, False, True]
    drawn = chance(torch.arange(4), seed=3)
    best = 1 + int(drawn[1:].argmax())
    assert dropped["random"] == [position not in (0, best) for position in range(4)]
    assert not torch.equal(drawn, chance(torch.arange(4), seed=4))


def test_saliency_has_to_be_given() -> None:
    method = build("constant_ratio", select="saliency")
    with pytest.raises(StrettoError, match=r"Expected the saliency of every token in Inputs.notes, got none"):
        method.decide(ragged_state([0.0, 0.3, 0.1, 0.5], dial=0.5))
