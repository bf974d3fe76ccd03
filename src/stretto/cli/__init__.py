"""The command line: one module per verb.

Nothing heavy is imported here: torch and transformers are loaded inside the verbs, so that `--help` is quick.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

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

app = typer.Typer(
    context_settings={"help_option_names": sorted(HELP, reverse=True)},
    cls=Verbs, help="Fewer tokens, fewer layers, same answers: adaptive computation for Hugging Face transformers.",
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip
benches = typer.Typer(
    cls=Verbs, help="Measure time, and write the tables of the documentation.",
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip

app.command("pretrain", cls=pretrain.PretrainVerb, epilog=examples(pretrain.EXAMPLES))(pretrain.pretrain)
app.command("train", cls=train.TrainVerb, epilog=examples(train.EXAMPLES))(train.train)
app.command("evaluate", cls=Verb, epilog=examples(evaluate.EXAMPLES))(evaluate.evaluate)
app.command("search", cls=Verb, epilog=examples(search.EXAMPLES))(search.search)
app.command("calibrate", cls=Verb, epilog=examples(calibrate.EXAMPLES))(calibrate.calibrate)
app.command("predict", cls=Verb, epilog=examples(predict.EXAMPLES))(predict.predict)
app.command("explain", cls=Verb, epilog=examples(explain.EXAMPLES))(explain.explain)
app.command("serve", cls=Verb, epilog=examples(serve.EXAMPLES))(serve.serve)
app.command("export", cls=Verb, epilog=examples(export.EXAMPLES))(export.export)
app.command("depths", cls=Verb, epilog=examples(depths.EXAMPLES))(depths.depths)
app.command("rationales", cls=Verb, epilog=examples(rationales.EXAMPLES))(rationales.rationales)
app.command("compare", cls=Verb, epilog=examples(compare.EXAMPLES))(compare.compare)
app.add_typer(benches, name="bench")
benches.command("engine", cls=Verb, epilog=examples(bench.ENGINE_EXAMPLES))(bench.engine)
benches.command("decoder", cls=Verb, epilog=examples(bench.DECODER_EXAMPLES))(bench.decoder)
benches.command("model", cls=Verb, epilog=examples(bench.MODEL_EXAMPLES))(bench.model)
benches.command("guarantee", cls=Verb, epilog=examples(guarantee.EXAMPLES))(guarantee.guarantee)
benches.command("server", cls=Verb, epilog=examples(bench.SERVER_EXAMPLES))(bench.server)
benches.command("report", cls=Verb, epilog=examples(bench.REPORT_EXAMPLES))(bench.report)
app.command("methods", cls=Verb, epilog=examples(describe.METHODS_EXAMPLES))(describe.methods)
app.command("backbones", cls=Verb, epilog=examples(describe.BACKBONES_EXAMPLES))(describe.backbones)
app.command("demo", cls=Verb, epilog=examples(demo.EXAMPLES))(demo.demo)


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
