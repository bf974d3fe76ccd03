"""Arguments and options that several verbs share."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from stretto.cli.guard import data_name, model_name, output_file

SOURCES = ".csv, .tsv, .jsonl (also .gz), .parquet, or a hub dataset"

ModelFolder = Annotated[str, Argument(metavar="DIR", help="Model folder.", callback=model_name)]
Labelled = Annotated[str, Argument(metavar="DATA", help=f"Labelled texts: {SOURCES}.", callback=data_name)]

Text = Annotated[str | None, Option(help="Column of the text, words or question, if its name is unusual.")]
TextB = Annotated[str | None, Option(help="Column of the second text of a pair, or of the context.")]
Label = Annotated[str | None, Option(help="Column of the label, tags or answers.")]
Delimiter = Annotated[
    str | None, Option(help="Separator of the fields of a .csv file, such as ';' or tab; default: a comma.")
]
Split = Annotated[str | None, Option(help="Split of a hub dataset.")]

BatchSize = Annotated[int, Option(min=1, help="Texts computed at once (more if they are short).")]
Dtype = Annotated[str, Option(help="float32 or int8.")]
Json = Annotated[str | None, Option(metavar="[FILE]", help="Write JSON; default FILE: stdout.", callback=output_file)]
NumBeams = Annotated[int | None, Option(min=1, help="Beams of a model that writes texts; default: its own, or 1.")]
MaxNewTokens = Annotated[int | None, Option(min=1, help="Longest text to write, in tokens; default: 128.")]
Rounds = Annotated[int, Option(min=1, help="Timed rounds.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Seed of everything random.")]
