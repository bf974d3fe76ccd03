"""reference == packed == Hugging Face, for every backbone and any decisions."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from executed import CPU_FORMULAS, assert_same, executed_flops, padding_up_to, short_up_to, small_parts
from hypothesis import given, settings
from hypothesis import strategies as st
from random_decisions import CHANCES, Chances, method_for, rows_of
from tiny import ARCHITECTURES, STACKS, random_inputs, tiny_backbone, tiny_config, tiny_encoder, uses_types
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

from stretto.backbones import Backbone, backbone_for
from stretto.engine.cost import flops
from stretto.engine.groups import MOST_PADDING, SHORT, groups
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.state import Inputs, Output


def protecting(inputs: Inputs, positions: frozenset[int]) -> Inputs:
    """The same batch with a protect-set: these positions of every sequence."""
    protected = torch.isin(inputs.positions, torch.tensor(sorted(positions), dtype=torch.long))
    return dataclasses.replace(inputs, protected=protected & inputs.attention_mask.bool())


def part(output: Output, index: int) -> Output:
    trace = type(output.trace)(**{name: value[index : index + 1] for name, value in vars(output.trace).items()})
    hidden = None if output.hidden is None else output.hidden[index : index + 1]
    return Output(output.logits[index : index + 1], trace, hidden)


@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "patchwork"])
def test_every_layer_equals_hugging_face(model_type: str) -> None:
    backbone = tiny_backbone(model_type)
    inputs = random_inputs([9, 5, 1, 12, 5], types=uses_types(model_type))
    arguments = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    if inputs.token_type_ids is not None:
        arguments["token_type_ids"] = inputs.token_type_ids
    with torch.no_grad():
        expected = backbone.model(**arguments, output_hidden_states=True)
        ours = ReferenceEngine(backbone).hidden_states(inputs)
    valid = inputs.attention_mask.bool()
    assert len(ours) == backbone.n_layers + 1 == len(expected.hidden_states)
    for mine, theirs in zip(ours, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[valid], theirs[valid], atol=1e-5, rtol=1e-5)
    nothing = method_for(backbone, Chances(), 0, list(range(5)))
    for engine in (ReferenceEngine(backbone), PackedEngine(backbone)):
        with torch.no_grad():
            output = engine.run(inputs, nothing, 0.0, keep_hidden=True)
        torch.testing.assert_close(output.logits, expected.logits, atol=1e-5, rtol=1e-5)
        assert output.hidden is not None
        torch.testing.assert_close(output.hidden[valid], expected.hidden_states[-1][valid], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", STACKS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    chances=CHANCES, seed=st.integers(0, 99), lengths=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    padding=st.sampled_from([MOST_PADDING, 1e6]), short=st.sampled_from([SHORT, 4]),
    hidden=st.booleans(),
)  # fmt: skip
def test_random_decisions(
    model_type: str, chances: Chances, seed: int, lengths: list[int], padding: float, short: int, hidden: bool
) -> None:
    """reference == packed; alone == in batch == in parts; order and padding do not matter, inside the engine or out."""
    with padding_up_to(padding), short_up_to(short):
        check_random_decisions(model_type, chances, seed, lengths, hidden)


def check_random_decisions(model_type: str, chances: Chances, seed: int, lengths: list[int], hidden: bool) -> None:
    """With `hidden` states all rows of the last layer are computed, without only those that the head reads."""
    backbone = tiny_backbone(model_type)
    packed, reference = PackedEngine(backbone), ReferenceEngine(backbone)
    names = list(range(len(lengths)))
    inputs = protecting(random_inputs(lengths, seed, types=uses_types(model_type)), chances.protect)
    with torch.no_grad():
        expected = reference.run(inputs, method_for(backbone, chances, seed, names), 0.0, keep_hidden=hidden)
        got = packed.run(inputs, method_for(backbone, chances, seed, names), 0.0, keep_hidden=hidden)
        assert_same(got, expected)

        left = random_inputs(lengths, seed, side="left", types=uses_types(model_type))
        left = protecting(left, chances.protect)
        for engine in (packed, reference):
            assert_same(engine.run(left, method_for(backbone, chances, seed, names), 0.0, keep_hidden=hidden), expected)

        for size in (1, 2):
            method = method_for(backbone, chances, seed, names)
            with small_parts():
                assert_same(packed.run(inputs, method, 0.0, batch_size=size, keep_hidden=hidden), expected)

        order = names[::-1]
        turned = packed.run(rows_of(inputs, order), method_for(backbone, chances, seed, order), 0.0, keep_hidden=hidden)
        for index, name in enumerate(order):
            assert_same(part(turned, index), part(expected, name))

        for name in names:
            alone = packed.run(
                rows_of(inputs, [name]), method_for(backbone, chances, seed, [name]), 0.0, keep_hidden=hidden
            )
            assert_same(alone, part(expected, name))


@pytest.mark.parametrize("seed", range(3))
def test_rows_follow_sequences_that_change_their_order(seed: int) -> None:
    """After a drop the shortest come first again: of lengths so near that is another order."""
    check_random_decisions("bert", Chances(drop_before=0.5), seed, [9, 10, 11, 12], hidden=True)


@pytest.mark.parametrize(
    "chances",
    [
        Chances(drop_before=0.3),
        Chances(freeze=0.3),
        Chances(drop_between=0.3),
        Chances(drop_between=0.9, by_attention=True),
        Chances(drop_between=0.0, by_attention=True),
        Chances(exit=0.4),
        Chances(gate=True),
        Chances(drop_before=0.2, freeze=0.2, drop_between=0.2, exit=0.2),
    ],
)
@pytest.mark.parametrize(("model_type", "short"), [("bert", SHORT), ("patchwork", SHORT), ("patchwork", 4)])
def test_the_ledger_counts_what_every_verb_executes(model_type: str, short: int, chances: Chances) -> None:
    backbone = tiny_backbone(model_type)
    lengths = [9, 5, 30, 5, 17]
    method = method_for(backbone, chances, 4, list(range(len(lengths))))
    inputs = random_inputs(lengths, types=uses_types(model_type))
    with short_up_to(short):
        executed, output = executed_flops(PackedEngine(backbone), inputs, method, 0.0)
    assert executed == pytest.approx(int(flops(output.trace, backbone).sum()), rel=0.01)
    assert bool(output.trace.skipped.any()) == (short == 4)


@pytest.mark.parametrize("model_type", STACKS)
def test_products_are_counted_as_torch_counts_them(model_type: str) -> None:
    backbone = tiny_backbone(model_type)
    method = method_for(backbone, Chances(drop_before=0.2, freeze=0.2, drop_between=0.2, exit=0.2), 4, [0, 1, 2])
    inputs, engine = random_inputs([9, 5, 30], types=uses_types(model_type)), PackedEngine(backbone)
    with short_up_to(4), FlopCounterMode(display=False, custom_mapping=CPU_FORMULAS) as counter:
        executed, _ = executed_flops(engine, inputs, method, 0.0)
    assert counter.get_total_flops() == executed > 0


def wide_backbone(relative: bool) -> Backbone:
    config = tiny_config("alberta" if relative else "bert", n_layers=2)
    config.update({"hidden_size": 256, "intermediate_size": 1024, "max_relative_distance": 32})
    return backbone_for(AutoModelForSequenceClassification.from_config(config).eval())


@pytest.mark.parametrize("chances", [Chances(), Chances(freeze=0.3), Chances(drop_between=0.95), Chances(exit=0.3)])
@pytest.mark.parametrize("relative", [False, True])
def test_the_ledger_still_holds_where_attention_is_padded(relative: bool, chances: Chances) -> None:
    """Wide enough for padding to be worth it, with tables of relative terms that are long for their width."""
    backbone = wide_backbone(relative)
    lengths = list(range(8, 24))
    method = method_for(backbone, chances, 4, list(range(len(lengths))))
    inputs, engine = random_inputs(lengths), PackedEngine(backbone)
    assert len(groups(engine.layers[0].shape, tuple(lengths), tuple(lengths), True, torch.device("cpu"))) < len(lengths)
    executed, output = executed_flops(engine, inputs, method, 0.0)
    assert executed == pytest.approx(int(flops(output.trace, backbone).sum()), rel=0.01)


def test_padded_attention_in_double_precision() -> None:
    backbone = backbone_for(copy.deepcopy(tiny_encoder("bert")).double())
    inputs, method = random_inputs([5, 7, 9]), method_for(backbone, Chances(), 0, [0, 1, 2])
    method.exits.double()
    with padding_up_to(1e6), torch.no_grad():
        got = PackedEngine(backbone).run(inputs, method, 0.0)
        torch.testing.assert_close(got.logits, ReferenceEngine(backbone).run(inputs, method, 0.0).logits)


@pytest.mark.parametrize("point", ["before", "between"])
@pytest.mark.parametrize("restore", [False, True])
def test_dropping_everything_but_the_protected(point: str, restore: bool) -> None:
    backbone = tiny_backbone("bert")
    chances = Chances(**{f"drop_{point}": 1.0}, restore=restore)
    inputs = protecting(random_inputs([7, 1, 4]), frozenset({3}))
    output = PackedEngine(backbone).run(inputs, method_for(backbone, chances, 0, [0, 1, 2]), 0.0, keep_hidden=True)
    assert output.trace.n_ffn.tolist() == [[2] * 4, [1] * 4, [2] * 4]
    assert output.hidden is not None
    assert output.hidden[0, [0, 3]].any(dim=1).all()
    assert bool(output.hidden[0, [1, 2, 4, 5, 6]].any()) == restore


def test_a_batch_that_has_left_stops() -> None:
    backbone = tiny_backbone("bert")
    inputs = random_inputs([7, 3])
    output = PackedEngine(backbone).run(inputs, method_for(backbone, Chances(exit=1.0), 0, [0, 1]), 0.0)
    assert output.trace.depth.tolist() == [1, 1]
    assert output.trace.n_query[:, 1:].sum() == 0


def test_position_zero_survives_any_decision() -> None:
    backbone = tiny_backbone("bert")
    output = PackedEngine(backbone).run(
        random_inputs([6]), method_for(backbone, Chances(drop_before=1.0, drop_between=1.0), 0, [0]), 0.0
    )
    assert output.trace.n_key.tolist() == [[1, 1, 1, 1]]


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, inputs = tiny_backbone("bert"), random_inputs([9, 30, 17, 5])
    method = method_for(backbone, Chances(drop_between=0.3, exit=0.2, gate=True), 4, list(range(4)))
    whole = PackedEngine(backbone).run(inputs, method, 0.0, keep_hidden=True)
    monkeypatch.setattr("stretto.engine.layer.CHUNK_ROWS", 16)
    assert_same(PackedEngine(backbone).run(inputs, method, 0.0, keep_hidden=True), whole)


@pytest.mark.parametrize(
    ("mask", "answer"),
    [
        ([[1, 1, 1], [0, 0, 0]], "a sequence that is all padding"),
        ([[1, 1, 1], [1, 0, 1]], "an attention_mask with a hole"),
    ],
)
def test_masks_that_are_none(mask: list[list[int]], answer: str) -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(StrettoError, match=answer):
        Inputs(ids, torch.tensor(mask))


def test_a_mask_may_be_true_and_false() -> None:
    backbone, inputs = tiny_backbone("bert"), random_inputs([5, 3], side="left")
    same = Inputs(inputs.input_ids, inputs.attention_mask.bool(), inputs.token_type_ids)
    method = method_for(backbone, Chances(), 0, [0, 1])
    assert_same(PackedEngine(backbone).run(same, method, 0.0), PackedEngine(backbone).run(inputs, method, 0.0))
