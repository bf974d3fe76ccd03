"""Depth by reconstruction and by token halting: masks, losses and oracles on small cases, checked by hand."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from scripted import ragged_state
from tiny import BACKBONE_CLASSES, random_inputs, tiny_encoder, tiny_model, tiny_reviews, uses_types
from torch import Tensor

from stretto.data.words import word_keys
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.methods import Targets, TrainingBatch
from stretto.methods.depth_reconstruction import reconstruction_depth
from stretto.methods.halting import oracle_depth
from stretto.methods.reconstruction import (
    NO_TARGET,
    AnytimeLM,
    choose_words,
    first_texts,
    in_groups,
    masked,
    masked_losses,
    occurrence_losses,
    tally_losses,
    word_losses,
    word_numbers,
)  # fmt: skip
from stretto.state import Inputs

MASK = 1


def language_model(model_type: str = "bert") -> AnytimeLM:
    torch.manual_seed(5)
    model = AnytimeLM(copy.deepcopy(tiny_encoder(model_type)), MASK).eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.normal_(std=0.3)
    return model


def pieces(types: bool = True) -> Inputs:
    """Two sequences: [CLS] aa b aa [SEP], [CLS] b [SEP] and padding, where aa is a word of two pieces."""
    ids = torch.tensor([[2, 7, 8, 9, 7, 8, 3], [2, 9, 3, 0, 0, 0, 0]])
    word = torch.tensor([[-1, 0, 0, 1, 2, 2, -1], [-1, 0, -1, 0, 0, 0, 0]])
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    token_types = torch.zeros_like(ids) if types else None
    return Inputs(ids, mask, token_types, notes={"word": word, "word_key": word_keys(ids, word)})


# ---- the depth ---------------------------------------------------------------------------------------------


def test_the_penalty_counts_against_depth() -> None:
    """Losses 3, 2, 1.8, 1.75: the second layer gains 1, the third 0.2, the fourth 0.05."""
    losses = torch.tensor([3.0, 2.0, 1.8, 1.75])
    assert [int(reconstruction_depth(losses, penalty)) for penalty in (0.0, 0.1, 0.3, 1.1)] == [4, 3, 2, 1]
    assert int(reconstruction_depth(torch.tensor([2.0, 2.0, 2.0]), 0.0)) == 1  # nothing is gained
    assert reconstruction_depth(losses.repeat(2, 1), torch.tensor([0.1, 1.1])).tolist() == [3, 1]


def test_depths_fall_with_the_penalty() -> None:
    losses = torch.rand(500, 12, generator=torch.Generator().manual_seed(0))
    depths = [reconstruction_depth(losses, penalty) for penalty in (0.0, 0.01, 0.05, 0.1, 0.2, 1.0)]
    for deeper, shallower in itertools.pairwise(depths):
        assert (shallower <= deeper).all()
    assert (depths[-1] == 1).all() and depths[0].double().mean() > 6


# ---- masks -------------------------------------------------------------------------------------------------


def test_words_are_numbered_and_masked_whole() -> None:
    inputs = pieces()
    number = word_numbers(inputs)
    assert number.tolist() == [[-1, 0, 0, 1, 2, 2, -1], [-1, 0, -1, -1, -1, -1, -1]]
    torch.manual_seed(0)
    drawn = [choose_words(number, 0.3) for _ in range(200)]
    for chosen in drawn:
        assert bool(chosen[0, 1]) == bool(chosen[0, 2]) and bool(chosen[0, 4]) == bool(chosen[0, 5])
        assert chosen.any(dim=1).all()  # at least one of each sequence
        assert not chosen[number < 0].any()
    share = torch.stack(drawn)[:, 0, [1, 3, 4]].double().mean()
    assert 0.3 < float(share) < 0.6  # 0.3, and what is added where nothing was drawn
    hidden = number == 0
    copies = masked(inputs, hidden, MASK)
    assert copies.input_ids.tolist() == [[2, MASK, MASK, 9, 7, 8, 3], [2, MASK, 3, 0, 0, 0, 0]]
    assert copies.notes["target"].tolist() == [[-1, 7, 8, -1, -1, -1, -1], [-1, 9, -1, -1, -1, -1, -1]]
    nothing = choose_words(torch.full((2, 3), -1), 0.5)
    assert not nothing.any()


def test_every_word_is_in_one_group() -> None:
    number = torch.arange(20).view(1, 20) - 1
    group = in_groups(number, 0.15)
    assert int(group[0, 0]) == -1
    assert torch.bincount(group[0, 1:]).tolist() == [3, 3, 3, 3, 3, 2, 2]
    assert in_groups(number, 1.0).max() == 0


# ---- losses ------------------------------------------------------------------------------------------------


def reference_losses(model: AnytimeLM, inputs: Inputs, hidden: Tensor) -> Tensor:
    """[L, masked tokens], from the reference engine."""
    target = inputs.input_ids[hidden]
    engine = ReferenceEngine(model.backbone)
    states = engine.as_heads_read(engine.hidden_states(masked(inputs, hidden, model.mask_id)))
    return torch.stack([model.head.losses(state[hidden], target, model.embedding) for state in states])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model_type", BACKBONE_CLASSES)
def test_each_word_in_turn_on_the_packed_engine(model_type: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.methods.reconstruction.COPIES", 3)  # several batches of copies
    model, inputs = language_model(model_type), random_inputs([6, 1, 4], side=side, types=uses_types(model_type))
    number = word_numbers(inputs)
    found = masked_losses(model, PackedEngine(model.backbone), inputs, number)
    assert (found[number < 0] == 0).all()
    with torch.no_grad():
        for row, column in (number >= 0).nonzero().tolist():
            hidden = torch.zeros_like(number, dtype=torch.bool)
            hidden[row, column] = True
            expected = reference_losses(model, inputs, hidden)[:, 0]
            torch.testing.assert_close(found[row, column], expected, atol=1e-4, rtol=1e-4)


def test_pieces_are_masked_together_and_share_their_mean() -> None:
    model, inputs = language_model(), pieces()
    number = word_numbers(inputs)
    raw, shared = masked_losses(model, PackedEngine(model.backbone), inputs, number), occurrence_losses(model, inputs)
    with torch.no_grad():
        expected = reference_losses(model, inputs, number == 2)  # the second aa, alone
    torch.testing.assert_close(raw[0, 4:6], expected.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shared[0, 4], expected.mean(dim=1), atol=1e-4, rtol=1e-4)
    assert torch.equal(shared[0, 4], shared[0, 5]) and torch.equal(shared[0, 3], raw[0, 3])
    assert not torch.equal(shared[0, 1], shared[0, 4])  # the same word in another place


def test_word_losses_by_hand() -> None:
    losses = torch.tensor([[[9.0], [1.0], [3.0], [5.0]]])
    assert word_losses(losses, torch.tensor([[-1, 0, 0, 1]]))[0, 1:, 0].tolist() == [2.0, 2.0, 5.0]


def test_a_tally_averages_over_occurrences() -> None:
    model, inputs = language_model(), pieces()
    tally = tally_losses(model, [inputs, inputs], share=0.5)  # words 0 and 2 together, then word 1
    number = word_numbers(inputs)
    expected = word_losses(
        masked_losses(model, PackedEngine(model.backbone), inputs, number % 2 - 2 * (number < 0)), number
    )
    of_aa = 2 * (expected[0, 1] + expected[0, 4])
    of_b = 2 * (expected[0, 3] + expected[1, 1])
    sums = dict(zip(tally.keys.tolist(), tally.sums, strict=True))
    for column, wanted in ((1, of_aa), (3, of_b)):
        found = sums[int(inputs.notes["word_key"][0, column])]
        torch.testing.assert_close(found[:-1], wanted.double(), atol=1e-4, rtol=1e-4)
        assert int(found[-1]) == 4


def test_texts_without_words_have_no_losses() -> None:
    model, ids = language_model(), torch.tensor([[2, 3], [2, 3]])
    word = torch.full_like(ids, -1)
    inputs = Inputs(ids, torch.ones_like(ids), notes={"word": word, "word_key": word_keys(ids, word)})
    assert (occurrence_losses(model, inputs) == 0).all()
    assert len(tally_losses(model, [inputs], 0.15).keys) == 0
    loss = model(masked(inputs, choose_words(word_numbers(inputs), 0.15), MASK))
    assert loss.item() == 0.0
    loss.backward()


def test_the_loss_is_summed_over_layers() -> None:
    model, inputs = language_model(), random_inputs([6, 4])
    hidden = word_numbers(inputs) == 2
    batch = masked(inputs, hidden, MASK)
    assert (batch.notes["target"] != NO_TARGET).sum() == 2
    loss = model(batch)
    expected = reference_losses(model, inputs, hidden).mean(dim=1).sum()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.embedding.grad is not None and model.head.bias.grad is not None
    assert model.backbone.specs[3].attention.query.weight.grad is not None


def test_whole_batches_until_there_are_enough_texts() -> None:
    batches = [(random_inputs([3, 4]), torch.zeros(2)) for _ in range(5)]
    assert [len(list(first_texts(batches, count))) for count in (0, 1, 3, 4, 99)] == [5, 1, 2, 2, 5]


# ---- token halting -----------------------------------------------------------------------------------------


def test_tokens_are_asked_alone() -> None:
    """Two layers, two tokens: the first answers right from layer 1 on, the second from layer 2 on, if anywhere."""
    method = tiny_model("token_halting").method
    with torch.no_grad():
        method.pooled_head.classifier.weight.zero_()
        method.pooled_head.classifier.bias.copy_(torch.tensor([0.1, 0.0]))
        method.pooled_head.classifier.weight[1, 0] = 1.0  # the first unit speaks for label 1, else it is label 0
    states = torch.zeros(2, 1, 2, 32)
    states[0, 0, 0, 0] = states[1, 0, 0, 0] = states[1, 0, 1, 0] = 1.0
    right = method.correct_tokens(method.pooled_head, list(states), torch.tensor([1]))
    assert right.tolist() == [[[True, False]], [[True, True]]]
    assert oracle_depth(right[:, 0], 0.05).tolist() == [1, 2]


def test_the_oracle_of_tokens_comes_from_heads_that_have_not_seen_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("token_halting", folds=2)
    sure = []
    for label in (0, 1):  # the head for the texts of fold 0 always says 0, that for fold 1 always 1
        head = copy.deepcopy(model.method.pooled_head)
        with torch.no_grad():
            head.classifier.weight.zero_()
            head.classifier.bias.copy_(torch.tensor([1.0 - label, float(label)]))
        sure.append(head)
    monkeypatch.setattr("stretto.methods.token_halting.held_out", lambda *_: sure)
    inputs, labels = random_inputs([3, 5, 4]), torch.tensor([0, 0, 0])
    noted = model.method.note_oracle(model.reference, [(inputs, labels)])["oracle"]
    assert [each.tolist() for each in noted] == [[1] * 3, [4] * 5, [1] * 4]  # always right; never; always


def test_only_those_who_are_asked_pay() -> None:
    method = tiny_model("token_halting").method
    state = ragged_state([0.0] * 3, [0.0] * 2, dial=[0.5, 1.0], layer=2)
    state = dataclasses.replace(state, rows=torch.randn(5, 32), point="before")
    depth = method.depths(state)
    assert depth[3:].tolist() == [4, 4]
    assert state.decider_macs.tolist() == [3 * 32 * 4, 0]


def test_halting_learns_from_both_terms() -> None:
    model = tiny_model("token_halting").train()
    data = tiny_reviews(8)
    encoded = model.encode(data.texts)
    from stretto.data.tokenise import as_inputs, collate

    inputs, labels = as_inputs(collate(0)(encoded.features)), torch.tensor(data.labels)
    seen: list[Any] = []

    def run(dial: Tensor, skip: tuple[int, ...] = ()) -> Any:
        seen.append(dial)
        return model.reference.run(inputs, model.method, dial)

    batch = TrainingBatch(inputs, Targets(labels), run, 0, 0.0, model.reference)
    _, anytime, halting = model.method.stages()
    for stage, trained in ((anytime, "pooled_head.classifier.weight"), (halting, "predictor.weight")):
        model.zero_grad()
        stage.objective(batch).backward()
        gradients = dict(model.method.named_parameters())
        assert gradients[trained].grad is not None and bool(gradients[trained].grad.any())
        assert model.backbone.specs[0].attention.query.weight.grad is not None
    assert len(seen) == 1 and seen[0].shape == (8,) and len(set(seen[0].tolist())) > 3
