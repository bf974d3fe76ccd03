"""The equations of the exit methods, on numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiny import make, random_inputs, tiny_model

from stretto.engine.decider import Silent
from stretto.errors import StrettoError
from stretto.methods import METHODS, Pass, Shape, Targets
from stretto.methods.branchynet import quantile_factors, weighted_loss
from stretto.methods.deebert import entropy
from stretto.methods.folds import held_out, held_out_answers
from stretto.methods.halting import depth_at_quantile, oracle_depth, settled_depth
from stretto.methods.pabee import agreements
from stretto.methods.shallow_deep import confidence
from stretto.state import State
from stretto.tasks import Classification, Regression
from stretto.training.learner import Learner

SHAPE = Shape(d=4, n_layers=3, n_labels=2)
TASK = Classification(["no", "yes"])


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def state(layer: int, logits: list[list[float]], dial: float, notes: dict | None = None, **providers) -> State:
    """A state of single-row sequences after a layer, with given exit logits."""
    n = len(logits)
    index = torch.arange(n)
    return State(
        layer=layer, point="after", rows=torch.zeros(n, 4), sequence=index, position=torch.zeros_like(index),
        frozen=torch.zeros(n, dtype=torch.bool), protected=torch.ones(n, dtype=torch.bool), ids=index, row_ids=index,
        dial=torch.full((n,), dial, dtype=torch.float64), lengths=torch.ones_like(index),
        decider_macs=torch.zeros_like(index), notes={} if notes is None else notes,
        providers={"exit_logits": lambda: torch.tensor(logits), **providers},
    )  # fmt: skip


def forward(*logits: list[list[float]], step: int = 0) -> Pass:
    stacked = torch.tensor(logits)
    return Pass((1, 2), stacked, torch.zeros(2, stacked.shape[1], 4), Targets(torch.tensor([1])), step)


def test_entropy() -> None:
    assert entropy(log(0.5, 0.5)) == pytest.approx(1.0)
    assert entropy(log(0.25, 0.25, 0.25, 0.25)) == pytest.approx(1.0)
    expected = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2)  # 0.4690
    assert entropy(log(0.9, 0.1)) == pytest.approx(expected, abs=1e-6)
    assert entropy(torch.tensor([1e4, -1e4])) == 0.0  # no overflow, no NaN
    assert entropy(torch.tensor([60000.0, -60000.0], dtype=torch.float16)) == 0.0


def test_deebert_leaves_below_the_threshold_only() -> None:
    method = METHODS["deebert"](METHODS["deebert"].Config(), SHAPE, TASK)
    sure, unsure = log(0.99, 0.01).tolist(), log(0.6, 0.4).tolist()  # entropies 0.0808, 0.9710
    assert method.decide(state(1, [sure, unsure], 0.5)).exit.tolist() == [True, False]
    assert method.decide(state(1, [sure, unsure], 0.0)).exit.tolist() == [False, False]


def test_deebert_sums_the_ramps_and_leaves_the_final_head_alone() -> None:
    method = METHODS["deebert"](METHODS["deebert"].Config(), SHAPE, TASK)
    ramp_1, ramp_2, final = log(0.5, 0.5).tolist(), log(0.25, 0.75).tolist(), log(0.1, 0.9).tolist()
    loss = method.stages()[1].objective(forward([ramp_1], [ramp_2], [final]))
    assert loss == pytest.approx(-math.log(0.5) - math.log(0.75))


def test_joint_losses_weigh_the_exits() -> None:
    logits = forward([log(0.5, 0.5).tolist()], [log(0.25, 0.75).tolist()], [log(0.1, 0.9).tolist()])
    l1, l2, l3 = -math.log(0.5), -math.log(0.75), -math.log(0.9)
    expected = {
        "branchynet": (l1 + l2 + l3) / 3,
        "shallow_deep": (1 * l1 + 2 * l2 + 3 * l3) / 6,
        "pabee": (1 * l1 + 2 * l2 + 3 * l3) / 6,
    }
    for name, value in expected.items():
        method = METHODS[name](METHODS[name].Config(), SHAPE, TASK)
        assert method.stages()[-1].objective(logits) == pytest.approx(value), name
    assert weighted_loss(torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0])) == pytest.approx(7 / 4)


@pytest.mark.parametrize("name", ["branchynet", "shallow_deep", "pabee", "lte"])
def test_joint_exits_start_from_the_pretrained_encoder(name: str) -> None:
    def stages(**settings: Any) -> list[Any]:
        return METHODS[name](METHODS[name].Config(**settings), SHAPE, TASK).stages()

    joint, *alone = stages()
    assert [stage.name for stage in alone] == (["uncertainty"] if name == "lte" else [])
    assert (joint.name, joint.epochs, joint.method_learning_rate, joint.layers) == ("joint", 2, 5e-4, (1, 2))
    assert joint.trains_backbone and not joint.taught and not joint.detached  # there is no full model yet
    backbone, exits, joint, *_ = stages(joint_start="finetuned", detached=True)
    assert [stage.name for stage in (backbone, exits, joint)] == ["backbone", "exits", "joint"]
    assert joint.taught and joint.detached


@pytest.mark.parametrize("beneath", [None, "constant_ratio"])
def test_detached_layers_learn_from_their_own_exit_alone(beneath: str | None) -> None:
    """Layer n (from 1) gets a gradient from exit n, and from none above; the last layer from the final head."""
    reached = {}
    for detached in (False, True):
        model = tiny_model("pabee", detached=detached)
        (stage,) = model.method.stages()
        if beneath:
            stage = dataclasses.replace(stage, beneath=make(beneath, model.backbone))
        forward = Learner(model, stage).read(random_inputs([5, 3]), Targets(torch.tensor([0, 1])))
        weights = [spec.ffn.out.weight for spec in model.backbone.specs]
        for answer, logits in enumerate(forward.logits, start=1):
            found = torch.autograd.grad(logits.sum(), weights, retain_graph=True, allow_unused=True)
            reached[detached, answer] = [n for n, each in enumerate(found, 1) if each is not None and each.any()]
    assert [reached[False, n] for n in (1, 2, 3, 4)] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert [reached[True, n] for n in (1, 2, 3, 4)] == [[1], [2], [3], [4]]


def test_branchynet_thresholds_per_exit() -> None:
    config = METHODS["branchynet"].Config(factors=(0.5, 1.0))
    method = METHODS["branchynet"](config, SHAPE, TASK)
    logits = [log(0.9, 0.1).tolist()]  # entropy 0.469
    assert method.decide(state(1, logits, 0.6)).exit.tolist() == [False]  # threshold 0.3
    assert method.decide(state(2, logits, 0.6)).exit.tolist() == [True]  # threshold 0.6
    with pytest.raises(StrettoError, match="Expected 2 threshold factors"):
        METHODS["branchynet"](METHODS["branchynet"].Config(factors=(1.0,)), SHAPE, TASK)
    entropies = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [0.0, 0.1, 0.2, 0.3, 0.4]])
    assert quantile_factors(entropies, 0.5, dial=0.5).tolist() == pytest.approx([0.6, 0.4])


def test_shallow_deep_is_strict() -> None:
    assert confidence(log(0.2, 0.8)) == pytest.approx(0.8)
    method = METHODS["shallow_deep"](METHODS["shallow_deep"].Config(), SHAPE, TASK)
    certain, likely = [1000.0, -1000.0], log(0.2, 0.8).tolist()
    assert method.decide(state(1, [certain, likely], 1.0)).exit.tolist() == [False, False]
    assert method.decide(state(1, [certain, likely], 0.7)).exit.tolist() == [True, True]


def test_patience_counts_agreements_and_forgets_them_on_a_change() -> None:
    count = torch.tensor([0, 2, 2])
    assert agreements(count, torch.tensor([True, True, False])).tolist() == [1, 3, 0]
    a, b = torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    assert TASK.same_answer(a, b, 0.0).tolist() == [True, False]
    close = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.04], [1.06]])
    assert Regression().same_answer(*close, 0.05).tolist() == [True, False]


def test_pabee_leaves_after_patience_plus_one_layers_at_the_earliest() -> None:
    method = METHODS["pabee"](METHODS["pabee"].Config(), Shape(4, 6, 2), TASK)
    notes: dict = {}
    answers = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]  # argmax 0 0 1 1 1
    leaves = [bool(method.decide(state(i + 1, [a], 2.0, notes)).exit) for i, a in enumerate(answers)]
    assert leaves == [False, False, False, False, True]
    notes = {}
    assert [bool(method.decide(state(i + 1, [a], 1.0, notes)).exit) for i, a in enumerate(answers[:2])] == [False, True]
    notes = {}
    assert not any(bool(method.decide(state(i + 1, [a], 0.0, notes)).exit) for i, a in enumerate(answers))


def test_oracle_depth_takes_the_shallowest_right_exit() -> None:
    correct = torch.tensor([[False, True, False, True], [True, True, False, False], [True, True, False, True]])
    # C - λn, λ = 0.1: columns [−.1 .8 .7] [.9 .8 .7] [−.1 −.2 −.3] [.9 −.2 .7]
    assert oracle_depth(correct, 0.1).tolist() == [2, 1, 1, 1]
    # a layer that costs more than being right is worth is never bought
    assert oracle_depth(torch.tensor([[False], [False], [True]]), 0.6).tolist() == [1]


def test_an_answer_has_to_stay_right() -> None:
    luck, always, never = [True, False, True], [True] * 3, [False] * 3
    from_second, not_at_the_end = [False, True, True], [True, True, False]
    correct = torch.tensor([luck, always, never, from_second, not_at_the_end]).T
    assert settled_depth(correct).tolist() == [3, 1, 3, 2, 3]
    assert settled_depth(correct.view(3, 5, 1)).tolist() == [[3], [1], [3], [2], [3]]


def test_halting_learns_the_noted_depth_and_of_dev_texts_the_exits_own() -> None:
    method = METHODS["halting"](METHODS["halting"].Config(), SHAPE, TASK)
    with torch.no_grad():
        method.predictor.weight.zero_()
        method.predictor.bias.copy_(log(0.5, 0.3, 0.2))
    wrong, right = log(0.75, 0.25).tolist(), log(0.25, 0.75).tolist()
    stage, passed = method.stages()[-1], forward([right], [wrong], [right])  # stays right from 3 on
    assert stage.objective(passed).item() == pytest.approx(-math.log(0.2))
    noted = Targets(torch.tensor([1]), notes={"text_oracle": torch.tensor([[2]])})
    assert stage.objective(dataclasses.replace(passed, targets=noted)).item() == pytest.approx(-math.log(0.3))
    published = METHODS["halting"](METHODS["halting"].Config(oracle="first", folds=0), SHAPE, TASK)
    published.load_state_dict(method.state_dict())
    assert published.stages()[-1].prepare is None
    assert published.stages()[-1].objective(passed).item() == pytest.approx(-math.log(0.5))


def test_held_out_answers_are_those_of_exits_that_have_not_seen_the_text() -> None:
    """Labels that nothing tells: exits know those they were fitted to by heart, and guess the others."""
    model = tiny_model("halting")
    torch.manual_seed(1)
    inputs = random_inputs([9] * 60)
    labels = torch.randint(0, 2, (60,))
    config = METHODS["halting"].Config(folds=3, exit_learning_rate=0.02, dropout=0.0)
    answers, given = held_out_answers(model.reference, [(inputs, labels)], model.task, model.method.shape, config)
    assert answers.shape == (4, 60, 2) and torch.equal(given, labels)
    with torch.no_grad():
        torch.testing.assert_close(answers[-1], model.reference.run(inputs, Silent(), 0.0).logits, atol=1e-5, rtol=1e-5)
    seen: list[torch.Tensor] = []

    def by_heart(answers: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        seen.append(index)
        return torch.nn.functional.cross_entropy(answers, labels[index])

    heads = held_out(lambda: torch.nn.Linear(32, 2), torch.randn(60, 32), by_heart, folds=3, rate=0.01)
    assert len(heads) == 3
    per_fold = len(seen) // 3
    for fold in range(3):
        fitted = torch.cat(seen[fold * per_fold : (fold + 1) * per_fold])
        assert set(fitted.tolist()) == {i for i in range(60) if i % 3 != fold}
    assert 0.2 < float((answers[2].argmax(dim=1) == labels).float().mean()) < 0.8


def test_halting_depth_is_a_quantile() -> None:
    logits = log(0.5, 0.3, 0.2).double().expand(5, 3)
    quantiles = torch.tensor([0.0, 0.4, 0.6, 0.9, 1.0], dtype=torch.float64)
    assert depth_at_quantile(logits, quantiles).tolist() == [1, 1, 2, 3, 3]
    assert depth_at_quantile(torch.zeros(1, 4), torch.tensor([0.5])).tolist() == [2]  # just reached is enough


def test_halting_decides_once() -> None:
    method = METHODS["halting"](METHODS["halting"].Config(), SHAPE, TASK)
    with torch.no_grad():
        method.predictor.weight.zero_()
        method.predictor.bias.copy_(log(0.1, 0.8, 0.1))
    notes: dict = {}
    first = state(1, [[0.0, 0.0]], 0.5, notes, pooled=lambda: torch.zeros(1, 4))
    assert method.decide(first).exit.tolist() == [False]
    assert first.decider_macs.tolist() == [4 * 3]
    assert method.decide(state(2, [[0.0, 0.0]], 0.5, notes)).exit.tolist() == [True]


def test_lte_targets_and_alternation() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    assert TASK.wrongness(logits, torch.tensor([0, 0])).tolist() == [0.0, 1.0]
    assert Regression().wrongness(torch.tensor([[1.0]]), torch.tensor([1.5])) == pytest.approx(math.tanh(0.5))
    method = METHODS["lte"](METHODS["lte"].Config(), SHAPE, TASK)
    with torch.no_grad():
        method.predictor.weight.zero_()
        method.predictor.bias.zero_()  # u = 0.5 everywhere
    joint, alone = method.stages()
    exits = ([log(0.75, 0.25).tolist()], [log(0.25, 0.75).tolist()], [log(0.1, 0.9).tolist()])  # wrong, right, final
    predictor = ((0.5 - 1) ** 2 + (0.5 - 0) ** 2) / 2
    l1, l2, l3 = -math.log(0.25), -math.log(0.75), -math.log(0.9)
    even = joint.objective(forward(*exits, step=0))
    odd = joint.objective(forward(*exits, step=1))
    assert even.item() == pytest.approx(l3 + predictor)
    assert odd.item() == pytest.approx((l1 + l2 + l3) / 3 + predictor)
    assert not alone.trains_backbone
    assert alone.objective(forward(*exits)).item() == pytest.approx(predictor)  # of dev texts nothing is noted
    noted = Targets(torch.tensor([1]), notes={"text_wrongness": torch.tensor([[0.25, 0.5]])})
    told = dataclasses.replace(forward(*exits), targets=noted)
    assert alone.objective(told).item() == pytest.approx((0.25**2 + 0.0**2) / 2)


def test_the_predictor_of_lte_teaches_the_backbone_nothing() -> None:
    method = METHODS["lte"](METHODS["lte"].Config(), SHAPE, TASK)
    read = forward([[0.0, 1.0]], [[1.0, 0.0]], [[0.0, 1.0]])
    pooled = torch.ones_like(read.pooled, requires_grad=True)
    method.predictor_loss(dataclasses.replace(read, pooled=pooled)).backward()
    assert method.predictor.weight.grad is not None
    assert pooled.grad is None


def test_lte_leaves_where_little_error_is_expected() -> None:
    method = METHODS["lte"](METHODS["lte"].Config(), Shape(4, 3, 1), Regression())
    with torch.no_grad():
        method.predictor.weight.fill_(1.0)
        method.predictor.bias.zero_()
    pooled = torch.tensor([[-1.0, 0, 0, 0], [1.0, 0, 0, 0]])  # σ: 0.269, 0.731
    got = method.decide(state(1, [[0.0], [0.0]], 0.5, pooled=lambda: pooled))
    assert got.exit.tolist() == [True, False]


@pytest.mark.parametrize(("n_layers", "patiences"), [(4, (3.0, 2.0, 1.0)), (24, tuple(map(float, range(23, 0, -1))))])
def test_pabee_is_measured_at_every_patience_there_is(n_layers: int, patiences: tuple[float, ...]) -> None:
    method = METHODS["pabee"](METHODS["pabee"].Config(), Shape(4, n_layers, 2), TASK)
    assert method.dial.sweep == (0.0, *patiences)


def test_static_depth_trains_its_exit_like_the_others() -> None:
    stages = METHODS["static_depth"](METHODS["static_depth"].Config(depth=2), SHAPE, TASK).stages()
    assert [(stage.name, stage.layers, stage.trains_backbone) for stage in stages] == [
        ("backbone", (), True), ("exits", (2,), False), ("shallow", (2,), True),
    ]  # fmt: skip
    assert not any(stage.final for stage in stages[1:])


def test_static_depth_offers_what_was_trained() -> None:
    method = METHODS["static_depth"](METHODS["static_depth"].Config(depth=2), SHAPE, TASK)
    assert method.dial.sweep == (3.0, 2.0)
    assert method.decide(state(1, [[0.0, 0.0]], 2.0)) is None
    assert method.decide(state(2, [[0.0, 0.0]], 2.0)).exit.tolist() == [True]
    assert method.decide(state(2, [[0.0, 0.0]], 3.0)).exit.tolist() == [False]
    only = Pass((2,), log(0.25, 0.75).view(1, 1, 2), torch.zeros(1, 1, 4), Targets(torch.tensor([1])))
    loss = method.stages()[-1].objective(only)
    assert loss == pytest.approx(-math.log(0.75))
    with pytest.raises(StrettoError, match="between 1 and 2"):
        METHODS["static_depth"](METHODS["static_depth"].Config(depth=3), SHAPE, TASK)
