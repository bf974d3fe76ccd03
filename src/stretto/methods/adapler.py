"""AdapLeR: each input loses the tokens that contribute too little, layer by layer.

Before every layer a small predictor distributes a contribution of 1 over the live tokens. Tokens below a learned
threshold are dropped. The predictors learn from the saliency of a fine-tuned model. In training, tokens fade instead:
their attention scores are lowered, more steeply from step to step, until this equals dropping them. Then the weights
are trained with tokens really dropped.

Modarressi, Mohebbi, Pilehvar: *AdapLeR: Speeding up Inference by Adaptive Length Reduction*, ACL 2022.

    S̃_l = softmax(CP_l(h^l)) over the present tokens, l = 0..L-1          -> `contributions`
    δ_l = η_l / n_l; a token stays if S̃ >= δ_l or it is [CLS]             -> `AdapLeR.decide`
    m⁻(S) = (λ/δ)(S - δ) - β/λ below δ, (S - 1) β / ((1 - δ) λ) above     -> `soft_removal`
    Ŝ_l = normalise(θ_l S_cls, S_rest), S the saliency                    -> `amplified`
    weights, CP: CE + γ Σ_l (L - l) KL(Ŝ_l ‖ S̃_l)                         -> `AdapLeR.adaptive_loss`
    η, θ: CE + φ Σ_l Σ_i exp(m_i^l); ∂/∂θ ≈ (1/θ) ∂/∂θ_d                  -> `AdapLeR.adaptive_loss`
    λ                                                                     -> `steepness`

Differs from the paper:

- λ grows from step to step and stays at or below 1e4 for most of the training (`schedule`), because η and θ learn
  nothing once removal is hard. Their learning rate is raised if there are too few steps to move η (`threshold_reach`).
- The fine-tuned model is the teacher (`distil`).
- The weights are trained further with tokens really dropped (`retrain_epochs`), as in PoWER-BERT, and the checkpoint is
  chosen after that.
- Saliency comes from the best checkpoint of the fine-tuning (`saliency_checkpoints`: the mean of several).
- One optimizer instead of two. The gradients of η and θ are clipped separately from those of the weights. The
  predictors, which start from random weights, have their own learning rate.
- m_i^l also counts what earlier layers removed, as the attention does.
- Batches of any size, and tasks that answer every token (its last state is restored).

As published: `schedule="epoch"`, `threshold_reach=0`, `distil=0`, `retrain_epochs=0`, `saliency_checkpoints=3`.

Dial: a factor on the learned thresholds. 0 is the full model, 1 is as trained, above 1 is cheaper.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from stretto.engine.reference import ReferenceEngine
from stretto.methods.base import ANY_ANSWER, Batches, Dial, Method, Notes, Shape, Stage, Targets, TrainingBatch
from stretto.methods.contribution import ContributionPredictors, divergence, saliency_notes
from stretto.methods.settings import Epochs, FinetuningConfig, LearningRate, Share, Size, Weight
from stretto.state import Compared, Decision, State
from stretto.tasks import Task

#: λ per epoch as published, by the number of epochs: (first, factor).
PUBLISHED_STEEPNESS = {3: (50.0, 50.0), 5: (10.0, 10.0), 10: (10.0, 3.0)}
SOFTEST, STILL_SOFT, STEEPEST = 10.0, 1e4, 1e5
SOFT_PART = 0.8  # of the training, until λ is STILL_SOFT
AS_TRAINED = 1.0  # the dial at which thresholds are the learned ones
ETA_RANGE = (0.01, 1.0)
THETA_LEAST = 0.01


@dataclass(frozen=True)
class AdapLeRConfig(FinetuningConfig):
    adaptive_epochs: Epochs = 5
    """Epochs of adaptive training (the second stage)."""
    adaptive_learning_rate: LearningRate = 3e-5
    """Learning rate of the backbone in the second stage."""
    predictor_learning_rate: LearningRate = 1e-3
    """Learning rate of the contribution predictors."""
    threshold_learning_rate: LearningRate = 5e-4
    """Minimum learning rate of the thresholds η and amplifiers θ."""
    threshold_reach: Share = 1.0
    """Fraction of its range (0.01 to 1) that η must be able to cross in the steps of the stage. The learning rate is
    raised for that, at most to 0.02. 0: never."""
    schedule: Literal["step", "epoch"] = "step"
    """When λ, the steepness of removal, grows: 'step' by step, or 'epoch' by epoch as published."""
    distil: Weight = 1.0
    """Weight of the distance to the fine-tuned model's answers. 0: labels only."""
    saliency_checkpoints: Size = 1
    """Saliency is the mean over this many best checkpoints of the fine-tuning (published: 3)."""
    gamma: Weight = 5e-3
    """γ: weight of the predictors' divergence from saliency (published: 5e-3 for SST-2, IMDB; 1e-1 for AG News)."""
    phi: Weight = 5e-4
    """φ: weight of the number of tokens (published: 5e-4 for SST-2, IMDB; 1e-1 for AG News)."""
    beta: Weight = 0.1
    """β: slope of the soft removal above the threshold."""
    predictor_size: Size = 32
    """Hidden size of a contribution predictor."""
    eta: Share = 0.25
    """η: where the thresholds start."""
    retrain_epochs: Epochs = 1
    """Epochs of a third stage, with tokens really dropped. It is fast, because texts are short then."""
    retrain_learning_rate: LearningRate = 3e-5
    """Learning rate of the third stage."""


def by_sequence(values: Tensor, state: State) -> Tensor:
    """[N] -> [B] sums over the rows of each sequence."""
    return values.new_zeros(state.n_sequences).index_add(0, state.sequence, values)


def contributions(logits: Tensor, state: State) -> Tensor:
    """[N] -> [N] softmax within each sequence."""
    highest = logits.detach().new_full((state.n_sequences,), -torch.inf)
    highest = highest.scatter_reduce(0, state.sequence, logits.detach(), "amax")
    exponents = (logits - highest[state.sequence]).exp()
    return exponents / by_sequence(exponents, state)[state.sequence]


def soft_removal(score: Tensor, threshold: Tensor, steepness: float, beta: float) -> Tensor:
    """[N], [N] -> [N] m⁻ in [-1e4, 0]: about 0 above the threshold, steeply down below it."""
    below = steepness / threshold * (score - threshold) - beta / steepness
    above = (score - 1) * beta / ((1 - threshold).clamp(min=1e-6) * steepness)
    return torch.where(score < threshold, below, above).clamp(-1e4, 0)


def amplified(salience: Tensor, presence: Tensor, theta: Tensor, state: State) -> Tensor:
    """[N] Ŝ: the saliency of the present tokens with that of position 0 times θ, summing to 1 in each sequence."""
    raised = salience * presence * torch.where(state.position == 0, theta, 1.0)
    tiny = torch.finfo(raised.dtype).tiny
    return raised / by_sequence(raised, state).clamp(min=tiny)[state.sequence]


def steepness(progress: float) -> float:
    """λ after a part of the training (0 to 1): geometric from 10 to 1e4 at 80 %, then on to 1e5: hard removal."""
    if progress <= SOFT_PART:
        return SOFTEST * (STILL_SOFT / SOFTEST) ** (progress / SOFT_PART)
    return STILL_SOFT * (STEEPEST / STILL_SOFT) ** min((progress - SOFT_PART) / (1 - SOFT_PART), 1.0)


def published_steepness(epoch: float, epochs: float) -> float:
    """λ after so many epochs: as published for 3, 5 and 10 of them, else geometric up to 1e5.

    It is raised from epoch to epoch; if there is only one, from step to step."""
    if epochs in PUBLISHED_STEEPNESS:
        first, factor = PUBLISHED_STEEPNESS[int(epochs)]
        return first * factor ** int(epoch)
    first, last = (10.0 if epochs >= 5 else 50.0), math.ceil(epochs) - 1
    progress = int(epoch) / last if last else epoch / epochs
    return first * (STEEPEST / first) ** min(progress, 1.0)


def layer_weights(n_layers: int) -> Tensor:
    """[L] L - l for l = 0..L-1: early layers weigh most."""
    return torch.arange(n_layers, 0, -1)


def zero_with_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The number 0, whose derivative by `parameter` is `gradient` (of the same shape)."""
    return ((parameter - parameter.detach()) * gradient).sum()


@dataclass
class Fading:
    """The context of a training pass in which tokens fade: its settings, and what the losses need from each layer."""

    steepness: float
    eta: Tensor
    """[L] thresholds, a copy to take gradients at."""
    theta_dummy: Tensor
    """[L] θ_d = 1"""
    divergence: list[Tensor] = field(default_factory=list)
    """Per layer [B] KL(Ŝ ‖ S̃)."""
    tokens: list[Tensor] = field(default_factory=list)
    """Per layer [B] Σ_i exp(m_i)."""


class AdapLeR(Method):
    name = "adapler"
    Config = AdapLeRConfig
    needs = ANY_ANSWER
    verbs = frozenset({"drop"})
    points = frozenset({"before"})
    restore = True
    monotone = False  # dropping a token changes the scores of the others in later layers
    dial = Dial(
        "threshold", "factor on the learned thresholds below which tokens leave; 0 keeps all, 1 is as trained",
        off=0.0, sweep=(0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0),
    )  # fmt: skip

    def __init__(self, config: AdapLeRConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.predictors = ContributionPredictors(shape, config.predictor_size)
        self.eta = nn.Parameter(torch.full((shape.n_layers,), config.eta))
        self.theta = nn.Parameter(torch.ones(shape.n_layers))

    def decide(self, state: State) -> Decision | None:
        if isinstance(state.context, Fading):
            return self.fade(state, state.context)
        asked = state.dial > 0  # [B] a sequence that keeps all tokens needs no predictor
        if not bool(asked.any()):
            return None
        score = contributions(self.predictors.ask(state, asked), state)
        eta = self.eta[state.layer - 1].clamp(*ETA_RANGE)
        threshold = (state.dial * eta / state.lengths)[state.sequence]  # [N]
        return Decision(drop=score < threshold, score=score, compared=Compared("contribution", score, threshold))

    def fade(self, state: State, fading: Fading) -> Decision:
        layer, notes, salience = state.layer - 1, state.notes_of(self).rows, state.input_notes["saliency"]
        gone = notes.get("gone", torch.zeros_like(salience))  # [N] Σ m of the layers below
        presence = gone.exp()
        dummy = torch.where(state.position == 0, fading.theta_dummy[layer].log(), 0.0)
        everyone = torch.ones_like(state.ids, dtype=torch.bool)
        score = contributions(self.predictors.ask(state, everyone) + gone + dummy, state)
        threshold = fading.eta[layer] / by_sequence(presence, state)  # [B]
        removed = soft_removal(score, threshold[state.sequence], fading.steepness, self.config.beta)
        removed = torch.where(state.protected, 0.0, removed)
        notes["gone"] = gone + removed

        target = amplified(salience, presence.detach(), self.theta[layer].detach(), state)
        fading.divergence.append(by_sequence(divergence(target, score), state))
        fading.tokens.append(by_sequence(notes["gone"].exp(), state))
        return Decision(attention_bias=removed)

    def stages(self) -> list[Stage]:
        config = self.config
        distils = config.distil > 0 and self.task.answers != "text"  # texts of the teacher are not computed
        finetuning = dataclasses.replace(self.finetuning(), keeps_best=config.saliency_checkpoints)
        adaptive = Stage(
            "adaptive", config.adaptive_epochs, config.adaptive_learning_rate, config.predictor_learning_rate,
            best_by="last" if config.retrain_epochs else "saving", decides=True, dials=(AS_TRAINED,),
            rates=(("eta", config.threshold_learning_rate), ("theta", config.threshold_learning_rate)),
            reach=config.threshold_reach * (ETA_RANGE[1] - ETA_RANGE[0]), teacher=distils,
            noted_by=config.saliency_checkpoints,
            objective=self.adaptive_loss, prepare=self.note_saliency, after_step=self.clip_thresholds,
        )  # fmt: skip
        retrain = Stage(
            "retrain", config.retrain_epochs, config.retrain_learning_rate, best_by="saving", decides=True,
            dials=(AS_TRAINED,), teacher=distils, objective=self.retrain_loss,
        )  # fmt: skip
        return [finetuning, adaptive, *([retrain] if config.retrain_epochs else [])]

    def note_saliency(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        return saliency_notes(engine, self.task, batches)

    def adaptive_loss(self, batch: TrainingBatch) -> Tensor:
        config = self.config
        eta = self.eta.detach().clone().requires_grad_()
        dummy = torch.ones_like(eta).requires_grad_()
        fading = Fading(self.steepness(batch.epoch), eta, dummy)
        logits = batch.run(self.dial.off, context=fading).logits
        task_loss = self.taught_loss(logits, batch.targets)
        weight = layer_weights(self.shape.n_layers).to(eta)
        distance = (weight * torch.stack(fading.divergence).mean(dim=1)).sum()
        tokens = torch.stack(fading.tokens).mean(dim=1).sum()

        # η and θ follow another objective than the weights: their gradients are taken here and handed on through
        # terms whose value is 0. θ is not in the graph; its dummy is.
        to_eta, to_dummy = torch.autograd.grad(task_loss + config.phi * tokens, (eta, dummy), retain_graph=True)
        hand_on = zero_with_gradient(self.eta, to_eta) + zero_with_gradient(self.theta, to_dummy / self.theta.detach())
        return task_loss + config.gamma * distance + hand_on

    def steepness(self, epoch: float) -> float:
        """λ after so many epochs of the adaptive stage."""
        epochs = self.config.adaptive_epochs
        return steepness(epoch / epochs) if self.config.schedule == "step" else published_steepness(epoch, epochs)

    def retrain_loss(self, batch: TrainingBatch) -> Tensor:
        return self.taught_loss(batch.run(AS_TRAINED).logits, batch.targets)

    def taught_loss(self, logits: Tensor, targets: Targets) -> Tensor:
        """The mean loss, and the distance to the fine-tuned model's answers."""
        loss = self.loss(logits, targets).mean()
        if targets.teacher is None or not self.config.distil:
            return loss
        return loss + self.config.distil * self.task.distillation(logits, targets.teacher, targets.labels).mean()

    @torch.no_grad()
    def clip_thresholds(self) -> None:
        self.eta.clamp_(*ETA_RANGE)
        self.theta.clamp_(min=THETA_LEAST)
