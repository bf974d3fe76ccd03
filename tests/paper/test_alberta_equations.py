"""The equations of ALBERTa on numbers computed by hand, and the two paths (training, serving) that must be one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from scripted import Scripted
from tiny import TAGS, random_inputs, tiny_model
from torch import Tensor, nn

from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.methods.alberta import GATED, IGNORED, StructurePredictor, leaving, revpc
from stretto.methods.base import Targets, TrainingBatch
from stretto.state import Decision, Output, State
from stretto.tasks import Tokens

LENGTHS = [5, 9, 12]  # rising: both engines then keep the order, and the fixed gates find their sequences
#: Gates of the three adaptive layers (of four, the first is static), sums of powers of two, one line per sequence.
GATES = torch.tensor([[1.0, 0.875, 0.5], [1.0, 0.625, 0.625], [1.0, 0.25, 0.125]])


PUBLISHED: dict[str, Any] = {"pool": "cls", "exit_loss": "drawn", "exit_share": 0.0}


class FixedGates(nn.Module):
    """In the place of the predictor: what the test says."""

    macs = 0

    def forward(self, read: Tensor) -> Tensor:
        return GATES[: len(read)]


def model_with_fixed_gates(**settings: Any) -> Any:
    model = tiny_model("alberta", **settings)
    model.method.predictor = FixedGates()
    return model


def test_revpc() -> None:
    probabilities = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[1.0, 0.9, 0.7, 0.4], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(revpc(probabilities), expected)
    assert torch.equal(revpc(torch.tensor([[1.0]])), torch.ones(1, 1))


def test_the_initial_gate_is_one_and_gates_never_rise() -> None:
    torch.manual_seed(0)
    gates = revpc(torch.randn(500, 11).softmax(dim=-1))  # sums of eleven floats are not all exactly 1
    assert (gates[:, 0] == 1).all()
    assert (gates.diff(dim=1) <= 1e-6).all()


def test_the_predictor_is_an_mlp_on_the_first_token() -> None:
    predictor = StructurePredictor(d=2, size=1, n_adaptive=3, initial_gate=0.5, cumulated=True)
    with torch.no_grad():
        predictor.hidden.weight.copy_(torch.tensor([[1.0, -1.0]]))
        predictor.hidden.bias.zero_()
        predictor.out.weight.copy_(torch.tensor([[0.0], [1.0], [0.0]]))
        predictor.out.bias.zero_()
        got = predictor(torch.tensor([[3.0, 1.0]]))
    x = 2 * 0.5 * (1 + math.erf(2 / math.sqrt(2)))  # GELU(3 - 1)
    total = 1 + math.exp(x) + 1
    torch.testing.assert_close(got, torch.tensor([[1.0, (math.exp(x) + 1) / total, 1 / total]]))
    assert predictor.macs == 2 * 1 + 1 * 3


@pytest.mark.parametrize("cumulated", [True, False])
def test_training_starts_with_open_gates(cumulated: bool) -> None:
    predictor = StructurePredictor(d=8, size=4, n_adaptive=5, initial_gate=0.9, cumulated=cumulated)
    nn.init.zeros_(predictor.out.weight)
    gates = predictor(torch.randn(3, 8))
    if cumulated:  # a tenth is shared by the other four
        torch.testing.assert_close(gates, torch.tensor([1.0, 0.975, 0.95, 0.925, 0.9]).expand(3, 5))
    else:
        torch.testing.assert_close(gates, torch.full((3, 5), 0.9))


def test_without_revpc_each_gate_is_a_sigmoid_of_its_own() -> None:
    predictor = tiny_model("alberta", revpc=False).method.predictor
    nn.init.zeros_(predictor.out.weight)
    with torch.no_grad():
        predictor.out.bias.copy_(torch.tensor([0.0, 2.0, -2.0]))  # gates may rise
    got = predictor(torch.randn(2, 32))
    torch.testing.assert_close(got, torch.tensor([0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))]).expand(2, 3))


@pytest.mark.parametrize(
    ("gamma", "depths"),
    [
        (IGNORED, [4, 4, 4]), (GATED, [4, 4, 4]), (0.1, [4, 4, 4]), (0.125, [4, 4, 4]), (0.2, [4, 4, 3]),
        (0.25, [4, 4, 3]), (0.26, [4, 4, 2]), (0.5, [4, 4, 2]), (0.51, [3, 4, 2]), (0.625, [3, 4, 2]),
        (0.63, [3, 2, 2]), (0.875, [3, 2, 2]), (0.9, [2, 2, 2]), (1.0, [2, 2, 2]),
    ],
)  # fmt: skip
def test_a_sequence_leaves_exactly_before_the_initial_gate_below_gamma(gamma: float, depths: list[int]) -> None:
    """Layer 1 is static; adaptive layer i runs while p_i >= γ."""
    output = model_with_fixed_gates().run(random_inputs(LENGTHS), gamma)
    assert output.trace.depth.tolist() == depths


@pytest.mark.parametrize("task", [None, Tokens(TAGS)])
def test_who_leaves_is_answered_by_the_models_own_head_from_the_gated_states(task: Any) -> None:
    model, inputs = model_with_fixed_gates(task=task, pool="cls"), random_inputs(LENGTHS)
    backbone, valid = model.backbone, inputs.attention_mask.bool()
    output = model.run(inputs, 0.6)
    assert output.trace.depth.tolist() == [3, 4, 2]

    def gate(state: State) -> Decision:
        return Decision(gate=torch.ones(state.n_sequences) if state.layer == 1 else GATES[state.ids, state.layer - 2])

    with torch.no_grad():
        for index, depth in enumerate(output.trace.depth.tolist()):
            skipped = tuple(range(depth + 1, 5))  # as if the other layers were not there
            run = ReferenceEngine(backbone).run(inputs, Scripted(gate, "before"), 0.0, skip=skipped, keep_hidden=True)
            assert run.hidden is not None
            here = valid[index]
            if task is None:
                got, expected = output.logits[index], backbone.head(run.hidden[index, :1])[0]
            else:
                got, expected = output.logits[index, here], backbone.head(run.hidden[index, here])
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def training_batch(model: Any) -> tuple[TrainingBatch, list[Output]]:
    """A batch as the learner gives it to a method, and what every run of it gives."""
    inputs, seen = random_inputs(LENGTHS), []

    def run(dial: float, context: Any = None) -> Any:
        output = model.reference.run(inputs, model.method, dial, context=context)
        seen.append(output)
        return output

    batch = TrainingBatch(inputs, Targets(torch.tensor([0, 1, 1])), run, step=0, epoch=0.0, engine=model.reference)
    return batch, seen


@pytest.mark.parametrize("settings", [PUBLISHED, {}])
def test_serving_with_gamma_zero_is_the_training_path(settings: dict[str, Any]) -> None:
    model = tiny_model("alberta", **settings)
    nn.init.normal_(model.method.predictor.out.weight, std=2.0)  # gates that differ
    batch, seen = training_batch(model)
    model.method.stages()[1].objective(batch)
    (trained,) = seen
    served = model.run(batch.inputs, GATED)
    torch.testing.assert_close(served.logits, trained.logits, atol=1e-5, rtol=1e-5)
    assert served.trace.depth.tolist() == [4, 4, 4]
    assert not torch.allclose(served.logits, model.run(batch.inputs, IGNORED).logits, atol=1e-3)


def test_the_loss_is_the_tasks_and_the_penalty_on_the_sum_of_gates() -> None:
    free, penalised = (model_with_fixed_gates(depth_penalty=penalty, **PUBLISHED) for penalty in (0.0, 0.5))
    (batch, seen), (same, _) = training_batch(free), training_batch(penalised)
    loss = free.method.stages()[1].objective(batch)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(seen[0].logits, batch.labels))
    mean_sum = (2.375 + 2.25 + 1.375) / 3
    added = penalised.method.stages()[1].objective(same) - loss
    assert float(added.detach()) == pytest.approx(0.5 * mean_sum, rel=1e-4)


@pytest.mark.parametrize(("share", "early_exit"), [(0.0, True), (0.5, True), (1.0, True), (1.0, False)])
def test_a_share_of_the_texts_leaves_after_any_of_the_layers_where_it_may(share: float, early_exit: bool) -> None:
    method = tiny_model("alberta", exit_share=share, early_exit=early_exit).method  # 4 layers, the first is static
    torch.manual_seed(0)
    counts = torch.bincount(method.draw_last_layers(3000, torch.device("cpu")), minlength=5) / 3000
    part = share if early_exit else 0.0
    assert counts.tolist() == pytest.approx([0.0, part / 3, part / 3, part / 3, 1 - part], abs=0.03)


def test_training_texts_leave_after_the_layer_drawn_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("alberta", exit_loss="drawn")
    monkeypatch.setattr(model.method, "draw_last_layers", lambda texts, device: torch.tensor([4, 1, 3]))
    batch, seen = training_batch(model)
    model.method.stages()[1].objective(batch)
    assert seen[0].trace.depth.tolist() == [4, 1, 3]
    assert model.run(batch.inputs, GATED).trace.depth.tolist() == [4, 4, 4]  # serving goes by the gates alone


@pytest.mark.parametrize("settings", [PUBLISHED, {}])
def test_the_task_alone_teaches_the_predictor(settings: dict[str, Any]) -> None:
    model = tiny_model("alberta", depth_penalty=0.0, **settings)
    batch, _ = training_batch(model)
    model.method.stages()[1].objective(batch).backward()
    for parameter in model.method.predictor.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any())


def test_leaving_by_hand() -> None:
    gates = torch.tensor([[1.0, 0.875, 0.5], [1.0, 0.25, 0.25]])
    probable, depth = leaving(gates, cumulated=True)
    torch.testing.assert_close(probable, torch.tensor([[0.0, 0.125, 0.375, 0.5], [0.0, 0.75, 0.0, 0.25]]))
    assert depth.tolist() == [2.375, 1.5]
    probable, depth = leaving(torch.tensor([[0.5, 0.8, 0.25]]), cumulated=False)  # layers are reached with .5, .4, .1
    torch.testing.assert_close(probable, torch.tensor([[0.5, 0.1, 0.3, 0.1]]))
    assert float(depth) == pytest.approx(1.0)


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_every_exit_counts_as_much_as_it_is_probable(pool: str) -> None:
    model = model_with_fixed_gates(pool=pool, depth_penalty=0.1, exit_share=0.25)
    batch, seen = training_batch(model)
    loss = model.method.stages()[1].objective(batch)
    assert len(seen) == 1  # one pass

    def gate(state: State) -> Decision:
        return Decision(gate=torch.ones(state.n_sequences) if state.layer == 1 else GATES[state.ids, state.layer - 2])

    losses, head = [], model.method.own_head() or model.backbone.head
    for depth in (2, 3, 4):
        skipped = tuple(range(depth + 1, 5))
        run = model.reference.run(batch.inputs, Scripted(gate, "before"), 0.0, skip=skipped, keep_hidden=True)
        read = [run.hidden[i, :n].mean(dim=0) if pool == "mean" else run.hidden[i, 0] for i, n in enumerate(LENGTHS)]
        losses.append(nn.functional.cross_entropy(head(torch.stack(read)), batch.labels, reduction="none"))
    probable = torch.tensor([[0.125, 0.375, 0.5], [0.375, 0.0, 0.625], [0.75, 0.125, 0.125]])
    each, gates = torch.stack(losses, dim=1), GATES.sum(dim=1)
    expected = (0.75 * (probable * each).sum(dim=1) + 0.25 * each.mean(dim=1) + 0.1 * gates).mean()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_what_the_predictor_reads(pool: str) -> None:
    model, inputs, seen = tiny_model("alberta", pool=pool), random_inputs(LENGTHS), []
    model.method.predictor.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    model.run(inputs, GATED)
    with torch.no_grad():
        after_first = model.reference.hidden_states(inputs)[1]  # the first layer is static
    expected = [after_first[i, :n].mean(dim=0) if pool == "mean" else after_first[i, 0] for i, n in enumerate(LENGTHS)]
    assert torch.cat(seen).shape == (3, 32)
    for row in expected:
        assert any(torch.allclose(row, each, atol=1e-5) for each in torch.cat(seen))


def test_who_answers_tokens_or_lends_its_head_draws_layers() -> None:
    """There the answers of all exits are not at hand: of every token, or of the other part of a combination."""
    assert tiny_model("alberta").method.answers_all
    assert not tiny_model("alberta", task=Tokens(TAGS)).method.answers_all
    assert tiny_model("alberta", task=Tokens(TAGS)).method.own_head() is None
    assert not tiny_model("depth_mi+alberta").method.second.answers_all
    assert tiny_model("length_adaptive+alberta").method.second.answers_all


def test_without_early_exit_all_layers_run_gated() -> None:
    model, full = model_with_fixed_gates(early_exit=False), model_with_fixed_gates()
    assert model.method.dial.sweep == (IGNORED, GATED)
    inputs = random_inputs(LENGTHS)
    assert torch.equal(model.run(inputs, GATED).logits, full.run(inputs, GATED).logits)
    with pytest.raises(StrettoError, match=r"dial 'gate' between -1 and 0, got 0\.5"):
        model.run(inputs, 0.5)


def test_off_is_the_plain_model_whatever_the_gates() -> None:
    model, inputs = model_with_fixed_gates(), random_inputs(LENGTHS)
    named = {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "token_type_ids")}
    with torch.no_grad():
        expected = copy.deepcopy(model.encoder)(**named).logits
    torch.testing.assert_close(model.run(inputs, IGNORED).logits, expected, atol=1e-5, rtol=1e-5)
    mixed = model.run(inputs, torch.tensor([GATED, IGNORED, 0.9]))  # each sequence by its own dial
    torch.testing.assert_close(mixed.logits[1], expected[1], atol=1e-5, rtol=1e-5)
    assert mixed.trace.depth.tolist() == [4, 4, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"static_layers": 4}, "static_layers between 1 and 3, got 4 for 4 layers"),
        ({"static_layers": -1}, r"static_layers in \[0, ∞\), got -1"),
        ({"initial_gate": 1.0}, r"initial_gate in \(0, 1\), got 1\.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        tiny_model("alberta", **settings)
