"""`stretto rationales`: agreement with words that people marked."""

from __future__ import annotations

import random
from typing import Annotated, Any

from typer import Argument, Option

from stretto.cli.guard import output_file
from stretto.cli.options import Json, ModelFolder, Seed, Split
from stretto.cli.output import STDOUT, on_terminal, open_model, say, write_json
from stretto.errors import counted

EXAMPLES = """
stretto rationales reviews-model rationales.jsonl
stretto rationales reviews-model rationales.jsonl.gz --limit 100 --plot agreement.png
stretto rationales reviews-model rationales.jsonl --dial 0.5 --json agreement.json

A row of DATA: {"tokens": ["a", "fine", "film"], "rationale": [0, 1, 0], "label": "good"}
"""

Rationales = Annotated[str, Argument(metavar="DATA", help="Texts in words, with labels and marked words: .jsonl.")]
PANELS = {"average_precision": "mean average precision", "false_positive_rate": "false-positive rate"}


def rationales(
    model: ModelFolder,
    data: Rationales,
    dial: Annotated[float | None, Option(help="Dial for the method's own run; default: the model's own dial.")] = None,
    limit: Annotated[int | None, Option(min=1, help="Use a random sample of this many texts; default: all.")] = None,
    split: Split = None,
    seed: Seed = 42,
    json: Json = None,
    plot: Annotated[
        str | None,
        Option(metavar="FILE", help="Draw both measures by layer (.png, .svg, .pdf).", callback=output_file),
    ] = None,
) -> None:
    """Compare the words that the model uses with words that people marked.

    Per layer: average precision of the scores, false-positive rate of the selected words."""
    from stretto.saving.versions import versions
    from stretto.view.plots import check_plot_path, layer_plot
    from stretto.view.rationales import agreement, load_rationales
    from stretto.view.tables import show_table

    if plot is not None:
        check_plot_path(plot)
    loaded = open_model(model)
    if dial is not None:
        loaded.method.dial.check(dial)
    examples = load_rationales(data, loaded, split)
    if limit is not None and limit < len(examples):
        examples = random.Random(seed).sample(examples, limit)
    found = agreement(loaded, examples, dial, progress=on_terminal())
    if found.unscored:
        say(f"beyond {loaded.max_length} tokens, not counted: {found.unscored} of {counted(found.words, 'word')}")
    if found.left_out:
        say(f"no marked or no unmarked words, left out: {found.left_out} of {counted(found.texts, 'text')}")
    curves = {measure: {name: getattr(curve, measure) for name, curve in found.curves.items()} for measure in PANELS}
    if json != STDOUT:
        for measure, title in PANELS.items():
            chance = f" (chance: {found.marked:.3f})" if measure == "average_precision" else ""
            rows = by_layer(curves[measure])
            show_table(
                rows,
                dict.fromkeys(rows[0], ".3f"),
                title=f"{title.capitalize()} on {found.texts - found.left_out} texts{chance}",
            )
            print()
    write_json(
        json,
        {
            "model": model,
            "data": data,
            "method": loaded.method.name,
            "dial": loaded.dial if dial is None else dial,
            **found.to_json(),
            "versions": versions(),
        },
    )
    if plot is not None:
        layer_plot({PANELS[measure]: lines for measure, lines in curves.items()}, plot)
        say(f"wrote {plot}")


def by_layer(lines: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    """A row per layer, a column per source; a source without any value is left out."""
    found = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    n_layers = len(next(iter(found.values())))
    return [{"layer": n + 1, **{name: values[n] for name, values in found.items()}} for n in range(n_layers)]
