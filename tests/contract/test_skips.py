"""Leaving a layer out, per sequence, in both engines and on every backbone.

That random skips agree between the engines, alone and in a batch, together with all other verbs, is in
`test_engines.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executed import executed_flops
from scripted import Scripted
from tiny import STACKS, random_inputs, tiny_backbone, uses_types

from stretto.engine.cost import flops
from stretto.engine.decider import Silent
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.state import Decision, State

LENGTHS = [9, 5, 1, 12, 5]
SKIPPING = torch.tensor([True, False, True, False, False])
ENGINES = [ReferenceEngine, PackedEngine]


def skip_second(state: State) -> Decision | None:
    return Decision(skip=SKIPPING[state.ids]) if state.layer == 2 else None


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("engine_class", ENGINES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_pass_unchanged_and_nothing_is_computed(engine_class: Any, model_type: str, side: str) -> None:
    backbone, inputs = tiny_backbone(model_type), random_inputs(LENGTHS, types=uses_types(model_type), side=side)
    reference = ReferenceEngine(backbone)
    with torch.no_grad():
        got = engine_class(backbone).run(inputs, Scripted(skip_second, "before"), 0.0)
        without, full = (reference.run(inputs, Silent(), 0.0, skip=skip) for skip in ((2,), ()))
    expected = torch.where(SKIPPING.view(-1, *[1] * (full.logits.dim() - 1)), without.logits, full.logits)
    torch.testing.assert_close(got.logits, expected, atol=1e-5, rtol=1e-5)
    for name in ("n_query", "n_key", "n_ffn"):
        counts = getattr(full.trace, name).clone()
        counts[SKIPPING, 1] = 0
        assert torch.equal(getattr(got.trace, name), counts)
    assert got.trace.depth.tolist() == (backbone.n_layers - SKIPPING.long()).tolist()


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_the_ledger_counts_what_is_executed(index: int) -> None:
    """Alone, and the same in a batch of which some leave the layer out."""
    backbone, engine = tiny_backbone("bert"), PackedEngine(tiny_backbone("bert"))
    together = engine.run(random_inputs(LENGTHS), Scripted(skip_second, "before"), 0.0)

    def skip_alone(state: State) -> Decision | None:
        return Decision(skip=SKIPPING[index : index + 1]) if state.layer == 2 else None

    executed, alone = executed_flops(engine, random_inputs([LENGTHS[index]]), Scripted(skip_alone, "before"), 0.0)
    assert executed == int(flops(alone.trace, backbone)) == int(flops(together.trace, backbone)[index])


def test_all_layers_may_be_left_out() -> None:
    backbone, inputs = tiny_backbone("bert"), random_inputs(LENGTHS)
    everywhere = Scripted(lambda state: Decision(skip=torch.ones_like(state.ids, dtype=torch.bool)), "before")
    with torch.no_grad():
        padded, packed = (engine(backbone).run(inputs, everywhere, 0.0) for engine in ENGINES)
        embedded = ReferenceEngine(backbone).embed(inputs)
        expected = backbone.head(backbone.head.pool_padded(backbone.for_head(embedded), inputs.attention_mask))
    torch.testing.assert_close(padded.logits, expected)
    torch.testing.assert_close(packed.logits, expected, atol=1e-5, rtol=1e-5)
    assert not packed.trace.n_key.any() and not padded.trace.n_key.any()


@pytest.mark.parametrize("engine_class", ENGINES)
def test_a_skip_in_the_wrong_place_or_shape_is_refused(engine_class: Any) -> None:
    backbone, inputs = tiny_backbone("bert"), random_inputs(LENGTHS)
    rows = Scripted(lambda state: Decision(skip=torch.ones(state.n_rows, dtype=torch.bool)), "before")
    with pytest.raises(StrettoError, match=r"'skip' to be a bool tensor of shape \[5\].*per live seq"):
        engine_class(backbone).run(inputs, rows, 0.0)
    late = Scripted(lambda state: Decision(skip=torch.ones(state.n_sequences, dtype=torch.bool)), "between")
    with pytest.raises(StrettoError, match=r"between a layer.*got 'skip'"):
        engine_class(backbone).run(inputs, late, 0.0)
