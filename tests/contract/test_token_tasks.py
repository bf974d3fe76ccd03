"""What every method promises on the tasks that answer every token, over the registries: tasks × methods × backbones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from executed import assert_same, executed_flops, small_parts
from tiny import LABELLING, STACKS, TAGS, random_inputs, tiny_model, tiny_questions, tiny_tagging, uses_types

from stretto.engine.cost import Cost, flops
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.methods import METHODS
from stretto.methods.saliency import saliency
from stretto.model import AdaptiveModel
from stretto.state import Inputs
from stretto.tasks import TASKS, Span, Task, Tokens

LENGTHS = [9, 5, 1, 12, 5, 7]
TOKEN_TASKS = [name for name in TASKS if TASKS[name].answers == "token"]
CASES = [(task, method) for task in TOKEN_TASKS for method in METHODS if METHODS[method].needs.met_by(TASKS[task])]


def example_of(task: str) -> Task:
    return Tokens(TAGS) if task == "tokens" else Span(stride=4)


def make(task: str, method: str, model_type: str = "bert") -> AdaptiveModel:
    """A random model whose method, if it has weights, decides something."""
    settings = {"max_tokens": 16} if method == "power_bert" else {}  # the texts here are short
    model = tiny_model(method, model_type, task=example_of(task), **settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.method.parameters():
            parameter.normal_(std=0.4)
    return model.eval()


def part(inputs: Inputs, index: int) -> Inputs:
    keep, length = slice(index, index + 1), LENGTHS[index]
    types = None if inputs.token_type_ids is None else inputs.token_type_ids[keep, :length]
    return Inputs(inputs.input_ids[keep, :length], inputs.attention_mask[keep, :length], types)


def some_dials(model: AdaptiveModel) -> tuple[float, ...]:
    sweep = model.method.dial.sweep
    return sweep[:: max(len(sweep) // 4, 1)]


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize(("task", "method"), CASES)
def test_packed_equals_reference_alone_and_in_a_batch(task: str, method: str, model_type: str) -> None:
    """Every sequence is run alone at one of the dials."""
    model = make(task, method, model_type)
    inputs, left = (random_inputs(LENGTHS, side=side, types=uses_types(model_type)) for side in ("right", "left"))
    reference = ReferenceEngine(model.backbone)
    dials = some_dials(model)
    for first, dial in enumerate(dials):
        with torch.no_grad():
            expected = reference.run(inputs, model.method, dial)
        got = model.run(inputs, dial)
        assert_same(got, expected)
        with small_parts():
            assert_same(model.run(inputs, dial, batch_size=2), expected)
        assert_same(model.run(left, dial), expected)  # column = position, on whichever side the padding was
        for index in range(first, len(LENGTHS), len(dials)):
            alone = model.run(part(inputs, index), dial)
            torch.testing.assert_close(alone.logits[0], got.logits[index, : LENGTHS[index]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize(("task", "method"), CASES)
def test_dial_off_is_hugging_face(task: str, method: str, model_type: str) -> None:
    model = make(task, method, model_type)
    inputs = random_inputs(LENGTHS, types=uses_types(model_type))
    named = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    if inputs.token_type_ids is not None:
        named["token_type_ids"] = inputs.token_type_ids
    with torch.no_grad():
        answer = model.encoder(**named)
    expected = answer.logits if task == "tokens" else torch.stack([answer.start_logits, answer.end_logits], dim=-1)
    output, valid = model.run(inputs, model.method.dial.off), inputs.attention_mask.bool()
    torch.testing.assert_close(output.logits[valid], expected[valid], atol=1e-5, rtol=1e-5)
    assert (output.logits[~valid] == 0).all()
    if method == "full":
        assert Cost.of(output.trace, model.backbone).total == 1.0


@pytest.mark.parametrize("model_type", ["bert", "albert", "electra", "patchwork"])
@pytest.mark.parametrize(("task", "method"), CASES)
def test_the_ledger_equals_the_operations_executed(task: str, method: str, model_type: str) -> None:
    model = make(task, method, model_type)
    inputs = random_inputs([9, 5, 12, 5, 7, 30], types=uses_types(model_type))
    for dial in some_dials(model):
        executed, output = executed_flops(model.packed, inputs, model.method, dial)
        assert executed == pytest.approx(int(flops(output.trace, model.backbone).sum()), rel=0.01)


@pytest.mark.parametrize(("task", "method"), CASES)
def test_cost_never_rises_along_the_sweep(task: str, method: str) -> None:
    model = make(task, method)
    inputs = random_inputs(LENGTHS * 4, seed=5)
    spent = [flops(model.run(inputs, dial).trace, model.backbone) for dial in model.method.dial.sweep]
    for dearer, cheaper in itertools.pairwise(spent):
        assert (cheaper <= dearer).all() if model.method.monotone else cheaper.sum() <= dearer.sum()
    if method != "full":
        assert spent[-1].sum() < spent[0].sum()


@pytest.mark.parametrize("task", TOKEN_TASKS)
@pytest.mark.parametrize("method", LABELLING)
def test_a_method_does_the_task_or_says_which_can(task: str, method: str) -> None:
    if not METHODS[method].needs.met_by(TASKS[task]):
        with pytest.raises(StrettoError, match=rf"got {task}\. Methods that can do it: full, .*length_adaptive"):
            make(task, method)


@pytest.mark.parametrize("model_type", STACKS)
@pytest.mark.parametrize("task", TOKEN_TASKS)
def test_the_folder_is_a_plain_hugging_face_model(task: str, model_type: str, tmp_path: Any) -> None:
    import transformers

    model = make(task, "full", model_type)
    model.save_pretrained(tmp_path / "saved")
    plain = getattr(transformers, model.task.auto_class).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.encoder.parameters(), strict=True))
    plain.save_pretrained(tmp_path / "plain")  # without stretto.json the architecture tells the task
    model.tokenizer.save_pretrained(tmp_path / "plain")
    text: Any = "how many city ?" if task == "tokens" else ("how many ?", "one city and " * 40)
    for folder in ("saved", "plain"):
        loaded = AdaptiveModel.from_pretrained(tmp_path / folder)
        assert (loaded.task.name, loaded.task.label_names) == (task, model.task.label_names)
        if task == "span" and folder == "plain":  # of windows a plain model says nothing
            loaded.task = model.task
        assert loaded.predict(text) == model.predict(text)


@pytest.mark.parametrize("task", TOKEN_TASKS)
def test_saliency_reads_the_right_tokens(task: str) -> None:
    model = make(task, "full")
    data = tiny_tagging(3) if task == "tokens" else tiny_questions(3)
    encoded = model.encode(data.texts, data.labels)
    from stretto.data.tokenise import EncodedDataset, collate

    batch = collate(0)(list(EncodedDataset(encoded.features, encoded.labels)))  # type: ignore[call-overload]
    inputs = Inputs(batch["input_ids"], batch["attention_mask"])
    found = saliency(model.reference, model.task, inputs, batch["labels"])
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3))
    assert (found[batch["attention_mask"] == 0] == 0).all()
    others = torch.where(batch["labels"] < 0, batch["labels"], (batch["labels"] + 1) % 3)
    assert not torch.allclose(found, saliency(model.reference, model.task, inputs, others))


@pytest.mark.parametrize("model_type", STACKS)
def test_bfloat16_autocast_reaches_the_answers(model_type: str) -> None:
    """Some encoders widen their embeddings by a product, which autocast computes in bfloat16."""
    model = make("tokens", "length_adaptive", model_type)
    inputs = random_inputs(LENGTHS, types=uses_types(model_type))
    with torch.no_grad():
        expected = model.reference.run(inputs, model.method, model.method.dial.off).logits
        with torch.autocast("cpu", torch.bfloat16):
            got = model.reference.run(inputs, model.method, model.method.dial.off).logits
    torch.testing.assert_close(got.float(), expected, atol=0.1, rtol=0.1)
