"""A configuration per text for a Length-Adaptive model: the predictor is fitted, and its dial is measured.

    every configuration of the frontier is run on every text         -> `Observed.of`
    log divergence from the full model ≈ W · mean row after layer 1  -> `ridge`: least squares with a penalty on W
    for a price: each text takes the least divergence + price · cost -> `methods.length_adaptive.PerInput`
    prices become costs, so that the dial is a budget as before      -> `priced`

If the rows tell nothing, the penalty that predicts best on held-out texts is a large one. W is then close to 0 and all
texts get the same configuration, as without the predictor.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stretto.backbones.heads import READINGS
from stretto.budget.choose import default_point
from stretto.budget.sweep import sweep
from stretto.budget.teacher import Teacher
from stretto.data import Dataset
from stretto.data.batches import batches
from stretto.engine.cost import Cost
from stretto.errors import StrettoError
from stretto.methods.length_adaptive import FixedLengths, LengthAdaptive, PerInput
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint

#: Penalties that are tried, as multiples of the features' mean variance, and parts of the texts held out in turn.
PENALTIES, FOLDS = (0.1, 1.0, 10.0, 100.0, 1000.0), 5
#: Divergences below this count as this: their logarithm says nothing any more.
LEAST = 1e-6
#: Prices that are tried.
PRICES = 60


@dataclass(frozen=True)
class Observed:
    """What each of n sequences was seen to do. F configurations, beside the full model."""

    pooled: Tensor
    """[n, d] mean row after layer 1."""
    distance: Tensor
    """[n, F] logarithm of the divergence from the full model's answer."""
    flops: Tensor
    """[n, F + 1] the full model first."""

    @classmethod
    def of(
        cls, model: AdaptiveModel, method: LengthAdaptive, teacher: Teacher, batch_size: int, progress: bool
    ) -> Observed:
        features, pad = teacher.encoded.features, model.tokenizer.pad_token_id
        distance, flops = [], []
        for lengths in tqdm(method.frontier, desc="configurations", disable=not progress, leave=False):
            fixed = FixedLengths(torch.cat([torch.ones_like(lengths[:1]), lengths[1:]]))  # layer 1 keeps all
            logits, trace = model.run_features(features, method.dial.off, batch_size, context=fixed)
            distance.append(teacher.divergence(logits))
            flops.append(Cost.of(trace, model.backbone).flops)
        with torch.no_grad():
            pooled = [
                READINGS["mean"].of_tokens(model.reference.hidden_states(inputs)[1], inputs.attention_mask)
                for inputs in batches(features, pad, batch_size)
            ]
        return cls(
            torch.cat(pooled).double(),
            torch.stack(distance[1:], dim=1).double().clamp(min=LEAST).log(),
            torch.stack(flops, dim=1).double(),
        )


def solve(x: Tensor, y: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """[n, d], [n, F] -> W [F, d], b [F] with the least |x Wᵀ + b - y|² + penalty · variance · n · |W|²."""
    center, level = x.mean(dim=0), y.mean(dim=0)
    x, y = x - center, y - level
    ridge = penalty * x.square().mean() * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    weight = torch.linalg.solve(x.T @ x + ridge, x.T @ y).T
    return weight, level - weight @ center


def ridge(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The solution with the penalty that predicts best what was held out."""

    def held_out_error(penalty: float) -> float:
        total = 0.0
        for fold in range(FOLDS):
            held = torch.arange(len(x)) % FOLDS == fold
            weight, bias = solve(x[~held], y[~held], penalty)
            total += float((x[held] @ weight.T + bias - y[held]).square().sum())
        return total

    return solve(x, y, min(PENALTIES, key=held_out_error))


def priced(observed: Observed, per_input: PerInput, costs: Tensor) -> tuple[list[float], list[float]]:
    """Prices, and what all texts together cost at them; each costs less than the one before."""
    distances = per_input.distances(observed.pooled.float())
    full, asked = float(observed.flops[:, 0].sum()), 2 * per_input.macs * len(distances)
    prices: list[float] = []
    found: list[float] = []
    for price in torch.logspace(-6, 3, PRICES, dtype=torch.float64).tolist():
        choice = (distances + price * costs).argmin(dim=-1)
        cost = (float(observed.flops.gather(1, choice.unsqueeze(1)).sum()) + asked) / full
        if cost < (found[-1] if found else 1.0) - 1e-4:
            prices.append(price)
            found.append(cost)
    return prices, found


def fit_per_input(
    model: AdaptiveModel, data: Dataset, *, batch_size: int = 32, progress: bool = True
) -> list[OperatingPoint]:
    """Give a searched model a predictor that chooses for each text, measure its dial, and set the default."""
    method = model.method
    if not isinstance(method, LengthAdaptive) or not method.config.frontier:
        raise StrettoError("Expected a length_adaptive model after `stretto search`, got another. Search first.")
    if len(data) < 2 * FOLDS:
        raise StrettoError(f"Expected {2 * FOLDS} texts or more to fit a predictor on, got {len(data)}. Add texts.")
    encoded = model.encode(data.texts)
    teacher = Teacher(model, encoded, batch_size)
    observed = Observed.of(model, method, teacher, batch_size, progress)
    weight, bias = ridge(observed.pooled, observed.distance)
    start = dataclasses.replace(method.config, prices=(1.0,), price_costs=(0.5,))  # to be found
    per_input = PerInput(start, method.shape.d, method.costs)
    with torch.no_grad():
        per_input.linear.weight.copy_(weight)
        per_input.linear.bias.copy_(bias)
        prices, costs = priced(observed, per_input, method.costs)
    if not prices:
        raise StrettoError(
            "Expected texts that some configuration shortens, got none that costs less than the full model with the "
            "predictor. Search on longer texts."
        )
    chooser = method.changed(prices=tuple(prices), price_costs=tuple(costs))
    assert chooser.per_input is not None
    chooser.per_input.load_state_dict(per_input.state_dict())
    model.method = chooser
    points = sweep(model, data, batch_size=batch_size, progress=progress, encoded=encoded, teacher=teacher)
    model.operating_points = points
    model.dial = default_point(points, chooser.dial).dial
    return points
