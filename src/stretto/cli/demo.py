"""`stretto demo`: all steps on example data, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from stretto.cli.options import Delimiter, Label, Rounds, Seed, Text, TextB
from stretto.cli.output import keeping, say
from stretto.errors import StrettoError
from stretto.tasks import DEFAULT_TASK, TASKS

EXAMPLES = """
stretto demo
stretto demo --model bert-base-uncased --data reviews.csv --output my-demo
stretto demo --limit 2000 --epochs 1 --output quick-demo
"""


def demo(
    model: Annotated[str | None, Option(help="Encoder: a folder or a hub name; default: MiniLM-L6.")] = None,
    data: Annotated[str | None, Option(help="Labelled texts (test data are split off); default: film reviews.")] = None,
    output: Annotated[Path, Option(help="Folder for the model and the report.")] = Path("demo-output"),
    text: Text = None,
    text_b: TextB = None,
    label: Label = None,
    delimiter: Delimiter = None,
    task: Annotated[str, Option(help="A task that answers whole texts, such as regression.")] = DEFAULT_TASK,
    limit: Annotated[int, Option(min=1, help="Maximum number of training texts.")] = 6000,
    epochs: Annotated[float, Option(min=0, help="Epochs of fine-tuning.")] = 2,
    rounds: Rounds = 5,
    seed: Seed = 42,
) -> None:
    """Run all steps on example data, in minutes.

    Fine-tune, train exits, compare with the full model, answer three texts, write a report."""
    say("loading")
    from stretto.bench.demo import Demo, run_demo
    from stretto.data import Columns

    if data is None and (text or text_b or label or task != DEFAULT_TASK):
        raise StrettoError("Expected --data together with --text, --text-b, --label or --task, got none. Add --data.")
    if TASKS[task].answers != "sequence":
        raise StrettoError(
            f"Expected a task that answers whole texts, such as classification or regression, got '{task}'. The demo "
            "trains exits, which answer whole texts; use `stretto train` for other tasks."
        )
    settings = Demo(model, data, Columns(text, text_b, label, delimiter), task, limit, epochs, rounds, seed)
    with keeping(output):
        run_demo(settings, output, report_step=print_now)


def print_now(line: str) -> None:
    """Steps go to stdout, in order with the tables."""
    print(line, flush=True)
