"""The estimated time of a comparison: a training step and an inference pass are timed on each set, and multiplied.

An estimate of single-core hours: within a factor of two, or closer if the results already have rows of the same
kind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stretto.bench.clock import STREAM_FACTOR, TimedSet
from stretto.bench.rows import BATCH, Bench
from stretto.bench.suite import BASELINES, Recipe
from stretto.budget.search import SearchSettings
from stretto.budget.thresholds import KEEP
from stretto.data import sample
from stretto.data.batches import batches
from stretto.methods import METHODS, Shape
from stretto.model import make_config
from stretto.saving.folder import quiet_transformers
from stretto.tasks import TASKS

#: An adaptive run at an average dial, as a part of a full pass.
AVERAGE_COST = 0.6
#: Runs of a contender beside its timed rounds: its FLOPs are counted, and it is warmed up.
WARM_UP = 1.5


@dataclass(frozen=True)
class Pace:
    """Seconds of processor time of one set and encoder."""

    lesson: float
    """Training on one example."""
    text: float
    """A full pass over one example, without gradients."""
    shape: Shape


def pace(bench: Bench) -> Pace:
    """Measured now, on a sample of the training data."""
    with quiet_transformers():
        model = bench.untrained(Recipe(method="full", start=None))
    part = sample(bench.parts["train"], BATCH, bench.seed)
    (batch,) = batches(model.encode(part.texts).features[:BATCH], model.tokenizer.pad_token_id, BATCH)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if model.task.answers == "text":  # as long as what it is made from
        inputs |= {"decoder_input_ids": batch.input_ids, "use_cache": False}
    forward = torch.inference_mode()(partial(model.encoder, **inputs))
    forward()
    text = spent(forward) / BATCH
    model.encoder.train()

    def step() -> None:
        sum(value.float().square().mean() for value in model.encoder(**inputs).values()).backward()

    step()
    backbone = model.backbone
    return Pace(spent(step) / BATCH, text, Shape(backbone.d, backbone.n_layers, backbone.n_labels))


def spent(step: Any) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def hours(bench: Bench, row: str, pace: Pace) -> float:
    """Of training and measuring one row."""
    sizes = {name: len(part) for name, part in bench.parts.items()}
    measured = sizes["choosing"] + sizes["test"]
    if row in BASELINES:
        return sizes["test"] * pace.text / 3600
    recipe = bench.recipe(row)
    method = METHODS[recipe.method]
    built = method(
        make_config(method, recipe.settings), pace.shape, TASKS[bench.spec.task].posed_by(bench.parts["train"])
    )
    seconds = 0.0
    if recipe.weights_of is None:
        for stage in built.stages():
            if stage.name not in recipe.skip:
                seconds += stage_seconds(stage, built.config, sizes["train"], pace)
        measured += sizes["dev"]  # once more at the end of training
    dials = len(recipe.dials or built.dial.sweep)
    passes = 1.0 if only_exits(built) else dials * AVERAGE_COST
    seconds += measured * pace.text * passes
    if recipe.search and TASKS[bench.spec.task].answers == "text":
        seconds += recipe.search.get("keep", KEEP) * sizes["dev"] * pace.text * AVERAGE_COST
    elif recipe.search:
        settings = SearchSettings(**recipe.search)
        tried = settings.population + settings.iterations * (settings.mutations + settings.crossovers)
        seconds += tried * min(settings.limit or sizes["dev"], sizes["dev"]) * pace.text * AVERAGE_COST
    return seconds / 3600


def only_exits(method: Any) -> bool:
    """All its dials are read off one pass."""
    return method.exits is not None and method.points == {"after"}


def stage_seconds(stage: Any, config: Any, examples: int, pace: Pace) -> float:
    if not stage.trains_backbone and not stage.decides:
        return examples * pace.text  # its states are recorded once
    sandwich = 1 + 1 + getattr(config, "random_models", 0) if stage.decides and hasattr(config, "random_models") else 1
    each = pace.lesson if stage.trains_backbone else pace.text
    return stage.epochs * examples * each * sandwich


def plan_rows(benches: Sequence[tuple[Bench, Sequence[str]]]) -> list[dict[str, Any]]:
    """A line per set, encoder and seed: the rows still to do and about how long they will take."""
    paces: dict[tuple[str, str], Pace] = {}
    lines: list[dict[str, Any]] = []
    for bench, rows in benches:
        key = bench.set, bench.model
        if rows and key not in paces:
            paces[key] = pace(bench)
        lines.append(
            {
                "set": bench.set,
                "model": bench.model,
                "seed": bench.seed,
                "training texts": len(bench.parts["train"]),
                "rows to do": len(rows),
                "hours": sum(hours(bench, row, paces[key]) for row in rows),
                "rows": ", ".join(rows),
            }
        )
    return lines


def plan_clocks(timed: Sequence[tuple[TimedSet, Sequence[tuple[int, bool]]]]) -> list[dict[str, Any]]:
    """A line per set, encoder and seed: what is still to be timed and about how long it will take."""
    paces: dict[tuple[str, str], Pace] = {}
    lines: list[dict[str, Any]] = []
    for each, passes in timed:
        bench, hours = each.bench, 0.0
        key = bench.set, bench.model
        if passes:
            paces[key] = paces.get(key) or pace(bench)
            texts = sum(
                min(bench.spec.timed * (STREAM_FACTOR if stream else 1), len(bench.parts["test"]))
                for _, stream in passes
            )
            shares = sum(each.rows[name].points[0].cost for name in each.baselines)
            shares += 1 + sum(cost_of(each, *wanted) for wanted in each.wanted)
            runs = bench.spec.rounds + WARM_UP
            hours = texts * paces[key].text * shares * runs / 3600
        lines.append(
            {
                "set": bench.set,
                "model": bench.model,
                "seed": bench.seed,
                "to time": ", ".join("stream" if stream else str(size) for size, stream in passes) or "nothing",
                "contenders": 1 + len(each.baselines) + len(each.wanted),
                "hours": hours,
            }
        )
    return lines


def cost_of(timed: TimedSet, row: str, dial: float, dtype: str) -> float:
    return next(point.cost for point in timed.rows[row].on("test", dtype) if point.dial == dial)
