"""The command line: one module per verb.

Nothing heavy is imported here: torch and transformers are loaded inside the verbs, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from stretto.cli import (
    bench,
    calibrate,
    compare,
    demo,
    depths,
    describe,
    evaluate,
    explain,
    export,
    guarantee,
    predict,
    pretrain,
    rationales,
    search,
    serve,
    train,
)
from stretto.cli.streams import open_streams
from stretto.cli.verbs import HELP, TERMINATED, Verb, Verbs, examples

__all__ = ["app", "main"]

EXAMPLES = """
stretto demo
stretto train reviews.csv --model bert-base-uncased --output reviews-model
stretto evaluate reviews-model test.csv
echo "A fine film." | stretto predict reviews-model
stretto COMMAND --help                                 # all options of a command, and more examples
"""
BENCH_EXAMPLES = """
stretto bench model reviews-model test.csv
stretto bench guarantee reviews-model test.csv
"""

app = typer.Typer(
    context_settings={"help_option_names": sorted(HELP, reverse=True)},
    cls=Verbs, help="Fewer tokens, fewer layers, same answers: adaptive computation for Hugging Face transformers.",
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    epilog=examples(EXAMPLES),
)  # fmt: skip
benches = typer.Typer(
    cls=Verbs, help="Measure time, check guarantees, and write the tables of the documentation.",
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    epilog=examples(BENCH_EXAMPLES),
)  # fmt: skip


def add(name: str, verb: Callable[..., None], text: str, short: str, *, to: typer.Typer = app, cls: Any = Verb) -> None:
    """A verb with its examples, and what the list of verbs says of it."""
    to.command(name, cls=cls, epilog=examples(text), short_help=short)(verb)


add("demo", demo.demo, demo.EXAMPLES, "Run all steps on example data, in minutes.")
add("train", train.train, train.EXAMPLES, "Train an adaptive model on labelled texts.", cls=train.TrainVerb)
add("evaluate", evaluate.evaluate, evaluate.EXAMPLES, "Measure score, cost and depth along the dial.")
add("calibrate", calibrate.calibrate, calibrate.EXAMPLES, "Find the dial for a cost, a latency or a tolerated loss.")
add("predict", predict.predict, predict.EXAMPLES, "Answer texts, in their order.")
add("explain", explain.explain, explain.EXAMPLES, "Show which token is used up to which layer.")
add("serve", serve.serve, serve.EXAMPLES, "Serve models over HTTP.")
add("export", export.export, export.EXAMPLES, "Write ONNX graphs, and check their answers.")
add("search", search.search, search.EXAMPLES, "Search how many tokens each layer should keep.")
add("compare", compare.compare, compare.EXAMPLES, "Train and compare the methods of a suite.")
app.add_typer(benches, name="bench", short_help="Measure time; check guarantees; write the tables of the docs.")
add("depths", depths.depths, depths.EXAMPLES, "Show the shallowest and the deepest words of a model.")
add("rationales", rationales.rationales, rationales.EXAMPLES, "Compare words the model uses with words people marked.")
add("pretrain", pretrain.pretrain, pretrain.EXAMPLES, "Pretrain an encoder on plain text.", cls=pretrain.PretrainVerb)
add("methods", describe.methods, describe.METHODS_EXAMPLES, "List the methods, or describe one in full.")
add("backbones", describe.backbones, describe.BACKBONES_EXAMPLES, "List the supported architectures.")
add("model", bench.model, bench.MODEL_EXAMPLES, "Time a model, the full model and Hugging Face.", to=benches)
add("guarantee", guarantee.guarantee, guarantee.EXAMPLES, "Check how often a guarantee is broken.", to=benches)
add("server", bench.server, bench.SERVER_EXAMPLES, "Time `stretto serve` under load.", to=benches)
add("engine", bench.engine, bench.ENGINE_EXAMPLES, "Time the engine itself, with scripted decisions.", to=benches)
add("decoder", bench.decoder, bench.DECODER_EXAMPLES, "Time the writing of texts.", to=benches)
add("report", bench.report, bench.REPORT_EXAMPLES, "Write the tables and plots of the docs.", to=benches)


def _version(wanted: bool) -> None:
    if wanted:
        from stretto import __version__

        typer.echo(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


def main() -> None:
    """The `stretto` command."""
    open_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # an exception: half-written files are removed
    app(prog_name="stretto")
