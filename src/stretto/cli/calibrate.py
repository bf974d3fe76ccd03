"""`stretto calibrate`: find the dial for a cost, a latency or a loss, and store it by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from stretto.cli.guard import data_name
from stretto.cli.options import (
    SOURCES,
    BatchSize,
    Delimiter,
    Dtype,
    Json,
    Label,
    ModelFolder,
    Seed,
    Split,
    Text,
    TextB,
)
from stretto.cli.output import STDOUT, on_terminal, open_model, say, say_cut, write_json
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.budget.calibrate import Goal
    from stretto.model import AdaptiveModel
    from stretto.saving.points import OperatingPoint

EXAMPLES = """
stretto calibrate reviews-model texts.csv --cost 0.4                            # 40 % of the FLOPs; no labels needed
stretto calibrate reviews-model texts.csv --latency-ms 20 --batch 8             # 95 % of the batches, on this machine
stretto calibrate reviews-model labelled.csv --max-loss 1 --confidence 0.95     # at most one point, guaranteed
stretto calibrate reviews-model texts.csv --agreement 0.98 --name careful       # the full model's answers; no labels
stretto calibrate reviews-model labelled.csv --max-loss 1 --dtype int8 --default
stretto predict reviews-model texts.csv --budget careful
"""

Data = Annotated[
    str, Argument(metavar="DATA", help=f"Typical texts of your application: {SOURCES}.", callback=data_name)
]


def calibrate(
    model: ModelFolder,
    data: Data,
    cost: Annotated[float | None, Option(help="Fraction of the full model's FLOPs, on average.")] = None,
    latency_ms: Annotated[float | None, Option(help="Milliseconds for a batch, on this machine.")] = None,
    batch: Annotated[int | None, Option(min=1, help="With --latency-ms: texts in a batch (default: 1).")] = None,
    percentile: Annotated[
        float | None, Option(help="With --latency-ms: percent of the batches in time (default: 95).")
    ] = None,
    max_loss: Annotated[
        float | None,
        Option(help="Points of score that may be lost against the full model, with a guarantee. Needs labels."),
    ] = None,
    agreement: Annotated[
        float | None, Option(help="Fraction of answers equal to the full model's, with a guarantee. Needs no labels.")
    ] = None,
    confidence: Annotated[
        float | None, Option(help="Confidence of the guarantee of --max-loss or --agreement (default: 0.95).")
    ] = None,
    worst_error: Annotated[
        float | None,
        Option(help="Regression: the error that counts as completely wrong, for example the range of the labels."),
    ] = None,
    name: Annotated[str, Option(help="Name of the budget; default: made from the goal, for example loss-1.")] = "",
    default: Annotated[bool, Option("--default", help="Make it the default dial of the model.")] = False,
    text: Text = None,
    text_b: TextB = None,
    label: Label = None,
    delimiter: Delimiter = None,
    split: Split = None,
    limit: Annotated[int | None, Option(min=1, help="Use a random sample of this many examples; default: all.")] = None,
    seed: Seed = 42,
    batch_size: BatchSize = 32,
    dtype: Dtype = "float32",
    json: Json = None,
) -> None:
    """Find the dial for a cost, a latency or a tolerated loss, and store it in the model folder by name.

    DATA must be fresh: examples that the model was not trained on and its dials were not searched on."""
    from stretto.budget.calibrate import calibrate as run_calibration
    from stretto.data import Columns, load, sample
    from stretto.saving.place import locked

    goal = chosen_goal(
        cost=cost, latency_ms=latency_ms, batch=batch, percentile=percentile, max_loss=max_loss, agreement=agreement,
        confidence=confidence, worst_error=worst_error,
    )  # fmt: skip
    if not Path(model).is_dir():
        raise StrettoError(
            f"Expected a local model folder to store the budget in, got '{model}'. Save the model to a folder first."
        )
    with locked(model):  # also while loading: what others save meanwhile would be overwritten
        loaded = open_model(model, dtype)
        examples = load(
            data, task=loaded.task, columns=Columns(text, text_b, label, delimiter), split=split,
            labelled=goal.needs_labels or label is not None, label_names=loaded.task.label_names,
        )  # fmt: skip
        if limit is not None:
            examples = sample(examples, limit, seed)
        say_cut(loaded.encode(examples.texts).truncated, len(examples), loaded)
        found = run_calibration(
            loaded, examples, goal, name=name, batch_size=batch_size, seed=seed, progress=on_terminal()
        )
        if default:
            loaded.dial = found.dial
        loaded.save_points(model)
    write_json(json, {"model": model, "data": data, "budget": found.to_json(), "default": loaded.dial == found.dial})
    if json != STDOUT:
        show(model, loaded, found)


def chosen_goal(
    *, cost: float | None, latency_ms: float | None, batch: int | None, percentile: float | None,
    max_loss: float | None, agreement: float | None, confidence: float | None, worst_error: float | None,
) -> Goal:  # fmt: skip
    """The one goal that was given, with its options."""
    from stretto.budget.calibrate import Agreement, MaxLoss, Spend, Wait

    goals = {"--cost": cost, "--latency-ms": latency_ms, "--max-loss": max_loss, "--agreement": agreement}
    named = [flag for flag, value in goals.items() if value is not None]
    if len(named) != 1:
        raise StrettoError(f"Expected one of {', '.join(goals)}, got {' and '.join(named) or 'none'}. Name one.")
    belongs = {
        "--batch": (batch, ("--latency-ms",)),
        "--percentile": (percentile, ("--latency-ms",)),
        "--confidence": (confidence, ("--max-loss", "--agreement")),
        "--worst-error": (worst_error, ("--max-loss", "--agreement")),
    }
    for flag, (value, owners) in belongs.items():
        if value is not None and named[0] not in owners:
            raise StrettoError(
                f"Expected {flag} together with {' or '.join(owners)}, got it with {named[0]}. Leave it out."
            )
    sure: dict[str, Any] = {"worst": worst_error} | ({} if confidence is None else {"confidence": confidence})
    if cost is not None:
        return Spend(cost)
    if latency_ms is not None:
        return Wait(latency_ms, 1 if batch is None else batch, 95.0 if percentile is None else percentile)
    if max_loss is not None:
        return MaxLoss(points=max_loss, **sure)
    assert agreement is not None
    return Agreement(agreement=agreement, **sure)


def show(folder: str, model: AdaptiveModel, budget: OperatingPoint) -> None:
    from stretto.saving.points import promise

    metric = model.task.main_metric
    score = f", {metric} {budget.metrics[metric]:.4f}" if budget.metrics else ""
    print(
        f"budget '{budget.name}' ({budget.dtype}): {model.method.dial.name} {budget.dial:g}, "
        f"cost {budget.cost:.3f}{score}\n{promise(budget)}"
    )
    flag = "" if budget.dtype == "float32" else f" --dtype {budget.dtype}"
    say(f"saved in {folder}; use it: stretto predict {folder} TEXTS --budget {budget.name}{flag}")
