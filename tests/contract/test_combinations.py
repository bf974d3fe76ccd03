"""What every combination of two methods promises: the contract of its parts, for all pairs of the registry."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from executed import assert_same, executed_flops, small_parts
from tiny import LABELLING, give_table, make, random_inputs, tiny_backbone

from stretto.engine.cost import flops
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.methods import METHODS, Combined, Shape
from stretto.state import Inputs
from stretto.tasks import Classification

LENGTHS = [9, 5, 1, 12, 5, 7]
SHORTENING = [name for name in LABELLING if METHODS[name].verbs & {"drop", "freeze"}]
EXITING = [name for name in LABELLING if "exit" in METHODS[name].verbs]
PAIRS = [f"{first}+{second}" for first in SHORTENING for second in EXITING]


@cache
def engine() -> PackedEngine:
    """Shared: it keeps nothing of a run."""
    return PackedEngine(tiny_backbone("bert"))


@cache
def full_logits() -> torch.Tensor:
    packed = engine()
    return packed.run(random_inputs(LENGTHS), make("full", packed.backbone), 0.0).logits


def made(name: str) -> Combined:
    """A combination with weights strong enough that both parts decide."""
    kind, backbone = METHODS[name], tiny_backbone("bert")
    settings = {"power_bert_max_tokens": 16} if name.startswith("power_bert") else {}
    torch.manual_seed(3)
    shape = Shape(backbone.d, backbone.n_layers, backbone.n_labels)
    method = kind(kind.Config(**settings), shape, Classification(["a", "b", "c"]))
    assert isinstance(method, Combined)
    give_table(method.first)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_(std=0.4)
    return method.eval()


def row(inputs: Inputs, index: int) -> Inputs:
    keep = slice(index, index + 1)
    notes = {name: note[keep] for name, note in inputs.notes.items()}
    types = None if inputs.token_type_ids is None else inputs.token_type_ids[keep]
    return Inputs(inputs.input_ids[keep], inputs.attention_mask[keep], types, notes=notes)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_keeps_the_contract(name: str) -> None:
    """Reference, packed and alone agree, each sequence at its own dial; off is the full model; the ledger is right."""
    packed, reference = engine(), ReferenceEngine(tiny_backbone("bert"))
    method, inputs = made(name), random_inputs(LENGTHS)
    off = packed.run(inputs, method, method.dial.off)
    assert torch.equal(off.logits, full_logits())
    sweep = method.dial.sweep
    dials = torch.tensor([sweep[i * (len(sweep) - 1) // (len(LENGTHS) - 1)] for i in range(len(LENGTHS))])
    with torch.no_grad():
        expected = reference.run(inputs, method, dials)
    got = packed.run(inputs, method, dials)
    assert_same(got, expected)
    with small_parts():
        assert_same(packed.run(inputs, method, dials, batch_size=2), expected)
    for index, dial in enumerate(dials.tolist()):
        alone = packed.run(row(inputs, index), method, dial)
        torch.testing.assert_close(alone.logits[0], got.logits[index], atol=1e-5, rtol=1e-5)
        assert int(alone.trace.depth) == int(got.trace.depth[index])
    middle = sweep[len(sweep) // 2]
    executed, output = executed_flops(packed, random_inputs([9, 5, 12, 5, 7, 30]), method, middle)
    assert executed == pytest.approx(int(flops(output.trace, packed.backbone).sum()), rel=0.01)


def test_both_parts_are_at_work() -> None:
    method = made("constant_ratio+deebert")
    output = engine().run(random_inputs(LENGTHS * 3), method, method.dial.sweep[-2])
    assert (output.trace.n_ffn[:, 0] < output.trace.lengths).any()  # tokens were dropped in layer 1
    assert (output.trace.depth < 4).any()  # and texts left early


@pytest.mark.parametrize("second", ["static_depth", "alberta", "deebert"])
def test_the_budget_from_which_on_both_parts_were_trained(second: str) -> None:
    method = made(f"constant_ratio+{second}")
    trained, budgets = method.dial.trained, method.dial.sweep
    if second == "deebert":
        assert trained is None
        return
    first = budgets.index(trained)
    within = [method.second.dial.within_trained(dial) for _, dial in method.dials(torch.tensor(budgets)).tolist()]
    assert first > 0 and within == [False] * first + [True] * (len(budgets) - first)


@pytest.mark.parametrize("name", ["deebert+length_adaptive", "deebert+pabee", "full+deebert"])
def test_what_cannot_be_combined_is_refused(name: str) -> None:
    with pytest.raises(StrettoError, match="drops or freezes tokens, then one that exits"):
        METHODS[name]


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(StrettoError, match="Did you mean 'deebert'"):
        METHODS["length_adaptive+deebrt"]
