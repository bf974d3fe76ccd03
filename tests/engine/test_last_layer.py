"""The last layer updates only the row that the head reads, where nobody reads the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executed import assert_same, executed_flops, short_up_to
from scripted import Scripted
from tiny import STACKS, make, random_inputs, tiny_backbone, tiny_config, uses_types
from tiny_seq2seq import tiny_seq2seq
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from stretto.backbones import Backbone, backbone_for
from stretto.backbones.heads import MeanOfRows
from stretto.engine.cost import Cost, flops, full_flops
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import record, replay
from stretto.engine.stepping import Stepping
from stretto.state import Decision, Inputs, State

LENGTHS = [9, 5, 1, 12, 5]
ENGINES = [PackedEngine, ReferenceEngine]


def batch(model_type: str = "bert") -> Inputs:
    return random_inputs(LENGTHS, types=uses_types(model_type))


def saved_by_hand(n: int, backbone: Backbone) -> int:
    """FLOPs of n - 1 rows of the last layer: query, output and FFN; scores and weighted sums with n keys each."""
    spec = backbone.specs[-1]
    attention, ffn = spec.attention, spec.ffn
    weights = attention.query.weight.numel() + attention.output.weight.numel() + ffn.out.weight.numel()
    weights += sum(linear.weight.numel() for linear in ffn.inputs)
    if attention.relative is not None:
        weights += attention.width * attention.relative.rows
    return 2 * (n - 1) * (weights + 2 * n * attention.width)


def updated_in_the_last_layer(backbone: Backbone, decider: Any = None, dial: float | Tensor = 0.0) -> list[int]:
    trace = PackedEngine(backbone).run(batch(), decider or Silent(), dial).trace
    assert torch.equal(trace.n_query[:, -1], trace.n_ffn[:, -1])
    assert trace.n_key[:, -1].tolist() == LENGTHS
    return trace.n_ffn[:, -1].tolist()


@pytest.mark.parametrize("model_type", STACKS)
def test_the_full_model_saves_what_the_formula_says(model_type: str) -> None:
    backbone, inputs = tiny_backbone(model_type), batch(model_type)
    executed, output = executed_flops(PackedEngine(backbone), inputs, Silent(), 0.0)
    counted = flops(output.trace, backbone)
    assert executed == pytest.approx(int(counted.sum()), rel=0.001)  # attention pads a little
    every = full_flops(output.trace.lengths, backbone, every_row=True)
    assert (every - counted).tolist() == [saved_by_hand(n, backbone) for n in LENGTHS]
    assert Cost.of(output.trace, backbone).per_sequence.tolist() == [1.0] * len(LENGTHS)
    for engine in ENGINES:  # the same answers as with all rows, which hidden states need
        with torch.no_grad():
            whole = engine(backbone).run(inputs, Silent(), 0.0, keep_hidden=True)
            assert_same(engine(backbone).run(inputs, Silent(), 0.0), output)
        assert torch.equal(flops(whole.trace, backbone), every)
        torch.testing.assert_close(output.logits, whole.logits, atol=1e-5, rtol=1e-5)


def test_twelve_layers_save_seven_percent() -> None:
    """d = 384, f = 4 d: of all rows but one 10 of the 12 d² of one layer of twelve, and their scores and sums."""
    config = tiny_config("bert", n_layers=12)
    config.update({"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536})
    with torch.device("meta"):
        backbone = backbone_for(AutoModelForSequenceClassification.from_config(config))
    for n in (30, 60, 120):
        expected = (n - 1) / n * (10 * 384 + 2 * n) / (12 * 384 + 2 * n) / 12
        whole, short = (float(full_flops(torch.tensor([n]), backbone, every_row=every)) for every in (True, False))
        assert 1 - short / whole == pytest.approx(expected, rel=0.01)  # the head takes the rest
        assert 0.065 < expected < 0.072


def test_a_local_window_in_the_last_layer() -> None:
    """Long sequences are compared in stretches: the only query sees its window, and the replay counts the same."""
    backbone, inputs = tiny_backbone("patchwork", n_layers=3), batch("patchwork")
    assert backbone.specs[-1].attention.window is not None
    method = make("deebert", backbone)
    with short_up_to(4), torch.no_grad():
        executed, output = executed_flops(PackedEngine(backbone), inputs, method, 0.0)
        assert_same(output, ReferenceEngine(backbone).run(inputs, method, 0.0))
        assert_same(output, replay(backbone, method, record(PackedEngine(backbone), method.exits, [inputs]), 0.0))
    assert executed == pytest.approx(int(flops(output.trace, backbone).sum()), rel=0.01)
    assert output.trace.skipped[0, -1] > 0 and output.trace.n_query[0, -1] == 1


def test_a_head_that_reads_the_mean_saves_nothing() -> None:
    backbone = tiny_backbone("bert")
    backbone.head = MeanOfRows(backbone.classify, backbone.head_modules())
    assert updated_in_the_last_layer(backbone) == LENGTHS
    lengths = torch.tensor(LENGTHS)
    assert torch.equal(full_flops(lengths, backbone), full_flops(lengths, backbone, every_row=True))


@pytest.mark.parametrize("head", ["TokenClassification", "QuestionAnswering"])
def test_tasks_that_answer_every_token_save_nothing(head: str) -> None:
    backbone = tiny_backbone("bert", 2, head=head)
    assert updated_in_the_last_layer(backbone) == LENGTHS


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_an_encoder_with_a_decoder_saves_nothing(family: str) -> None:
    backbone, lengths = backbone_for(tiny_seq2seq(family)), torch.tensor(LENGTHS)
    assert torch.equal(full_flops(lengths, backbone), full_flops(lengths, backbone, every_row=True))


def test_a_head_of_the_method_gets_all_rows_of_the_sequences_it_answers() -> None:
    backbone = tiny_backbone("bert")
    method = make("depth_mi", backbone)
    off, on = method.dial.off, method.dial.sweep[1]

    def nothing(state: State) -> None:
        return None

    decider = Scripted(nothing, "before")
    decider.own_head = method.own_head  # type: ignore[method-assign]
    dials = torch.tensor([on, off, on, on, off])
    assert updated_in_the_last_layer(backbone, decider, dials) == [9, 1, 1, 12, 1]
    assert updated_in_the_last_layer(backbone, decider, off) == [1] * 5
    with torch.no_grad():
        assert_same(
            PackedEngine(backbone).run(batch(), decider, dials), ReferenceEngine(backbone).run(batch(), decider, dials)
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_first_row_is_answered_without_the_last_layer(engine: Any) -> None:
    """Nothing that is read would change. Hidden states, if asked for, still need that layer."""
    backbone = tiny_backbone("bert")

    def freeze(state: State) -> Decision:
        return Decision(freeze=(state.position == 0) & (state.ids[state.sequence] == 3) & (state.layer == 3))

    decider = Scripted(freeze, "before")
    with torch.no_grad():
        output = engine(backbone).run(batch(), decider, 0.0)
        whole = engine(backbone).run(batch(), decider, 0.0, keep_hidden=True)
    assert output.trace.depth.tolist() == [4, 4, 4, 3, 4]
    assert output.trace.n_key[:, -1].tolist() == [9, 5, 1, 0, 5]
    assert whole.trace.n_ffn[3, -1] == 11
    torch.testing.assert_close(output.logits, whole.logits, atol=1e-5, rtol=1e-5)


def test_drops_in_the_last_layer_change_no_answer() -> None:
    """Deciders are still asked there, and see the attention that the row paid which is read."""
    backbone, seen = tiny_backbone("bert"), []

    def drop(state: State) -> Decision | None:
        if state.layer < 4:
            return None
        seen.append(state.attention_received)
        return Decision(drop=state.position % 2 == 1)

    output = PackedEngine(backbone).run(batch(), Scripted(drop, "between"), 0.0)
    full = PackedEngine(backbone).run(batch(), Silent(), 0.0)
    assert_same(output, full)
    assert seen[0].sum().item() == pytest.approx(4 * len(LENGTHS))  # 4 heads, one query each


def test_step_by_step_only_the_last_step_is_short() -> None:
    backbone = tiny_backbone("bert")
    stepping = Stepping(PackedEngine(backbone), Silent())
    stepping.add(batch(), 0.0)
    for _ in range(2):
        assert stepping.step() == []
    stepping.add(batch(), 0.0)
    counts = []
    while len(stepping):
        counts += [finished.trace.n_ffn.squeeze(0).tolist() for finished in stepping.step()]
    assert sorted(counts) == sorted([n, n, n, 1] for n in LENGTHS * 2)
