"""`stretto bench guarantee`: do guarantees hold, and what do they cost?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from stretto.cli.guard import output_file
from stretto.cli.options import SOURCES, BatchSize, Delimiter, Dtype, Label, ModelFolder, Seed, Split, Text, TextB
from stretto.cli.output import STDOUT, numbers, on_terminal, open_model, say, write_json
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.budget.calibrate import Guarantee
    from stretto.data import Dataset

EXAMPLES = """
stretto bench guarantee reviews-model test.csv
stretto bench guarantee reviews-model test.csv more.csv --max-loss 0.5,1,2 --agreement 0.98
stretto bench guarantee ratings-model test.csv --worst-error 5        # ratings from 0 to 5
stretto bench guarantee reviews-model test.csv --set reviews --json benchmarks/results/guarantee.json
"""

Data = Annotated[
    list[str], Argument(metavar="DATA...", help=f"Labelled texts that the model was not trained on: {SOURCES}.")
]


def guarantee(
    model: ModelFolder,
    data: Data,
    max_loss: Annotated[str, Option(help="Points of score that may be lost, separated by commas.")] = "",
    agreement: Annotated[str, Option(help="Fractions of answers equal to the full model's, separated by commas.")] = "",
    confidence: Annotated[float, Option(help="Confidence of the guarantees.")] = 0.95,
    worst_error: Annotated[
        float | None,
        Option(help="Regression: the error that counts as completely wrong, for example the range of the labels."),
    ] = None,
    splits: Annotated[int, Option(min=1, help="Random draws and splits.")] = 200,
    part: Annotated[float, Option(min=0, max=1, help="Part of the texts that calibrates; the others test.")] = 0.5,
    name: Annotated[str, Option("--set", help="What to call the texts in the results; default: the first file.")] = "",
    text: Text = None,
    text_b: TextB = None,
    label: Label = None,
    delimiter: Delimiter = None,
    split: Split = None,
    limit: Annotated[int | None, Option(min=1, help="Use a random sample of this many texts; default: all.")] = None,
    seed: Seed = 0,
    batch_size: BatchSize = 32,
    dtype: Dtype = "float32",
    json: Annotated[
        str | None, Option(metavar="[FILE]", help="Add the results to this file.", callback=output_file)
    ] = None,
) -> None:
    """Check on many random draws how often a guarantee is broken, and what it costs against the best dial.

    Exit code 1 if it is broken more often than chance explains."""
    from stretto.bench.guarantee import record, study
    from stretto.bench.report.guarantees import study_rows
    from stretto.bench.results import Results, Row
    from stretto.budget.calibrate import Material
    from stretto.data import Columns, sample
    from stretto.saving.versions import cpu_name, known_versions
    from stretto.view.tables import show_table

    goals = wanted_goals(max_loss, agreement, confidence, worst_error)
    results = Results.start("guarantee", None if json in (None, STDOUT) else Path(str(json)))
    loaded = open_model(model, dtype)
    examples = joined(data, loaded, Columns(text, text_b, label, delimiter), split)
    if limit is not None:
        examples = sample(examples, limit, seed)
    say(f"{len(examples)} texts")
    material = Material(loaded, examples, batch_size, seed, on_terminal())
    encoder = f"{loaded.encoder.config.model_type}, {loaded.backbone.n_layers} layers of {loaded.backbone.d}"
    trained = {"training examples": None, "dev examples": None, **loaded.provenance}
    judged = {} if worst_error is None else {"worst error": worst_error}
    rows = []
    for goal, found in zip(goals, record(material, goals), strict=True):
        rows.append(
            Row(
                set=name or Path(data[0]).name.partition(".")[0], model=encoder,
                name=f"{loaded.method.name} {goal.name} {dtype}", method=loaded.method.name, seed=seed,
                command=f"stretto bench guarantee --splits {splits} --seed {seed}", machine=cpu_name(),
                versions=known_versions(),
                task=loaded.task.name, metric=loaded.task.main_metric, n_train=trained["training examples"],
                n_dev=trained["dev examples"], n_test=len(examples),
                settings={"dtype": dtype, "goal": goal.name, "part": part, **judged},
                guarantee=study(found, goal.risk(material), splits=splits, part=part, seed=seed),
            )
        )  # fmt: skip
        results.put(rows[-1])
    if json == STDOUT:
        write_json(json, results.to_json())
    else:
        show_table(study_rows(rows))
    broken = [row.name for row in rows if too_many(row.guarantee or {}, "guaranteed")]
    if broken:
        raise StrettoError(
            f"Expected guarantees that hold, got some broken more often than chance explains: {', '.join(broken)}. "
            "This is an error in stretto: report it."
        )


def too_many(found: dict[str, Any], chooser: str) -> bool:
    return bool(found[chooser]["violations"] > found["most_violations"])


def wanted_goals(max_loss: str, agreement: str, confidence: float, worst: float | None) -> list[Guarantee]:
    from stretto.budget.calibrate import Agreement, MaxLoss

    if not max_loss and not agreement:
        max_loss = "1"
    losses = numbers(max_loss, "--max-loss") if max_loss else []
    parts = numbers(agreement, "--agreement") if agreement else []
    return [
        *(MaxLoss(points=points, confidence=confidence, worst=worst) for points in losses),
        *(Agreement(agreement=each, confidence=confidence, worst=worst) for each in parts),
    ]


def joined(sources: list[str], model: Any, columns: Any, split: str | None) -> Dataset:
    """The texts of several sources as one."""
    from stretto.data import load

    parts = [
        load(source, task=model.task, columns=columns, split=split, label_names=model.task.label_names)
        for source in sources
    ]
    return dataclasses.replace(
        parts[0],
        texts=[text for each in parts for text in each.texts],
        labels=[label for each in parts for label in each.labels or []],
        where=[where for each in parts for where in each.where],
    )
