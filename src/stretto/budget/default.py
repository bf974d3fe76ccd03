"""The dial of a model just trained: guaranteed where the dev data allow it, else an estimate, else the full model.

A guarantee needs examples that nothing was chosen on, and the dev data choose checkpoints. So a part of the dev data is
kept for the guarantee alone, if there are enough for both. `choose.default_point` has the rules.
"""

from __future__ import annotations

import dataclasses

from stretto.budget.calibrate import MaxLoss, TooFewExamples, calibrate
from stretto.budget.choose import default_point
from stretto.budget.risk import Risk, have_mapie
from stretto.budget.sweep import sweep
from stretto.data import Dataset, divide
from stretto.model import AdaptiveModel

#: What the default dial of a trained model promises if it can.
GOAL = MaxLoss(points=1.0, confidence=0.95)
#: Dev examples that checkpoints are chosen by, at least.
CHOOSING = 100


def can_guarantee(model: AdaptiveModel) -> bool:
    """Whether a loss of score against the full model can be bounded at all."""
    dial = model.method.dial
    return have_mapie() and model.task.judged and dial.trained is None and len(dial.sweep) > 1


def parts_of(model: AdaptiveModel, dev: Dataset, seed: int) -> tuple[Dataset, Dataset | None]:
    """Dev examples to choose checkpoints by, and others to give a guarantee on: half of them, or as many as it takes.

    None for a guarantee, where it cannot be given or too few would be left to choose by."""
    if not can_guarantee(model):
        return dev, None
    least = fewest(model)
    if len(dev) < least + CHOOSING:
        return dev, None
    return divide(dev, max(least, len(dev) // 2), seed)


def fewest(model: AdaptiveModel) -> int:
    """Examples without which there is no guarantee, even if nothing is lost."""
    least = Risk(GOAL.allowed, GOAL.confidence, binary=model.task.right_or_wrong).examples_needed()
    assert least is not None  # nothing is less than what is allowed
    return least


def set_default(model: AdaptiveModel, dev: Dataset, fresh: Dataset | None, *, seed: int, progress: bool = True) -> None:
    """Measure the operating points on all dev examples, try to guarantee one on the fresh ones, and set the dial."""
    model.operating_points = points = sweep(model, dev, progress=progress)
    guaranteed, needed = None, None
    if fresh is not None:
        try:
            guaranteed = calibrate(model, fresh, GOAL, seed=seed, progress=progress)
        except TooFewExamples as error:
            needed = error.needed
    elif can_guarantee(model):
        needed = fewest(model)
    chosen = default_point(points, model.method.dial, guaranteed)
    model.dial = chosen.dial
    if needed is not None:
        noted = dataclasses.replace(chosen, needs=needed)
        model.operating_points = [noted if point is chosen else point for point in points]
