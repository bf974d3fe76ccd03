"""`stretto depths`: the depths of words, for models that have a table of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from stretto.cli.guard import output_file
from stretto.cli.options import Json, ModelFolder
from stretto.cli.output import STDOUT, open_model, say, write_json
from stretto.errors import StrettoError, counted

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.methods.depths import WordDepths
    from stretto.model import AdaptiveModel

EXAMPLES = """
stretto depths reviews-model --top 20
stretto depths reviews-model --plot depths.png
stretto depths reviews-model --dial 0.5 --json depths.json      # every word of the table
"""


def depths(
    model: ModelFolder,
    top: Annotated[int, Option(min=0, help="How many of the shallowest and of the deepest words to show.")] = 20,
    at_least: Annotated[int, Option(min=1, help="Leave out words that occurred less often.")] = 1,
    dial: Annotated[float | None, Option(help="Depths at this dial; default: as the model was trained.")] = None,
    json: Json = None,
    plot: Annotated[
        str | None,
        Option(metavar="FILE", help="Draw histograms of values and depths (.png …).", callback=output_file),
    ] = None,
) -> None:
    """Show the shallowest and the deepest words of a model that freezes words at their depths."""
    from stretto.view.plots import check_plot_path, depth_histograms
    from stretto.view.tables import show_table

    if plot is not None:
        check_plot_path(plot)
    loaded = open_model(model)
    method = with_table(loaded)
    dial = trained_dial(method) if dial is None else dial
    method.dial.check(dial)
    found, values = method.table_depths(dial), method.word_measure()
    often = (method.table.counts >= at_least).nonzero().squeeze(1)
    if not len(often):
        raise StrettoError(
            f"Expected words that occurred {at_least} times, got none; the most frequent occurred "
            f"{int(method.table.counts.max())} times. Lower --at-least."
        )
    found, values, counts = found[often], values[often], method.table.counts[often]
    hardness = method.hardness(values)
    order = ranked(found, hardness, counts)
    if json != STDOUT:
        show_depths(found, method.shape.n_layers)
        for title, chosen in {"Shallowest": order, "Deepest": ranked(-found, -hardness, counts)}.items():
            if top:
                print()
                rows = word_rows(loaded, method, often[chosen[:top]], found[chosen[:top]])
                show_table(rows, {method.measure: ".4g"}, title=f"{title} words at {method.dial.name} {dial:g}")
    if json is not None:
        rows = word_rows(loaded, method, often[order], found[order])
        content = {"model": model, "method": method.name, "measure": method.measure, "dial": dial, "words": rows}
        write_json(json, content)
    if plot is not None:
        depth_histograms(values.tolist(), found.tolist(), method.shape.n_layers, plot, measure=method.measure)
        say(f"wrote {plot}")


def with_table(model: AdaptiveModel) -> WordDepths:
    from stretto.methods import METHODS
    from stretto.methods.depths import WordDepths

    if not isinstance(model.method, WordDepths):
        able = ", ".join(name for name in METHODS if issubclass(METHODS[name], WordDepths))
        raise StrettoError(
            f"Expected a model with a table of depths, got one of the method {model.method.name}. "
            f"Train with one of these methods: {able}."
        )
    model.method.check_table()
    return model.method


def trained_dial(method: WordDepths) -> float:
    return method.stages()[-1].dials[0]


def ranked(depths: Tensor, hardness: Tensor, counts: Tensor) -> Tensor:
    """[V] indices by depth, then by hardness, both ascending; the more frequent of equals first."""
    order = counts.argsort(descending=True, stable=True)
    order = order[hardness[order].argsort(stable=True)]
    return order[depths[order].argsort(stable=True)]


def word_rows(model: AdaptiveModel, method: WordDepths, rows: Tensor, depths: Tensor) -> list[dict[str, Any]]:
    from stretto.view.explain import visible

    words = method.table.words(model.tokenizer, rows)
    values, counts = method.word_measure()[rows].tolist(), method.table.counts[rows].tolist()
    return [
        {"word": visible(word), "depth": depth, method.measure: value, "met": count}
        for word, depth, value, count in zip(words, depths.tolist(), values, counts, strict=True)
    ]


def show_depths(depths: Tensor, n_layers: int) -> None:
    """How many words have which depth."""
    import torch

    from stretto.view.tables import show_table

    counts = torch.bincount(depths, minlength=n_layers + 1).tolist()[1:]
    widest = max(counts)
    rows = [
        {"depth": depth, "words": count, "": "#" * round(40 * count / widest)}
        for depth, count in enumerate(counts, start=1)
    ]
    show_table(rows, title=f"{counted(len(depths), 'word')} by depth")
