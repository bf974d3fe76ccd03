"""What only some layers have, on a stack that has all of it: rotary positions, windows, tables, a last norm.

That its layers equal its own forward, that the engines agree for any decisions, and that the ledger counts what is
executed is in `test_engines.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted import Scripted
from tiny import random_inputs, tiny_backbone, tiny_encoder
from torch import Tensor, nn

from stretto.backbones import AttentionSpec, FeedForwardSpec, LayerSpec, RelativeTerms
from stretto.engine.cost import flops, full_flops, layer_macs
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import record, replay
from stretto.methods import METHODS, Shape, Targets
from stretto.state import Decision, Inputs, State
from stretto.tasks import Classification
from stretto.training.learner import Learner

LENGTHS = [9, 5, 1, 12, 5]
ENGINES = [ReferenceEngine, PackedEngine]


def batch(side: str = "right") -> Inputs:
    return random_inputs(LENGTHS, types=False, side=side)


def own_forward(inputs: Inputs, head: str = "SequenceClassification") -> Any:
    with torch.no_grad():
        return tiny_encoder("patchwork", head=head)(inputs.input_ids, inputs.attention_mask)


def test_relative_scores_by_hand() -> None:
    """One head of width 1, distances cut off at 1: positions 0 and 4 are as far apart as 3 and 4."""
    terms = RelativeTerms(torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([[0.1], [0.2], [0.3]]))
    q, k = torch.tensor([2.0, 3.0, 4.0]).view(1, 1, 3, 1), torch.tensor([5.0, 6.0, 7.0]).view(1, 1, 3, 1)
    position = torch.tensor([[0, 3, 4]])
    expected = [
        [2 * 10 + 5 * 0.2, 2 * 100 + 6 * 0.3, 2 * 100 + 7 * 0.3],
        [3 * 1 + 5 * 0.1, 3 * 10 + 6 * 0.2, 3 * 100 + 7 * 0.3],
        [4 * 1 + 5 * 0.1, 4 * 1 + 6 * 0.1, 4 * 10 + 7 * 0.2],
    ]
    found = terms.scores(q, k, position, position)
    torch.testing.assert_close(found[0, 0], torch.tensor(expected))
    last = terms.scores(q[:, :, 2:], k, position[:, 2:], position)  # fewer queries than keys
    torch.testing.assert_close(last[0, 0, 0], torch.tensor(expected[2]))


@pytest.mark.parametrize("engine_class", ENGINES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_attention_received_counts_all_that_positions_add(engine_class: Any, side: str) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def look(state: State) -> None:
        if state.layer == 2:
            seen.append((state.attention_received, state.ids[state.sequence]))

    own, states = tiny_encoder("patchwork").base_model, own_forward(batch()).hidden_states
    with torch.no_grad():
        engine_class(tiny_backbone("patchwork")).run(batch(side), Scripted(look, "between"), 0.0)
        for index, length in enumerate(LENGTHS):
            probabilities, _ = own.layers[1].attention(states[1][index, :length], own.bias.weight)
            ((received, owner),) = seen
            torch.testing.assert_close(received[owner == index], probabilities.sum(dim=(0, 1)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine_class", ENGINES)
def test_every_token_is_answered_behind_the_final_norm(engine_class: Any) -> None:
    backbone = tiny_backbone("patchwork", head="TokenClassification")
    expected, valid = own_forward(batch(), "TokenClassification"), batch().attention_mask.bool()
    with torch.no_grad():
        for side in ("right", "left"):
            whole = engine_class(backbone).run(batch(side), Silent(), 0.0).logits
            torch.testing.assert_close(whole[valid], expected.logits[valid], atol=1e-5, rtol=1e-5)

        def drop(state: State) -> Decision | None:
            return Decision(drop=state.position % 3 == 2) if state.layer == 2 else None

        got = engine_class(backbone).run(batch(), Scripted(drop, "before", restore=True), 0.0).logits
        gone = (batch().positions % 3 == 2) & valid
        last = backbone.head(backbone.final_norm(expected.hidden_states[1][gone]))  # type: ignore[misc]
    torch.testing.assert_close(got[gone], last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine_class", ENGINES)
def test_a_sequence_that_leaves_early_passes_the_final_norm(engine_class: Any) -> None:
    backbone, states = tiny_backbone("patchwork"), own_forward(batch()).hidden_states
    with torch.no_grad():
        got = engine_class(backbone).run(
            batch(), Scripted(lambda state: Decision(exit=(state.ids == 3) & (state.layer == 2)), "after"), 0.0
        )
        expected = backbone.head(backbone.final_norm(states[2][3, 0]))  # type: ignore[misc]
    torch.testing.assert_close(got.logits[3], expected, atol=1e-5, rtol=1e-5)
    assert got.trace.depth.tolist() == [4, 4, 4, 2, 4]


def deebert() -> Any:
    backbone = tiny_backbone("patchwork")
    torch.manual_seed(3)
    task = Classification(["a", "b", "c"])
    method = METHODS["deebert"](METHODS["deebert"].Config(), Shape(backbone.d, backbone.n_layers, 3), task)
    return method.eval()


def test_a_replay_equals_the_run() -> None:
    backbone, method = tiny_backbone("patchwork"), deebert()
    engine = PackedEngine(backbone)
    assert method.exits is not None
    recording = record(engine, method.exits, [batch()])
    depths = set()
    for dial in method.dial.sweep:
        expected, got = engine.run(batch(), method, dial), replay(backbone, method, recording, dial)
        torch.testing.assert_close(got.logits, expected.logits, atol=1e-5, rtol=1e-5)
        assert flops(got.trace, backbone).tolist() == flops(expected.trace, backbone).tolist()
        depths |= set(got.trace.depth.tolist())
    assert {1, backbone.n_layers} <= depths


def test_training_reads_what_the_head_reads() -> None:
    backbone, method = tiny_backbone("patchwork"), deebert()
    model: Any = nn.Module()
    model.encoder, model.method, model.task = backbone.model, method, Classification(["a", "b", "c"])
    model.backbone, model.reference = backbone, ReferenceEngine(backbone)
    read = Learner(model, model.method.finetuning()).read(batch(), Targets(torch.zeros(len(LENGTHS))))
    torch.testing.assert_close(read.logits[-1], own_forward(batch()).logits, atol=1e-5, rtol=1e-5)


def test_int8_stays_close() -> None:
    backbone = tiny_backbone("patchwork")
    exact, coarse = (PackedEngine(backbone, dtype).run(batch(), Silent(), 0.0) for dtype in ("float32", "int8"))
    assert float((coarse.logits - exact.logits).norm()) < 0.1 * float(exact.logits.norm())


def test_the_ledger_by_hand() -> None:
    """d = 2, one head of 4, f = 3, tables of 5 rows; 4 queries, 6 keys, 1 row through the FFN."""
    relative, wide, back = RelativeTerms(torch.ones(5, 4), torch.ones(5, 4)), nn.Linear(2, 4), nn.Linear(4, 2)
    attention = AttentionSpec(wide, wide, wide, back, 1, nn.Dropout(0.0), relative=relative)
    ffn = FeedForwardSpec(nn.Linear(2, 3), torch.relu, nn.Linear(3, 2))
    spec = LayerSpec(attention, nn.LayerNorm(2), ffn, nn.LayerNorm(2))
    projections, scores, sums = 8 * (4 + 2 * 6 + 1), 4 * 4 * 6, 4 * 1 * 6
    between, tables = 2 * 2 * 3 * 1, 4 * 5 * (4 + 6)
    counted = layer_macs([spec], *(torch.tensor([[n]]) for n in (4, 6, 1)))
    assert counted.tolist() == [[projections + scores + sums + between + tables]]


def test_the_full_model_costs_one() -> None:
    backbone = tiny_backbone("patchwork")
    trace = PackedEngine(backbone).run(batch(), Silent(), 0.0).trace
    assert torch.equal(flops(trace, backbone), full_flops(trace.lengths, backbone))
