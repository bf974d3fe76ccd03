"""Faster Depth-Adaptive Transformers: the equations on numbers worked out by hand, and freezing itself."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from executed import executed_flops
from scripted import Scripted, ragged_state
from tiny import STACKS, give_table, random_inputs, tiny_backbone, tiny_model, uses_types
from torch import Tensor

from stretto.data.tokenise import NO_WORD, UNKNOWN_WORD
from stretto.data.words import Tally, word_keys, words_in
from stretto.engine.cost import flops
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine, undisturbed_bias
from stretto.errors import StrettoError
from stretto.methods import METHODS, Shape
from stretto.methods.depth_mi import (
    chance_or_less,
    equal_width_depths,
    mutual_information,
    reversed_depths,
    towards,
)
from stretto.methods.pooled_head import PooledHead
from stretto.methods.word_counts import presence
from stretto.state import Decision, Inputs
from stretto.tasks import Classification
from stretto.tasks.regression import bin_edges

LENGTHS = [9, 5, 1, 12, 5]

# ---- mutual information ------------------------------------------------------------------------------------


def test_mutual_information_by_hand() -> None:
    """8 texts, 4 of each of two labels. The first word is in all of one label and none of the other: without smoothing
    each label's table is diagonal, MI = 2 log 2 (once per label). The second is everywhere alike: MI = 0."""
    with_word, texts = torch.tensor([[4, 0], [2, 2]]), torch.tensor([4, 4])
    found = mutual_information(with_word, texts, smoothing=1e-9)
    torch.testing.assert_close(found, torch.tensor([2 * math.log(2), 0.0], dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_smoothing_is_added_to_each_cell() -> None:
    """One word in 1 of 2 texts of the first label and in none of the 2 of the second."""
    cells = [[1.1, 0.1], [1.1, 2.1]]  # rows: with and without the word; columns: label and other label
    total = 4.4
    expected = 0.0
    for row in range(2):
        for column in range(2):
            p = cells[row][column] / total
            p_row, p_column = sum(cells[row]) / total, (cells[0][column] + cells[1][column]) / total
            expected += p * math.log(p / (p_row * p_column))
    found = mutual_information(torch.tensor([[1, 0]]), torch.tensor([2, 2]), smoothing=0.1)
    assert float(found) == pytest.approx(2 * expected)  # the second label's table is the same, turned around


def test_more_classes_are_summed() -> None:
    """A word that marks one of three equal classes: I for that class is H(1/3), for the others smaller, none is 0."""
    found = mutual_information(torch.tensor([[10, 0, 0], [10, 10, 10]]), torch.tensor([10, 10, 10]), 1e-9)
    own = math.log(3) - 2 / 3 * math.log(2)
    other = 1 / 3 * math.log((1 / 3) / (1 / 3 * 2 / 3)) + 1 / 3 * math.log((1 / 3) / (2 / 3 * 1 / 3))
    other += 1 / 3 * math.log((1 / 3) / (2 / 3 * 2 / 3))
    assert found.tolist() == pytest.approx([own + 2 * other, 0.0], abs=1e-6)


def test_bins_of_equal_width_on_the_logarithm() -> None:
    """-log MI = 0, 1.1, 2.1, 3.9, 4 in four bins of width 1; the highest MI is the shallowest."""
    information = torch.tensor([0.0, -1.1, -2.1, -3.9, -4.0]).exp()
    assert equal_width_depths(information, 4, 1e-12).tolist() == [1, 2, 3, 4, 4]
    assert equal_width_depths(torch.tensor([0.3, 0.3]), 4, 1e-12).tolist() == [4, 4]


def test_words_without_information_set_the_width_of_the_bins() -> None:
    """MI 1, e^-3 and 0: with ε = e^-4 the bins are 1 wide, with ε = e^-12 they are 3 wide."""
    information = torch.tensor([1.0, math.exp(-3.1), 0.0])
    assert equal_width_depths(information, 4, math.exp(-4)).tolist() == [1, 4, 4]
    assert equal_width_depths(information, 4, math.exp(-12)).tolist() == [1, 2, 4]
    for wrong in (1.0, -1e-9):
        with pytest.raises(StrettoError, match=r"Expected least_information in \[0, 1\), got"):
            tiny_model("depth_mi", least_information=wrong)


def test_the_least_information_follows_from_the_direction() -> None:
    """Deep: what a word has by chance. 8 texts, ε = 1/8: only the word that marks a label goes deep."""
    assert chance_or_less("shallow", 1000) == 1e-12 and chance_or_less("deep", 1000) == 1e-3
    information = mutual_information(torch.tensor([[4, 0], [1, 0], [2, 2]]), torch.tensor([4, 4]), 0.1)
    bins = {each: equal_width_depths(information, 4, chance_or_less(each, 8)).tolist() for each in ("deep", "shallow")}
    assert reversed_depths(torch.tensor(bins["deep"]), 4).tolist() == [4, 1, 1]
    assert bins["shallow"] == [1, 1, 4]  # any information is enough to be shallow


def test_training_freezes_words_where_it_is_told_to() -> None:
    assert tiny_model("depth_mi").method.stages()[-1].dials == (1.0,)
    assert tiny_model("depth_mi", training_strength=1.5).method.stages()[-1].dials == (1.5,)
    for wrong in (0.0, math.inf, math.nan):
        with pytest.raises(StrettoError, match=rf"Expected training_strength in \(0, ∞\), got {wrong}"):
            tiny_model("depth_mi", training_strength=wrong)


def test_the_dial_goes_from_all_layers_to_the_depth_and_on() -> None:
    depth, n_layers = torch.tensor([1.0, 2.0, 7.0, 12.0]), 12
    for dial, expected in {
        0.0: [12, 12, 12, 12], 0.1: [11, 11, 12, 12], 0.5: [7, 7, 10, 12], 1.0: [1, 2, 7, 12], 2.0: [1, 1, 2, 12],
    }.items():  # fmt: skip
        assert towards(depth, torch.full((4,), dial, dtype=torch.float64), n_layers).tolist() == expected


def test_numbers_are_sorted_into_bins_of_equal_size() -> None:
    edges = bin_edges(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), 3)
    assert torch.bincount(torch.bucketize(torch.arange(6).double(), edges)).tolist() == [2, 2, 2]
    assert len(bin_edges(torch.full((9,), 2.5), 5)) == 1  # numbers that are all the same: one edge


# ---- words -------------------------------------------------------------------------------------------------


def test_pieces_share_the_key_of_their_word() -> None:
    """[CLS] un ##like ##ly un ##like [SEP] un ##like ##ly ? [SEP]: a pair, in whose second text numbers start anew."""
    ids = torch.tensor([[2, 10, 11, 12, 10, 11, 3, 10, 11, 12, 4, 3]])
    word = torch.tensor([[NO_WORD, 0, 0, 0, 1, 1, NO_WORD, 0, 0, 0, UNKNOWN_WORD, NO_WORD]])
    keys = word_keys(ids, word)[0].tolist()
    assert keys[1] == keys[2] == keys[3] == keys[7] == keys[9]
    assert keys[4] == keys[5] and keys[4] != keys[1]
    assert [keys[i] for i in (0, 6, 10, 11)] == [0] * 4
    found = words_in(ids, torch.ones_like(ids), word, torch.tensor([keys]))
    assert found.column.tolist() == [1, 4, 7]
    assert found.pieces[:, :4].tolist() == [[10, 11, 12, -1], [10, 11, -1, -1], [10, 11, 12, -1]]
    turned = word_keys(torch.tensor([[11, 10]]), torch.tensor([[0, 0]]))
    assert int(turned[0, 0]) != keys[4]  # the order of pieces counts


def test_keys_do_not_depend_on_padding_or_neighbours() -> None:
    ids, word = torch.tensor([[2, 7, 8, 3]]), torch.tensor([[-1, 0, 0, -1]])
    alone = word_keys(ids, word)
    padded = word_keys(
        torch.tensor([[5, 6, 7, 8, 9, 9], [2, 7, 8, 3, 0, 0]]), torch.tensor([[0, 1, 2, 3, 4, 4], [-1, 0, 0, -1, 0, 0]])
    )
    assert padded[1, :4].tolist() == alone[0].tolist()


def test_keys_of_a_large_vocabulary_are_different() -> None:
    """All words of two pieces over 1,000 ids."""
    first, second = torch.meshgrid(torch.arange(1000), torch.arange(1000), indexing="ij")
    ids = torch.stack([first.flatten(), second.flatten()], dim=1)
    assert len(word_keys(ids, torch.zeros_like(ids))[:, 0].unique()) == 10**6


def test_a_text_has_a_word_or_has_it_not() -> None:
    ids = torch.tensor([[7, 8, 7, 7], [7, 9, 9, 8]])
    word = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    words = words_in(ids, torch.ones_like(ids), word, word_keys(ids, word))
    once = presence(words)
    assert sorted(zip(words.sequence[once].tolist(), words.pieces[once, 0].tolist(), strict=True)) == [
        (0, 7), (0, 8), (1, 7), (1, 8), (1, 9),
    ]  # fmt: skip


def test_a_tally_adds_up_whenever_it_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = torch.zeros(3, 12, dtype=torch.long)
    results = []
    for pending in (0, 10**6):
        monkeypatch.setattr("stretto.data.words.PENDING", pending)
        tally = Tally(2)
        tally.add(torch.tensor([5, -3, 5]), pieces, torch.tensor([[1, 0], [0, 1], [1, 1]]))
        tally.add(torch.tensor([9, 5, -3]), pieces, torch.tensor([[1, 0], [0, 1], [1, 1]]))
        tally.settle()
        results.append((tally.keys.tolist(), tally.sums.tolist()))
    assert results[0] == results[1] == ([-3, 5, 9], [[1, 2], [2, 2], [1, 0]])


# ---- freezing (Eq. 5) and the head (Eq. 6) -----------------------------------------------------------------


def by_depth(depth: Tensor, inputs: Inputs) -> tuple[Inputs, Scripted]:
    """[B, T] depths -> a batch that carries them, and a method that freezes by them."""
    noted = dataclasses.replace(inputs, notes={"depth": depth})
    return noted, Scripted(lambda state: Decision(freeze=state.input_notes["depth"] < state.layer), "before")


def copied_upwards(engine: ReferenceEngine, inputs: Inputs, depth: Tensor) -> Tensor:
    """Eq. 5 word for word, [B, T, d]: every layer for all, and the old state where n > d(x_t)."""
    backbone, hidden = engine.backbone, engine.embed(inputs)
    bias_of = undisturbed_bias(inputs, hidden)
    for n, spec in enumerate(backbone.specs, start=1):
        attended = backbone.attend(n - 1, hidden, bias_of(spec.attention), inputs.positions)
        updated = backbone.feed_forward(n - 1, attended)
        hidden = torch.where((n <= depth).unsqueeze(-1), updated, hidden)
    return backbone.for_head(hidden)


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("seed", range(3))
def test_any_map_of_depths_copies_states_upwards(model_type: str, seed: int) -> None:
    backbone = tiny_backbone(model_type)
    inputs = random_inputs(LENGTHS, seed, types=uses_types(model_type))
    depth = torch.randint(1, 5, inputs.input_ids.shape, generator=torch.Generator().manual_seed(seed))
    noted, method = by_depth(depth, inputs)
    reference, valid = ReferenceEngine(backbone), inputs.attention_mask.bool()
    with torch.no_grad():
        expected = copied_upwards(reference, inputs, depth)
        for engine in (reference, PackedEngine(backbone)):
            output = engine.run(noted, method, 0.0, keep_hidden=True)
            assert output.hidden is not None
            torch.testing.assert_close(output.hidden[valid], expected[valid], atol=1e-5, rtol=1e-5)
            deepest = torch.where(valid, depth, 0).amax(dim=1)
            assert output.trace.depth.tolist() == deepest.tolist()  # n_max of each sequence, not of the batch
            for n in range(1, 5):
                active = ((depth >= n) & valid).sum(dim=1)
                assert output.trace.n_query[:, n - 1].tolist() == active.tolist()
                assert output.trace.n_ffn[:, n - 1].tolist() == active.tolist()
                keys = torch.where(deepest >= n, inputs.attention_mask.sum(dim=1), 0)
                assert output.trace.n_key[:, n - 1].tolist() == keys.tolist()


def test_a_frozen_token_costs_its_key_and_value_alone() -> None:
    backbone, inputs = tiny_backbone("bert"), random_inputs([8])
    depth = torch.full((1, 8), 1)
    depth[0, 0] = 4
    noted, method = by_depth(depth, inputs)
    executed, output = executed_flops(PackedEngine(backbone), noted, method, 0.0)
    (d, _, f), n = backbone.specs[0].widths, 8
    first = 4 * d * d * n + 2 * d * n * n + 2 * d * f * n
    later = 2 * d * d * n + 2 * d * d + 2 * d * n + 2 * d * f  # keys and values of 8, all else of 1
    assert executed == 2 * (first + 3 * later + backbone.head.macs) == int(flops(output.trace, backbone))


def test_the_pooled_head_by_hand() -> None:
    """Two sequences of 2 and 1 tokens, d = 2: [max; mean], negative numbers become 0."""
    rows = torch.tensor([[1.0, -4.0], [3.0, -2.0], [-1.0, 5.0]])
    state = ragged_state([0.0, 0.0], [0.0], dial=[0.0, 1.0])
    head = PooledHead(2, 1, dropout=0.0, off=0.0)
    pooled = head.pool_rows(rows, state)
    assert pooled.tolist() == [[3.0, 0.0, 2.0, 0.0], [0.0, 5.0, 0.0, 5.0]]
    padded = torch.tensor([[[1.0, -4.0], [3.0, -2.0]], [[-1.0, 5.0], [9.0, 9.0]]])
    assert torch.equal(head.pool_padded(padded, torch.tensor([[1, 1], [1, 0]])), pooled)
    assert torch.equal(head.of_token(rows[2]), head(pooled[1]))
    assert head.answers(state).tolist() == [False, True]
    with torch.no_grad():
        head.classifier.weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))
        head.classifier.bias.fill_(0.5)
        assert head(pooled).tolist() == [[203.5], [5050.5]]


def test_reversed_depths() -> None:
    assert reversed_depths(torch.tensor([1, 4, 3]), 4).tolist() == [4, 1, 2]
    assert reversed_depths(torch.tensor([4, 4]), 4).tolist() == [4, 4]  # nothing tells these words apart


def test_the_pooled_head_answers_when_the_dial_is_on() -> None:
    """Each sequence by its own dial, from the states of all its tokens at n_max."""
    model = tiny_model("depth_mi")
    inputs = random_inputs(LENGTHS)
    on, off = model.run(inputs, 1.0), model.run(inputs, 0.0)
    dials = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    mixed = model.run(inputs, dials)
    expected = torch.where(dials.bool().unsqueeze(1), on.logits, off.logits)
    torch.testing.assert_close(mixed.logits, expected, atol=1e-5, rtol=1e-5)
    head = model.method.own_head()
    with torch.no_grad():
        hidden = copied_upwards(model.reference, inputs, depths_of(model, inputs, 1.0))
        answers = head(head.pool_padded(hidden, inputs.attention_mask))
    torch.testing.assert_close(answers, on.logits, atol=1e-5, rtol=1e-5)


def depths_of(model: Any, inputs: Inputs, dial: float) -> Tensor:
    """[B, T] what the table says, token by token; 4 for what it does not have."""
    table, found = model.method.table, torch.full(inputs.input_ids.shape, 4)
    known = dict(zip(table.keys.tolist(), model.method.table_depths(dial).tolist(), strict=True))
    for cell in inputs.attention_mask.nonzero().tolist():
        found[tuple(cell)] = known.get(int(inputs.notes["word_key"][tuple(cell)]), 4)
    if model.method.config.special == "deepest":
        special = inputs.attention_mask.bool() & (inputs.notes["word"] == NO_WORD)
        deepest = torch.where(inputs.attention_mask.bool() & ~special, found, 0).amax(dim=1, keepdim=True)
        found = torch.where(special, torch.where(deepest == 0, 4, deepest), found)
    return found


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].reads_words])
def test_special_tokens_may_go_as_deep_as_the_deepest_word(name: str) -> None:
    backbone = tiny_backbone("bert")
    shape, task = Shape(backbone.d, 4, backbone.n_labels), Classification(["a", "b", "c"])
    inputs, depth = random_inputs([2, 3, 1, 12, 2, 3, 2]), None
    for special in ("full", "deepest"):
        method = give_table(METHODS[name](METHODS[name].Config(special=special), shape, task)).eval()
        output = PackedEngine(backbone).run(inputs, method, method.dial.sweep[-1])
        if special == "full":
            assert output.trace.depth.tolist() == [4] * 7
            model = tiny_model(name)
            depth = depths_of(model, inputs, method.dial.sweep[-1])
        else:
            assert depth is not None
            words = torch.where(inputs.attention_mask.bool() & (inputs.notes["word"] >= 0), depth, 0).amax(dim=1)
            words[2] = 4  # the sequence without a word
            assert output.trace.depth.tolist() == words.tolist()
            assert int(words.min()) < 4
