"""`stretto evaluate`: score, cost and depth along the dial."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from stretto.cli.guard import output_file
from stretto.cli.options import (
    BatchSize,
    Delimiter,
    Dtype,
    Json,
    Label,
    Labelled,
    MaxNewTokens,
    ModelFolder,
    NumBeams,
    Split,
    Text,
    TextB,
)
from stretto.cli.output import (
    STDOUT,
    numbers,
    on_terminal,
    open_model,
    point_formats,
    point_rows,
    say,
    say_cut,
    worth_showing,
    write_json,
)
from stretto.errors import counted

EXAMPLES = """
stretto evaluate reviews-model test.csv
stretto evaluate reviews-model test.csv --dials 0,0.1,0.3 --plot curve.png
stretto evaluate reviews-model test.csv --json > points.json
stretto evaluate translation-model test.jsonl --num-beams 4                      # BLEU, chrF, average exit
stretto evaluate reviews-model owner/dataset --split test --text sentence
"""


def evaluate(
    model: ModelFolder,
    data: Labelled,
    dials: Annotated[str | None, Option(help="Dials, separated by commas; default: the method's own sweep.")] = None,
    text: Text = None,
    text_b: TextB = None,
    label: Label = None,
    delimiter: Delimiter = None,
    split: Split = None,
    batch_size: BatchSize = 32,
    dtype: Dtype = "float32",
    num_beams: NumBeams = None,
    max_new_tokens: MaxNewTokens = None,
    json: Json = None,
    plot: Annotated[
        str | None, Option(metavar="FILE", help="Draw score over cost (.png, .svg or .pdf).", callback=output_file)
    ] = None,
) -> None:
    """Measure score, cost and depth along the dial."""
    from stretto.budget.choose import at_dial
    from stretto.budget.sweep import sweep
    from stretto.data import Columns, load
    from stretto.saving.versions import versions
    from stretto.view.plots import check_plot_path, pareto_plot
    from stretto.view.tables import show_table

    if plot is not None:
        check_plot_path(plot)
    wanted = None if dials is None else numbers(dials, "--dials")
    loaded = open_model(model, dtype, num_beams, max_new_tokens)
    examples = load(
        data, task=loaded.task, columns=Columns(text, text_b, label, delimiter), split=split,
        label_names=loaded.task.label_names,
    )  # fmt: skip
    encoded = loaded.encode(examples.texts)
    say_cut(encoded.truncated, len(examples), loaded)
    points = sweep(loaded, examples, wanted, batch_size=batch_size, progress=on_terminal(), encoded=encoded)
    content = {
        "model": model,
        "data": data,
        "examples": len(examples),
        "truncated": encoded.truncated,
        "method": loaded.method.name,
        "dial": {
            "name": loaded.method.dial.name,
            "off": loaded.method.dial.off,
            "default": loaded.dial,
            "promise": loaded.promise(),
        },
        "main_metric": loaded.task.main_metric,
        "dtype": dtype,
        "points": [point.to_json() for point in points],
        "signatures": loaded.task.signatures(),
        "versions": versions(),
    }
    if json != STDOUT:
        shown = worth_showing(points, loaded.dial) if wanted is None else points
        title = f"{loaded.method.name} on {counted(len(examples), 'example')}; the dial is {loaded.method.dial.name}"
        title += f" ({len(shown)} of {len(points)} dials; --json has all)" if len(shown) < len(points) else ""
        show_table(point_rows(shown, loaded), point_formats(points), title=title)
        for name, signature in loaded.task.signatures().items():
            print(f"{name}: {signature}")
        say(f"default dial {loaded.dial:g}: {loaded.promise()}")
    write_json(json, content)
    if plot is not None:
        full = at_dial(points, loaded.method.dial.off)
        own = at_dial(points, loaded.dial)
        pareto_plot(
            {loaded.method.name: points}, plot, full=full, default=own, standing=loaded.standing(),
            metric=loaded.task.main_metric,
        )  # fmt: skip
        say(f"wrote {plot}")
