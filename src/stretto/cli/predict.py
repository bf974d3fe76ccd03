"""`stretto predict`: texts in, answers out, in order and in bounded memory."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from stretto.cli.guard import output_file
from stretto.cli.options import BatchSize, Delimiter, Dtype, ModelFolder, Split, Text, TextB
from stretto.cli.output import on_terminal, open_model, say, say_cut, words
from stretto.errors import StrettoError
from stretto.saving.files import writing

if TYPE_CHECKING:
    from stretto.data.records import Record
    from stretto.model import AdaptiveModel, Prediction

EXAMPLES = """
stretto predict reviews-model reviews.csv --output answers.jsonl
stretto predict reviews-model reviews.csv --output answers.csv --keep id --dial 0.3 --batch-size 64
echo "A fine film." | stretto predict reviews-model
zcat texts.jsonl.gz | stretto predict reviews-model - --probabilities | head
echo "Jane Doe lives in Paris" | stretto predict names-model                     # tags of the words, and entities
stretto predict answers-model questions.jsonl --output answers.jsonl             # columns question and context
"""

Row = dict[str, Any]
STDIN = "-"

INPUT_HELP = "Texts: a file or a hub dataset; '-' or nothing reads lines from stdin."
Source = Annotated[str, Argument(metavar="INPUT", help=INPUT_HELP, show_default=False)]


def predict(
    model: ModelFolder,
    source: Source = STDIN,
    output: Annotated[
        str | None,
        Option(metavar="FILE", help="Answers: .jsonl or .csv; default: stdout.", callback=output_file),
    ] = None,
    dial: Annotated[float | None, Option(help="Trades score for cost; default: the model's own dial.")] = None,
    text: Text = None,
    text_b: TextB = None,
    delimiter: Delimiter = None,
    split: Split = None,
    keep: Annotated[str | None, Option(metavar="COLUMNS", help="More columns to write, such as id,date.")] = None,
    batch_size: BatchSize = 32,
    probabilities: Annotated[bool, Option("--probabilities", help="Write the probability of every label.")] = False,
    dtype: Dtype = "float32",
) -> None:
    """Answer texts, in the order they come.

    Each answer has a label (tags and entities; a part of the context), its score, the depth it took and its cost."""
    from stretto.data.batches import WINDOW
    from stretto.data.records import Columns, read

    if output is not None:
        check_output(output)
    loaded = open_model(model, dtype)
    if output is not None and output.lower().endswith(".csv") and not loaded.task.flat:
        raise StrettoError(
            f"Expected an output name ending in .jsonl, got '{output}': answers of the task {loaded.task.name} hold "
            "lists, which .csv cannot. Rename it."
        )
    if probabilities and not (loaded.task.answers == "sequence" and loaded.task.label_names):
        raise StrettoError(
            f"Expected --probabilities for a model that chooses among labels, got one for the task {loaded.task.name}. "
            "Leave it out."
        )
    records = read(
        source, layout=loaded.task.form.layout, columns=Columns(text, text_b, delimiter=delimiter), split=split,
        labelled=False, keep=words(keep or ""),
    )  # fmt: skip
    if dial is not None:
        loaded.method.dial.check(dial)
    if source == STDIN and sys.stdin and sys.stdin.isatty():
        say("reading lines from the terminal; end with Ctrl-D")
    # a file is there already; who writes lines to stdin may wait for the answers
    answers = Answers(loaded, dial, batch_size, 1 if source == STDIN else WINDOW, probabilities)
    rows = answers.rows(records, progress=output is not None and on_terminal())
    if output is None:
        write_rows(rows, sys.stdout, as_json)
    elif output.lower().endswith(".csv"):
        with writing(output, newline="") as file:
            write_csv(rows, file)
    else:
        with writing(output) as file:
            write_rows(rows, file, as_json)
    if output is not None:
        say(f"wrote {answers.count} answers to {output}; average cost {answers.cost / answers.count:.2f}")
    say_cut(answers.truncated, answers.count, loaded)


class Answers:
    """Predictions a few batches at a time, and what is to be told of them in the end."""

    def __init__(
        self, model: AdaptiveModel, dial: float | None, batch_size: int, n_batches: int, probabilities: bool
    ) -> None:
        self.model, self.dial, self.probabilities = model, dial, probabilities
        self.batch_size, self.at_a_time = batch_size, n_batches * batch_size
        self.count, self.truncated, self.cost = 0, 0, 0.0

    def rows(self, records: Iterable[Record], progress: bool) -> Iterator[list[Row]]:
        """The answers of a few batches after the other; no more than these are in memory."""
        from tqdm.auto import tqdm

        source = iter(records)
        with tqdm(unit=" texts", disable=not progress, leave=False) as bar:
            while batch := list(islice(source, self.at_a_time)):
                encoded = self.model.encode([record.texts for record in batch])
                predictions = self.model.answer(encoded, self.dial, self.batch_size)
                self.count += len(batch)
                self.truncated += encoded.truncated
                self.cost += sum(prediction.cost for prediction in predictions)
                bar.update(len(batch))
                yield [self.row(record, answer) for record, answer in zip(batch, predictions, strict=True)]

    def row(self, record: Record, prediction: Prediction) -> Row:
        """What came in, the answer, and what it took."""
        answer = dataclasses.asdict(prediction)
        took = {name: answer.pop(name) for name in ("depth", "cost")}
        if not self.probabilities:
            answer.pop("probabilities", None)
        taken = record.given.keys() & {*answer, *took}
        if taken:
            raise StrettoError(
                f"{record.where}: expected columns that are not called as parts of an answer ({', '.join(answer)}, "
                f"{', '.join(took)}), got '{min(taken)}'. Rename it, or do not --keep it."
            )
        return {**record.given, **answer, **took}


def as_json(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False)


def write_rows(batches: Iterable[list[Row]], file: IO[str], line: Callable[[Row], str]) -> None:
    for rows in batches:
        file.write("".join(line(row) + "\n" for row in rows))
        file.flush()


def write_csv(batches: Iterable[list[Row]], file: IO[str]) -> None:
    """One column per label with --probabilities: `p_good`."""
    writer: csv.DictWriter[str] | None = None
    for rows in batches:
        flat = [flat_row(row) for row in rows]
        if writer is None:
            writer = csv.DictWriter(file, list(flat[0]))
            writer.writeheader()
        writer.writerows(flat)


def flat_row(row: Row) -> Row:
    row = {name: " ".join(map(str, value)) if isinstance(value, list) else value for name, value in row.items()}
    spread = {f"p_{name}": value for name, value in row.get("probabilities", {}).items()}
    return {**{name: value for name, value in row.items() if name != "probabilities"}, **spread}


def check_output(output: str) -> None:
    """Refuse a name that promises another format before anything is computed."""
    path = Path(output)
    is_device = path.exists() and not path.is_file() and not path.is_dir()
    if not is_device and path.suffix.lower() not in (".jsonl", ".json", ".csv"):
        raise StrettoError(f"Expected an output name ending in .jsonl or .csv, got '{output}'. Rename it.")
