"""`stretto search`: the best lengths for every budget, or pairs of dials, or thresholds."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Context, Option

from stretto.cli.guard import data_name, output_file
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
from stretto.cli.output import (
    STDOUT,
    on_terminal,
    open_model,
    point_formats,
    point_rows,
    resumable,
    say,
    say_cut,
    write_json,
)
from stretto.cli.settings import as_flag
from stretto.errors import StrettoError, counted

if TYPE_CHECKING:
    from stretto.budget.search import Iteration, SearchResult
    from stretto.budget.teacher import Objective
    from stretto.data import Columns, Dataset
    from stretto.model import AdaptiveModel
    from stretto.saving.points import OperatingPoint

EXAMPLES = """
stretto search reviews-model dev.csv
stretto search reviews-model dev.csv --limit 500 --iterations 15 --plot frontier.png
stretto search reviews-model dev.csv --max-seconds 3600      # the same command resumes later
stretto search reviews-model texts.csv                       # texts without labels will do
stretto search reviews-model dev.csv --objective score       # by accuracy instead
stretto search reviews-model dev.csv --per-input             # and choose lengths for each text
stretto search reviews-model dev.csv --output searched-model --json search.json

An interrupted search resumes when the same command is given again.
"""

#: What is searched, by the model; and the options of one kind of search alone.
LENGTHS, PAIRS, THRESHOLDS = "lengths", "pairs of dials", "thresholds"
ONLY = {
    LENGTHS: (
        "iterations", "mutations", "crossovers", "population", "patience", "per_input", "max_seconds", "restart",
        "plot",
    ),
    THRESHOLDS: ("draws",),
}  # fmt: skip


def search(
    ctx: Context,
    model: ModelFolder,
    data: Annotated[
        str, Argument(metavar="DATA", help=f"Texts, with or without labels: {SOURCES}.", callback=data_name)
    ],
    output: Annotated[str | None, Option(metavar="DIR", help="Folder for the result; default: the model's.")] = None,
    objective: Annotated[
        Literal["divergence", "score"] | None,
        Option(
            help="What is best at a cost: the least mean divergence (KL) from the full model's answers, which needs no "
            "labels (default), or the best score (default for lengths and pairs of a model that writes texts)."
        ),
    ] = None,
    limit: Annotated[
        int | None, Option(min=1, help="Measure candidates on a random sample of this many examples; default: all.")
    ] = None,
    iterations: Annotated[int, Option(min=1, help="Maximum number of iterations.")] = 30,
    mutations: Annotated[int, Option(min=0, help="Mutants per iteration.")] = 30,
    crossovers: Annotated[int, Option(min=0, help="Crossovers per iteration.")] = 30,
    population: Annotated[int, Option(min=2, help="Constant-ratio configurations to start from.")] = 20,
    patience: Annotated[int, Option(min=1, help="Stop after this many iterations without growth.")] = 5,
    per_input: Annotated[
        bool, Option("--per-input", help="Then learn to choose lengths for each text after layer 1.")
    ] = False,
    max_seconds: Annotated[
        float | None, Option(min=0, help="Stop after this time and keep the result so far; default: no limit.")
    ] = None,
    draws: Annotated[int, Option(min=1, help="Thresholds drawn, for a model that writes texts.")] = 10_000,
    seed: Seed = 42,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a finished model at --output.")] = False,
    restart: Annotated[bool, Option("--restart", help="Discard an unfinished search.")] = False,
    text: Text = None,
    text_b: TextB = None,
    label: Label = None,
    delimiter: Delimiter = None,
    split: Split = None,
    batch_size: BatchSize = 32,
    dtype: Dtype = "float32",
    json: Json = None,
    plot: Annotated[
        str | None, Option(metavar="FILE", help="Draw the first and last frontier (.png …).", callback=output_file)
    ] = None,
) -> None:
    """Search how many tokens each layer should keep, for every budget.

    For models trained with --method length_adaptive. Of a combination of two methods the pairs of dials are searched,
    of a translation model (--method depth_adaptive --mechanism confidence) the thresholds. The result is stored in the
    model folder."""
    from stretto.budget.search import SearchSettings, searchable
    from stretto.budget.search import search as run_search
    from stretto.budget.teacher import objective_for
    from stretto.data import Columns
    from stretto.saving.place import locked
    from stretto.saving.versions import versions
    from stretto.view.plots import check_plot_path
    from stretto.view.tables import show_table

    if plot is not None:
        check_plot_path(plot)
    target = Path(output or model)
    work = Path(f"{target}.search")
    if output is not None and not overwrite:
        check_place(target, Path(model), work)
    loaded = open_model(model, dtype)
    kind = searched_in(loaded)
    if kind == LENGTHS:
        searchable(loaded)
    check_options(ctx, kind)
    objective = objective or "divergence" if kind == THRESHOLDS else objective_for(loaded, objective)
    settings = SearchSettings(
        iterations, mutations, crossovers, population=population, patience=patience, limit=limit, seed=seed,
        objective=objective,
    )  # fmt: skip
    if output is None and not target.is_dir():
        raise StrettoError(f"Expected a folder to write the result to, got the hub name '{model}'. Add --output.")
    examples = read_examples(data, loaded, Columns(text, text_b, label, delimiter), split, objective)
    if kind != LENGTHS:
        search_dials(loaded, model, data, target, examples, objective, draws, limit, seed, batch_size, json)
        return
    say_cut(loaded.encode(examples.texts).truncated, len(examples), loaded)
    with locked(target), resumable(work):
        if restart:
            shutil.rmtree(work, ignore_errors=True)
        elif work.exists():
            say(f"resuming the unfinished search in {work}")
        result = run_search(
            loaded, examples, target, settings, batch_size=batch_size, max_seconds=max_seconds, per_input=per_input,
            progress=on_terminal(),
        )  # fmt: skip
    if json != STDOUT:
        show_table([iteration_row(iteration) for iteration in result.iterations], {"area": ".4f"}, title="The search")
        print()
        title = f"The frontier on {counted(len(examples), 'example')}; the dial is {loaded.method.dial.name}"
        show_table(point_rows(result.points, loaded), {**point_formats(result.points), "dial": ".3f"}, title=title)
    write_json(
        json,
        {
            "model": model,
            "data": data,
            "output": str(target),
            "examples": len(examples),
            "searched_on": result.examples,
            "settings": vars(settings),
            "finished": result.finished,
            "main_metric": loaded.task.main_metric,
            "default_dial": loaded.dial,
            "iterations": [iteration_json(iteration) for iteration in result.iterations],
            "points": [point.to_json() for point in result.points],
            "versions": versions(),
        },
    )
    if plot is not None:
        draw(result, plot, loaded)
        say(f"wrote {plot}")
    say(
        f"saved {target}"
        if result.finished
        else f"time limit reached; saved {target}; the same command resumes the search"
    )


def searched_in(model: AdaptiveModel) -> str:
    """The kind of search, by the model's method."""
    from stretto.methods import Combined
    from stretto.methods.depth_adaptive import DepthAdaptive

    if isinstance(model.method, Combined):
        return PAIRS
    return THRESHOLDS if isinstance(model.method, DepthAdaptive) else LENGTHS


def check_options(ctx: Context, kind: str) -> None:
    """Refuse options on the command line that are of another kind of search."""
    for other, names in ONLY.items():
        sources = {name: ctx.get_parameter_source(name) for name in names}
        named = [as_flag(name) for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        if named and other != kind:
            it = "it" if len(named) == 1 else "them"
            raise StrettoError(
                f"Expected {', '.join(named)} only with a search for {other}, got a search for {kind}. Leave {it} out."
            )


def read_examples(
    data: str, model: AdaptiveModel, columns: Columns, split: str | None, objective: Objective
) -> Dataset:
    """With their labels, if there are any. A search by divergence does without."""
    from stretto.data import load

    try:
        return load(data, task=model.task, columns=columns, split=split, label_names=model.task.label_names or None)
    except StrettoError as error:
        if objective == "score" or columns.label is not None:
            raise
        examples = load(data, task=model.task, columns=columns, split=split, labelled=False)
        say(f"no labels are used, and no score is measured: {error}")
        return examples


def search_dials(
    loaded: AdaptiveModel, model: str, data: str, target: Path, examples: Dataset, objective: Objective, draws: int,
    limit: int | None, seed: int, batch_size: int, json: str | None,
) -> None:  # fmt: skip
    """Thresholds of a model that writes texts, pairs of dials of a combination."""
    from stretto.budget.frontier import search_pairs
    from stretto.budget.thresholds import search_thresholds
    from stretto.data import sample
    from stretto.methods import Combined
    from stretto.saving.place import locked
    from stretto.saving.versions import versions
    from stretto.view.tables import show_table

    examples = examples if limit is None else sample(examples, limit, seed)
    shared: dict[str, Any] = {"objective": objective, "seed": seed, "batch_size": batch_size, "progress": on_terminal()}
    with locked(target):
        if isinstance(loaded.method, Combined):
            points = search_pairs(loaded, examples, **shared)
        else:
            points = search_thresholds(loaded, examples, draws=draws, **shared)
        loaded.save_pretrained(target)
    if json != STDOUT:
        title = f"What was found, on {counted(len(examples), 'example')}; the dial is {loaded.method.dial.name}"
        show_table(point_rows(points, loaded), point_formats(points), title=title)
    config = loaded.method.config
    found = {name: getattr(config, name) for name in ("thresholds", "frontier") if hasattr(config, name)}
    content = {"model": model, "data": data, "output": str(target), "examples": len(examples), "objective": objective}
    measured = {"points": [point.to_json() for point in points], "default_dial": loaded.dial, "versions": versions()}
    write_json(json, {**content, "draws": draws, **found, **measured})
    say(f"saved {target}")


def check_place(target: Path, model: Path, work: Path) -> None:
    """Another finished model is only replaced with --overwrite, or if the unfinished search in `work` wrote it."""
    from stretto.saving.folder import SETTINGS
    from stretto.saving.journal import FILE
    from stretto.saving.place import read_plan, refuse_finished, wrote

    same = target.exists() and model.exists() and target.samefile(model)
    if not same and not wrote(target / SETTINGS, read_plan(work / FILE)):
        refuse_finished(target, SETTINGS, "model")


def iteration_row(iteration: Iteration) -> dict[str, Any]:
    return {
        "iteration": iteration.number,
        "tried": iteration.tried,
        "frontier": len(iteration.frontier),
        "area": iteration.area,
    }


def iteration_json(iteration: Iteration) -> dict[str, Any]:
    frontier = [{**each.point.to_json(), "lengths": each.lengths} for each in iteration.frontier]
    return {**iteration_row(iteration), "frontier": frontier}


def draw(result: SearchResult, path: str, model: AdaptiveModel) -> None:
    """The frontier of constant ratios, and the final one: scores, or what is known without labels."""
    from stretto.budget.choose import at_dial
    from stretto.budget.teacher import AGREEMENT, DIVERGENCE
    from stretto.view.plots import pareto_plot

    known, (first, last) = result.points[0].metrics, (result.iterations[0], result.iterations[-1])
    metric = next(name for name in (model.task.main_metric, AGREEMENT, DIVERGENCE) if name in known)

    def drawn(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
        return [replace(point, score=point.metrics[metric]) for point in points]

    curves = {
        "constant ratios (the start)": drawn([candidate.point for candidate in first.frontier]),
        f"after {counted(last.number, 'iteration')}": drawn([candidate.point for candidate in last.frontier]),
    }
    points = drawn(result.points)
    default = at_dial(points, model.dial)
    pareto_plot(curves, path, full=points[0], default=default, standing=model.standing(), metric=metric)
