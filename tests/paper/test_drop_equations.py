"""The equations of the methods that drop tokens, on numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import by_sequence, ragged_state
from tiny import random_inputs, tiny_backbone
from torch import Tensor

from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.methods import METHODS, Method, Shape, Targets, TrainingBatch
from stretto.methods.constant_ratio import chance
from stretto.methods.length_adaptive import (
    FixedLengths,
    constant_ratio_lengths,
    dropped_lengths,
    nominal_cost,
    sample_drops,
    sample_skips,
)
from stretto.methods.power_bert import (
    configuration,
    elimination_penalty,
    interpolate,
    places,
    retention,
    soft_extract,
)
from stretto.methods.selection import drop_all_but, ranks
from stretto.state import Inputs, Output, State, Trace
from stretto.tasks import Classification

SHAPE = Shape(d=4, n_layers=3, n_labels=2)
TASK = Classification(["no", "yes"])


def build(name: str, shape: Shape = SHAPE, **settings: Any) -> Any:
    return METHODS[name](METHODS[name].Config(**settings), shape, TASK)


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def training_batch(run: Callable[..., Tensor], labels: list[int]) -> TrainingBatch:
    """A batch whose runs give the logits that `run` says."""
    tokens = torch.ones(len(labels), 5, dtype=torch.long)
    trace = Trace(*(torch.zeros(len(labels), *shape, dtype=torch.long) for shape in ((), (3,), (3,), (3,), (), (3,))))
    engine = ReferenceEngine(tiny_backbone("bert"))
    return TrainingBatch(
        Inputs(tokens, tokens),
        Targets(torch.tensor(labels)),
        lambda *a, **n: Output(run(*a, **n), trace),
        0,
        0.0,
        engine,
    )


# ---- selection ---------------------------------------------------------------------------------------------


def test_ranks_count_within_each_sequence_protected_first_and_ties_by_position() -> None:
    state = ragged_state([0.1, 0.5, 0.9, 0.5], [9.0, 1.0, 2.0], [0.3])
    assert by_sequence(ranks(state.attention_received, state), state) == [[0, 2, 1, 3], [0, 2, 1], [0]]
    state = ragged_state([0.1, 0.5, 0.9, 0.5], [9.0, 1.0, 2.0], protect=(3,))
    assert by_sequence(ranks(state.attention_received, state), state) == [[0, 3, 2, 1], [0, 2, 1]]


def test_drop_all_but_the_best() -> None:
    state = ragged_state([0.1, 0.5, 0.9, 0.5], [9.0, 1.0, 2.0], [0.3])
    dropped = drop_all_but(torch.tensor([3, 2, 2]), state.attention_received, state)
    assert by_sequence(dropped, state) == [[False, False, False, True], [False, True, False], [False]]


# ---- PoWER-BERT --------------------------------------------------------------------------------------------


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
    search, retrain = method.stages()[1:]
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
    search, retrain = method.stages()[1:]
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
    search, retrain = method.stages()[1:]
    assert retrain.prepare is None
    assert method.weights.sum() == 18
    assert search.prepare(None, iter(batches)) == {}
    assert method.weights.tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]] * 3


# ---- Length-Adaptive ---------------------------------------------------------------------------------------


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
    trace = ReferenceEngine(backbone).run(random_inputs([30]), method, 1.0, skip=(1, 3), context=lengths).trace
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


def test_a_budget_buys_the_dearest_configuration_it_can_pay() -> None:
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


# ---- padding -----------------------------------------------------------------------------------------------


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
