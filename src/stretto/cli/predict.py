"""`stretto predict`: texts in, answers out, in order and in bounded memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from stretto.cli.bulk import check_many, predict_folder
from stretto.cli.guard import data_name, output_place
from stretto.cli.options import (
    BatchSize,
    Delimiter,
    Dtype,
    MaxNewTokens,
    ModelFolder,
    NumBeams,
    Split,
    Text,
    TextB,
)
from stretto.cli.output import on_terminal, open_model, say, say_cut, words
from stretto.errors import StrettoError, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.data.records import Records
    from stretto.deploy.predict import Predictor, Row

EXAMPLES = """
stretto predict reviews-model reviews.csv --output answers.jsonl
stretto predict reviews-model reviews.csv --output answers.csv --keep id --dial 0.3 --batch-size 64
stretto predict reviews-model reviews.csv --output answers.parquet --budget fast   # see `stretto calibrate`
echo "A fine film." | stretto predict reviews-model
zcat texts.jsonl.gz | stretto predict reviews-model - --probabilities | head
echo "Jane Doe lives in Paris" | stretto predict names-model                     # tags of the words, and entities
stretto predict answers-model questions.jsonl --output answers.jsonl             # columns question and context
echo "Ein Haus am See." | stretto predict translation-model --num-beams 4        # text, score, average exit, cost
stretto predict reviews-model 'data/*.parquet' --output answers/ --workers 4     # many files, a folder of parts
stretto predict reviews-model 's3://bucket/*.jsonl.gz' --output answers/ --ray auto --format parquet
"""

STDIN = "-"

INPUT_HELP = "Texts: a file, a hub dataset, or a pattern of files (with a folder as output); default: lines from stdin."
OUTPUT_HELP = (
    "Answers: .jsonl, .json, .csv, .tsv (also .gz) or .parquet; or a folder, FOLDER/, which can be resumed. "
    "Default: JSON lines to stdout."
)
Source = Annotated[str, Argument(metavar="INPUT", help=INPUT_HELP, show_default=False, callback=data_name)]


def predict(
    model: ModelFolder,
    source: Source = STDIN,
    output: Annotated[str | None, Option(metavar="FILE", help=OUTPUT_HELP, callback=output_place)] = None,
    dial: Annotated[float | None, Option(help="Trades score for cost; default: the model's own dial.")] = None,
    budget: Annotated[
        str | None, Option(metavar="NAME", help="Use a stored budget of the model instead of a dial.")
    ] = None,
    text: Text = None,
    text_b: TextB = None,
    delimiter: Delimiter = None,
    split: Split = None,
    keep: Annotated[
        str | None, Option(metavar="COLUMNS", help="Columns of the input to copy to the answers, such as id,date.")
    ] = None,
    batch_size: BatchSize = 32,
    probabilities: Annotated[bool, Option("--probabilities", help="Write the probability of every label.")] = False,
    dtype: Dtype = "float32",
    num_beams: NumBeams = None,
    max_new_tokens: MaxNewTokens = None,
    workers: Annotated[
        int | None, Option(min=1, help="Processes, each with one thread; needs a folder. Default: only this process.")
    ] = None,
    ray: Annotated[
        str | None, Option(metavar="ADDRESS", help="Workers on a Ray cluster: auto, local or HOST:PORT.")
    ] = None,
    format: Annotated[str, Option(help="Format of the parts in a folder: jsonl, csv, parquet, jsonl.gz, …")] = "jsonl",
    block_size: Annotated[int, Option(min=1, help="Texts per part in a folder.")] = 10_000,
    restart: Annotated[bool, Option("--restart", help="Discard what an earlier job has left in the folder.")] = False,
) -> None:
    """Answer texts, in their order.

    Each answer has a label (tags and entities; a part of the context), its score, the depth it took and its cost.
    Lines from stdin are answered as they arrive."""
    from stretto.data.records import Columns, read
    from stretto.deploy.predict import Predictor
    from stretto.deploy.rows import check_name, write_lines, write_rows

    if dial is not None and budget is not None:
        raise StrettoError("Expected --dial or --budget, got both. Leave one out.")
    in_parts = output is not None and output.endswith(os.sep)
    named = f"part.{format}" if in_parts else output
    if named is not None:
        check_name(Path(named), flat=True)
    check_many(source, in_parts, workers, ray, split)
    loaded = open_model(model, dtype, num_beams, max_new_tokens)
    if named is not None:
        check_name(Path(named), flat=loaded.task.flat)
    predictor = Predictor(loaded, dial, budget=budget, batch_size=batch_size, probabilities=probabilities)
    columns, kept = Columns(text, text_b, delimiter=delimiter), words(keep or "")
    if in_parts:
        predict_folder(
            predictor, model, source, str(output), columns=columns, keep=kept, ending=f".{format}",
            block_size=block_size, workers=workers, ray=ray, restart=restart,
        )  # fmt: skip
        return
    records = read(
        source, layout=loaded.task.form.layout, columns=columns, split=split, labelled=False, keep=kept
    )  # fmt: skip
    if source == STDIN and sys.stdin and sys.stdin.isatty():
        say("reading lines from the terminal; end with Ctrl-D")
    if output is None:
        write_lines(predictor.rows(records), sys.stdout)
    else:
        write_rows(with_progress(predictor, records), Path(output))
        say(f"wrote {counted(predictor.count, 'answer')} to {output}; average cost {predictor.cost:.3f}")
        say(f"dial {predictor.dial:g}: {loaded.promise(predictor.dial, budget)}")
    say_cut(predictor.truncated, predictor.count, loaded)


def with_progress(predictor: Predictor, records: Records) -> Iterator[list[Row]]:
    """The rows, and on a terminal a bar of how many are done, of how many if that is known."""
    from tqdm.auto import tqdm

    shown = on_terminal()
    with tqdm(total=records.count() if shown else None, unit=" texts", disable=not shown, leave=False) as bar:
        for rows in predictor.rows(records):
            bar.update(len(rows))
            yield rows
