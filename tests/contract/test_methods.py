"""What every method promises, over the registries: a new method or backbone gets these tests for free."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
from typing import Any

import pytest
import torch
from executed import assert_same, executed_flops, small_parts
from tiny import LABELLING, STACKS, make, random_inputs, tiny_backbone, uses_types

from stretto.engine.cost import Cost, flops, full_flops
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import record, replay
from stretto.errors import StrettoError
from stretto.methods import METHODS
from stretto.state import Inputs
from stretto.tasks import Regression

LENGTHS = [9, 5, 1, 12, 5, 7]


def pools(name: str) -> list[dict[str, Any]]:
    return [{"pool": "mean"}, {"pool": "cls"}] if hasattr(METHODS[name].Config, "pool") else [{}]


#: The lengths of each text are chosen after layer 1.
PER_INPUT: dict[str, Any] = {
    "costs": (0.8, 0.6, 0.4), "frontier": ((0.9, 0.8, 0.8, 0.7), (0.8, 0.6, 0.5, 0.4), (0.6, 0.4, 0.3, 0.1)),
    "prices": (1.0, 4.0, 20.0), "price_costs": (0.8, 0.6, 0.3),
}  # fmt: skip
CASES = [*((name, settings) for name in LABELLING for settings in pools(name)), ("length_adaptive", PER_INPUT)]


@functools.cache
def engine_of(model_type: str) -> PackedEngine:
    """Shared: it keeps nothing of a run."""
    return PackedEngine(tiny_backbone(model_type))


@functools.cache
def full_logits(model_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the method `full` and Hugging Face's own forward answer."""
    engine, inputs = engine_of(model_type), random_inputs(LENGTHS, types=uses_types(model_type))
    named = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    if inputs.token_type_ids is not None:
        named["token_type_ids"] = inputs.token_type_ids
    with torch.no_grad():
        huggingface = engine.backbone.model(**named).logits
    full = make("full", engine.backbone)
    return engine.run(inputs, full, full.dial.off).logits, huggingface


def row(inputs: Inputs, index: int) -> Inputs:
    keep = slice(index, index + 1)
    types = None if inputs.token_type_ids is None else inputs.token_type_ids[keep]
    notes = {name: note[keep] for name, note in inputs.notes.items()}
    return Inputs(inputs.input_ids[keep], inputs.attention_mask[keep], types, notes=notes)


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_engines_agree_along_the_dial(name: str, settings: dict[str, Any], model_type: str) -> None:
    """Whatever the padding: one engine gets it on the left, the other on the right. Every sequence is run alone too,
    at one of the dials."""
    packed, reference = engine_of(model_type), ReferenceEngine(tiny_backbone(model_type))
    method = make(name, packed.backbone, **settings)
    inputs = random_inputs(LENGTHS, types=uses_types(model_type))
    left = random_inputs(LENGTHS, side="left", types=uses_types(model_type))
    sweep = method.dial.sweep
    dials = list(dict.fromkeys((sweep[len(sweep) // 4], sweep[len(sweep) // 2], sweep[-1])))
    for first, dial in enumerate(dials):
        with torch.no_grad():
            expected = reference.run(inputs, method, dial)
        got = packed.run(left, method, dial)
        assert_same(got, expected)
        with small_parts():
            assert_same(packed.run(inputs, method, dial, batch_size=2), expected)
        for index in range(first, len(LENGTHS), len(dials)):
            alone = packed.run(row(inputs, index), method, dial)
            torch.testing.assert_close(alone.logits[0], got.logits[index], atol=1e-5, rtol=1e-5)
            assert int(alone.trace.depth) == int(got.trace.depth[index])


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_dial_off_is_the_full_model(name: str, settings: dict[str, Any], model_type: str) -> None:
    engine, inputs = engine_of(model_type), random_inputs(LENGTHS, types=uses_types(model_type))
    method = make(name, engine.backbone, **settings)
    output = engine.run(inputs, method, method.dial.off)
    full, huggingface = full_logits(model_type)
    assert torch.equal(output.logits, full)
    torch.testing.assert_close(output.logits, huggingface, atol=1e-5, rtol=1e-5)
    assert (output.trace.depth == engine.backbone.n_layers).all()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_cost_never_rises_along_the_sweep(name: str, settings: dict[str, Any]) -> None:
    engine, backbone = engine_of("bert"), tiny_backbone("bert")
    method = make(name, backbone, **settings)
    inputs = random_inputs(LENGTHS * 4, seed=5)
    assert method.dial.sweep[0] == method.dial.off
    spent = [flops(engine.run(inputs, method, dial).trace, backbone) for dial in method.dial.sweep]
    if method.own_head() is not None:  # it reads rows of the last layer that nobody reads with the dial off: as if read
        spent[0] = flops(engine.run(inputs, method, method.dial.off, keep_hidden=True).trace, backbone)
    for dearer, cheaper in itertools.pairwise(spent):
        if method.monotone:
            assert (cheaper <= dearer).all()  # for each sequence, not only on average
        else:
            assert cheaper.sum() <= dearer.sum()
    if name != "full":
        assert spent[-1].sum() < spent[0].sum()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_sequence_may_have_its_own_dial(name: str, settings: dict[str, Any]) -> None:
    engine, backbone = engine_of("bert"), tiny_backbone("bert")
    method = make(name, backbone, **settings)
    inputs = random_inputs(LENGTHS)
    sweep = method.dial.sweep
    dials = torch.tensor([sweep[i * (len(sweep) - 1) // (len(LENGTHS) - 1)] for i in range(len(LENGTHS))])
    together = engine.run(inputs, method, dials)
    with small_parts():
        assert_same(engine.run(inputs, method, dials, batch_size=2), together)
    for index, dial in enumerate(dials.tolist()):
        alone = engine.run(row(inputs, index), method, dial)
        torch.testing.assert_close(alone.logits[0], together.logits[index], atol=1e-5, rtol=1e-5)
        for name in ("n_query", "n_key", "n_ffn", "decider_macs"):  # its cost, too, is its own
            assert torch.equal(getattr(alone.trace, name)[0], getattr(together.trace, name)[index]), name


@pytest.mark.parametrize(("name", "settings"), [case for case in CASES if METHODS[case[0]].uses_exits])
def test_a_replay_equals_the_run(name: str, settings: dict[str, Any]) -> None:
    engine, backbone = engine_of("albert"), tiny_backbone("albert")
    method = make(name, backbone, **settings)
    inputs = random_inputs(LENGTHS)
    assert method.exits is not None
    recording = record(engine, method.exits, [inputs])
    for dial in method.dial.sweep:
        assert_same(replay(backbone, method, recording, dial), engine.run(inputs, method, dial))


@pytest.mark.parametrize("model_type", ["bert", "albert", "electra", "patchwork"])
@pytest.mark.parametrize("name", LABELLING)
def test_the_ledger_equals_the_operations_executed(name: str, model_type: str) -> None:
    engine, backbone = engine_of(model_type), tiny_backbone(model_type)
    method = make(name, backbone)
    inputs = random_inputs([9, 5, 12, 5, 7, 30], types=uses_types(model_type))
    for dial in method.dial.sweep[:: max(len(method.dial.sweep) // 4, 1)]:
        executed, output = executed_flops(engine, inputs, method, dial)
        assert executed == pytest.approx(int(flops(output.trace, backbone).sum()), rel=0.01)


def test_full_cost_is_one() -> None:
    backbone = tiny_backbone("electra")
    method, engine = make("full", backbone), PackedEngine(backbone)
    output = engine.run(random_inputs(LENGTHS), method, 0.0)
    cost = Cost.of(output.trace, backbone)
    assert cost.total == 1.0
    assert torch.equal(cost.full, full_flops(output.trace.lengths, backbone))


@pytest.mark.parametrize("name", LABELLING)
def test_regression_works_or_says_what_does(name: str) -> None:
    backbone = tiny_backbone("bert", 1)
    if METHODS[name].needs.met_by(Regression):
        method, engine, inputs = make(name, backbone, Regression()), PackedEngine(backbone), random_inputs(LENGTHS)
        sweep = method.dial.sweep
        dials = torch.tensor([sweep[i * (len(sweep) - 1) // (len(LENGTHS) - 1)] for i in range(len(LENGTHS))])
        for dial in (*sweep[:: max(len(sweep) // 5, 1)], dials):
            with torch.no_grad():
                assert_same(engine.run(inputs, method, dial), ReferenceEngine(backbone).run(inputs, method, dial))
        full = engine.run(inputs, make("full", backbone, Regression()), 0.0)
        assert torch.equal(engine.run(inputs, method, method.dial.off).logits, full.logits)
    else:
        with pytest.raises(StrettoError, match=r"Methods that can do it: .*pabee, lte"):
            make(name, backbone, Regression())


@pytest.mark.parametrize("name", METHODS)
def test_the_file_tells_its_story(name: str) -> None:
    """Docstring with citation, differences and dial; a string under every setting."""
    method = METHODS[name]
    story = sys.modules[method.__module__].__doc__ or ""
    assert "Differs from the paper:" in story
    assert "Dial:" in story
    for cls in method.Config.__mro__[:-1]:
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef)
        for here, below in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(here, ast.AnnAssign):
                assert isinstance(below, ast.Expr), f"{cls.__name__}.{ast.unparse(here.target)} has no docstring"
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(method.Config))


@pytest.mark.parametrize("name", LABELLING)
def test_a_dial_out_of_range_is_refused(name: str) -> None:
    dial = make(name, tiny_backbone("bert")).dial
    with pytest.raises(StrettoError, match=dial.name):
        dial.check(dial.lower - 1.0)
    with pytest.raises(StrettoError, match=dial.name):
        dial.check(float("nan"))
