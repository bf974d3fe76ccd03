"""AdapLeR's equations on numbers computed by hand, and its gradients against numeric ones."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiny import random_inputs, tiny_backbone
from torch import Tensor

from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.engine.run import first_state
from stretto.methods import Shape, Targets, TrainingBatch
from stretto.methods.adapler import (
    AdapLeR,
    AdapLeRConfig,
    Fading,
    amplified,
    contributions,
    published_steepness,
    soft_removal,
    steepness,
    zero_with_gradient,
)
from stretto.methods.saliency import saliency
from stretto.state import Inputs, State
from stretto.tasks import Classification

LENGTHS = [6, 3, 9]


def two_sequences() -> State:
    return first_state(random_inputs([2, 3]), 0.0)


def test_contributions_sum_to_one_in_each_sequence() -> None:
    logits = torch.tensor([math.log(1.0), math.log(3.0), math.log(2.0), math.log(3.0), math.log(5.0)])
    expected = torch.tensor([0.25, 0.75, 0.2, 0.3, 0.5])
    torch.testing.assert_close(contributions(logits, two_sequences()), expected)
    torch.testing.assert_close(contributions(logits + 1e4, two_sequences()), expected, atol=1e-3, rtol=1e-3)


def test_soft_removal_by_hand() -> None:
    """λ = 10, β = 0.1, δ = 0.2: -β/λ = -0.01 on both sides of δ, 0 at S = 1, -10.01 at S = 0."""
    score = torch.tensor([0.0, 0.1, 0.2, 0.6, 1.0])
    found = soft_removal(score, torch.tensor(0.2), 10.0, 0.1)
    torch.testing.assert_close(found, torch.tensor([-10.01, -5.01, -0.01, -0.005, 0.0]))
    just_below = soft_removal(torch.tensor([0.2 - 1e-6]), torch.tensor(0.2), 10.0, 0.1)
    assert float(just_below) == pytest.approx(-0.01, abs=1e-4)


def test_soft_removal_becomes_hard() -> None:
    found = soft_removal(torch.tensor([0.0, 0.1999, 0.2001, 1.0]), torch.tensor(0.2), 1e5, 0.1)
    assert found[:2].tolist() == pytest.approx([-1e4, -50.0], rel=0.01)
    assert float(found[2:].abs().max()) < 1e-5


def test_a_lone_token_does_not_divide_by_zero() -> None:
    assert torch.isfinite(soft_removal(torch.tensor([1.0]), torch.tensor([1.0]), 10.0, 0.1)).all()


def test_amplified_saliency_by_hand() -> None:
    salience = torch.tensor([0.2, 0.8, 0.5, 0.25, 0.25])
    presence = torch.tensor([1.0, 0.5, 1.0, 1.0, 0.0])
    found = amplified(salience, presence, torch.tensor(2.0), two_sequences())
    # first: (0.4, 0.4); second: (1.0, 0.25, 0)
    torch.testing.assert_close(found, torch.tensor([0.5, 0.5, 0.8, 0.2, 0.0]))


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        (5, [10, 100, 1e3, 1e4, 1e5]),
        (10, [10 * 3**e for e in range(10)]),
        (3, [50, 2500, 125_000]),
        (2, [50, 1e5]),
        (1, [50]),
    ],
)
def test_published_steepness_by_epoch(epochs: int, expected: list[float]) -> None:
    assert [published_steepness(e, epochs) for e in range(epochs)] == pytest.approx(expected)


def test_in_a_single_epoch_removal_hardens_from_step_to_step() -> None:
    assert [published_steepness(e, 1) for e in (0, 0.5, 1)] == pytest.approx([50, (50 * 1e5) ** 0.5, 1e5])
    assert published_steepness(0.25, 0.5) == pytest.approx((50 * 1e5) ** 0.5)


def test_steepness_is_geometric_and_leaves_thresholds_most_of_the_training() -> None:
    assert [steepness(part) for part in (0, 0.4, 0.8, 0.9, 1)] == pytest.approx([10, 10**2.5, 1e4, 10**4.5, 1e5])
    by_step, by_epoch = (AdapLeRConfig(schedule=each, adaptive_epochs=5) for each in ("step", "epoch"))
    assert method_on(by_step)[0].steepness(2.5) == pytest.approx(steepness(0.5))
    assert method_on(by_epoch)[0].steepness(2.5) == 1000


def test_what_leaves_early_weighs_most() -> None:
    """γ Σ_l (L - l) KL_l: with L = 4 the divergence before the first layer counts four times."""
    method, engine = method_on(AdapLeRConfig(eta=0.8, gamma=0.5, distil=0.0))
    with torch.no_grad():
        for parameter in method.predictors.parameters():
            parameter.normal_(std=0.5)
    batch = training_batch(method, engine)
    fading = Fading(method.steepness(0.0), method.eta.detach().requires_grad_(), torch.ones(4, requires_grad=True))
    logits = batch.run(0.0, context=fading).logits
    kl = [float(layer.mean().detach()) for layer in fading.divergence]
    divergence = 4 * kl[0] + 3 * kl[1] + 2 * kl[2] + 1 * kl[3]
    expected = float(method.task.loss(logits, batch.labels).mean().detach()) + 0.5 * divergence
    assert float(stage_of(method).objective(batch).detach()) == pytest.approx(expected, rel=1e-5)
    assert abs(divergence - (1 * kl[0] + 2 * kl[1] + 3 * kl[2] + 4 * kl[3])) > 1e-2


def test_what_has_faded_stays_faded() -> None:
    """The tokens of a layer are Σ_i exp(m_i), m_i the sum of all layers so far."""
    method, engine = method_on()
    with torch.no_grad():
        for parameter in method.predictors.parameters():
            parameter.normal_(std=0.5)
    removed, decide = [], method.decide

    def watched(state: State) -> Any:
        decision = decide(state)
        removed.append(decision.attention_bias)
        return decision

    method.decide = watched  # type: ignore[method-assign]
    fading = Fading(method.steepness(0.0), method.eta.detach(), torch.ones(4))
    with torch.no_grad():
        training_batch(method, engine).run(0.0, context=fading)
    for below, tokens in zip(torch.stack(removed).cumsum(dim=0), fading.tokens, strict=True):
        expected = torch.stack([sequence.exp().sum() for sequence in below.split(LENGTHS)])
        torch.testing.assert_close(tokens, expected)
    assert (fading.tokens[-1] < fading.tokens[0] - 0.1).any()


def test_the_fine_tuned_model_teaches_in_both_stages() -> None:
    method, engine = method_on(AdapLeRConfig(eta=0.8, gamma=0.0, phi=0.0, distil=0.5))
    plain = training_batch(method, engine)
    teacher = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    taught = dataclasses.replace(plain, targets=Targets(plain.labels, teacher))
    _, adaptive, retrain = method.stages()
    assert adaptive.teacher and retrain.teacher
    for stage, run in ((adaptive, lambda: fading_pass(method, plain)), (retrain, lambda: plain.run(1.0).logits)):
        log_p, log_q = torch.log_softmax(teacher, dim=1), torch.log_softmax(run(), dim=1)
        kl = (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()
        extra = float((stage.objective(taught) - stage.objective(plain)).detach())
        assert extra == pytest.approx(0.5 * float(kl.detach()), rel=1e-4)
    alone, *_ = method_on(AdapLeRConfig(distil=0.0))
    assert not any(stage.teacher for stage in alone.stages())


def fading_pass(method: AdapLeR, batch: TrainingBatch) -> Tensor:
    fading = Fading(method.steepness(0.0), method.eta.detach(), torch.ones(4))
    return batch.run(0.0, context=fading).logits


def test_the_checkpoint_is_chosen_after_retraining() -> None:
    chosen = [[stage.best_by for stage in method_on(AdapLeRConfig(retrain_epochs=n))[0].stages()] for n in (1, 0)]
    assert chosen == [["score", "last", "saving"], ["score", "saving"]]


def method_on(config: AdapLeRConfig | None = None) -> tuple[AdapLeR, ReferenceEngine]:
    backbone = tiny_backbone("bert")
    torch.manual_seed(5)
    shape = Shape(backbone.d, backbone.n_layers, backbone.n_labels)
    method = AdapLeR(config or AdapLeRConfig(eta=0.8), shape, Classification(["a", "b", "c"]))
    return method, ReferenceEngine(backbone)


def training_batch(method: AdapLeR, engine: ReferenceEngine, epoch: float = 0.0) -> TrainingBatch:
    plain, labels = random_inputs(LENGTHS), torch.tensor([0, 2, 1])
    notes = {"saliency": saliency(engine, method.task, plain, labels)}
    inputs = Inputs(plain.input_ids, plain.attention_mask, plain.token_type_ids, notes=notes)

    def run(dial: float, skip: tuple[int, ...] = (), context: Any = None) -> Any:
        return engine.run(inputs, method, dial, skip=skip, context=context)

    return TrainingBatch(inputs, Targets(labels), run, 0, epoch, engine)


def stage_of(method: AdapLeR) -> Any:
    return method.stages()[1]


def threshold_objective(method: AdapLeR, batch: TrainingBatch, eta: Tensor, dummy: Tensor) -> float:
    """CE + φ Σ_l Σ_i exp(m), written down apart from the method's."""
    fading = Fading(steepness(0), eta, dummy)
    with torch.no_grad():
        logits = batch.run(0.0, context=fading).logits
    tokens = sum(float(layer.mean()) for layer in fading.tokens)
    return float(method.task.loss(logits, batch.labels).mean()) + method.config.phi * tokens


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_gradients_of_eta_and_theta_are_numeric_derivatives(layer: int) -> None:
    method, engine = method_on(AdapLeRConfig(eta=0.8, phi=0.1))
    engine.backbone.model.double()
    method.double()
    try:
        with torch.no_grad():
            method.theta.fill_(2.0)
        batch = training_batch(method, engine)
        stage_of(method).objective(batch).backward()
        assert method.eta.grad is not None
        assert method.theta.grad is not None
        eta, ones, step = method.eta.detach(), torch.ones_like(method.eta.detach()), 1e-6
        nudge = torch.zeros_like(eta)
        nudge[layer] = step

        def slope(at: Any) -> float:
            return (at(nudge) - at(-nudge)) / (2 * step)

        by_eta = slope(lambda by: threshold_objective(method, batch, eta + by, ones))
        by_dummy = slope(lambda by: threshold_objective(method, batch, eta, ones + by))
        assert float(method.eta.grad[layer]) == pytest.approx(by_eta, rel=1e-3, abs=1e-7)
        assert float(method.theta.grad[layer]) == pytest.approx(by_dummy / 2, rel=1e-3, abs=1e-7)  # (1/θ) ∂/∂θ_d
        assert by_eta != 0
        assert by_dummy != 0
    finally:
        engine.backbone.model.float()
        engine.backbone.model.zero_grad()


def test_weights_do_not_follow_the_number_of_tokens() -> None:
    """φ reaches η and θ alone, γ the weights and predictors alone."""
    gradients: dict[tuple[float, float], dict[str, Tensor]] = {}
    for gamma, phi in ((0.1, 0.0), (0.1, 10.0), (5.0, 0.0)):
        method, engine = method_on(AdapLeRConfig(eta=0.8, gamma=gamma, phi=phi))
        engine.backbone.model.zero_grad()
        stage_of(method).objective(training_batch(method, engine)).backward()
        encoder = next(iter(engine.backbone.encoder.parameters()))
        assert encoder.grad is not None
        named = {name: p.grad.clone() for name, p in method.named_parameters() if p.grad is not None}
        gradients[gamma, phi] = {**named, "encoder": encoder.grad.clone()}
        engine.backbone.model.zero_grad()
    plain, long, close = gradients.values()
    for name in plain:
        is_threshold = name in ("eta", "theta")
        assert torch.equal(plain[name], long[name]) != is_threshold, name
        assert torch.equal(plain[name], close[name]) == is_threshold, name


def test_hard_fading_equals_dropping() -> None:
    """In the last epoch the faded pass gives what inference gives."""
    method, engine = method_on(AdapLeRConfig(eta=0.9, adaptive_epochs=5))
    with torch.no_grad():
        for parameter in method.predictors.parameters():
            parameter.normal_(std=0.5)
    batch = training_batch(method, engine)
    with torch.no_grad():
        soft = batch.run(0.0, context=Fading(1e9, method.eta.detach(), torch.ones_like(method.eta))).logits
    hard = PackedEngine(engine.backbone).run(random_inputs(LENGTHS), method, 1.0)
    torch.testing.assert_close(soft, hard.logits, atol=1e-4, rtol=1e-4)
    assert int(hard.trace.n_ffn[:, -1].sum()) < sum(LENGTHS)  # tokens did leave


def test_thresholds_stay_in_their_range() -> None:
    method, _ = method_on()
    with torch.no_grad():
        method.eta.copy_(torch.tensor([-1.0, 0.5, 2.0, 1.0]))
        method.theta.fill_(-3.0)
    stage_of(method).after_step()
    assert method.eta.tolist() == pytest.approx([0.01, 0.5, 1.0, 1.0])
    assert (method.theta > 0).all()


def test_zero_with_gradient() -> None:
    parameter = torch.tensor([3.0, 4.0], requires_grad=True)
    zero = zero_with_gradient(parameter, torch.tensor([0.5, -2.0]))
    zero.backward()
    assert float(zero.detach()) == 0.0
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.5, -2.0]
