"""`stretto train`: data and an encoder in, a model folder out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from stretto.cli.options import SOURCES, Delimiter, Label, Split, Text, TextB
from stretto.cli.output import point_formats, point_rows, resumable, say, words, worth_showing
from stretto.cli.settings import all_types, as_flag, sort_settings, take_flags, take_scratch
from stretto.cli.streams import without_panics
from stretto.cli.verbs import HELP, Verb, with_json_target
from stretto.errors import StrettoError, counted
from stretto.tasks import DEFAULT_TASK, TASKS
from stretto.training import SCRATCH
from stretto.training.processes import is_main_process

if TYPE_CHECKING:
    from stretto.data import Dataset
    from stretto.model import AdaptiveModel
    from stretto.tasks import Task

EXAMPLES = """
stretto train reviews.csv --model bert-base-uncased --output reviews-model
stretto train train.jsonl --dev dev.jsonl --model ./encoder --method pabee --output out --joint-epochs 3 --seed 1
stretto train pairs.tsv --text premise --text-b hypothesis --label gold --model roberta-base --output out
stretto train scores.csv --task regression --method lte --model bert-base-uncased --output out
stretto train names.jsonl --task tokens --method length_adaptive --model bert-base-cased --output names-model
stretto train squad.jsonl --task span --method length_adaptive --model bert-base-uncased --max-length 384 --output out
stretto train german.jsonl --task seq2seq --method depth_adaptive --model scratch:marian --output translation-model
stretto train reviews.csv --method length_adaptive+deebert --model bert-base-uncased --output out   # two methods
stretto train train.csv --model ./fine-tuned --skip backbone --output out      # train the exits only
stretto train --config run.yaml --learning-rate 3e-5                           # flags win over the file
torchrun --nproc-per-node 2 -m stretto train reviews.csv --model bert-base-uncased --output reviews-model

Further flags: the settings of the method (`stretto methods NAME`) and every name of transformers.TrainingArguments,
such as --per-device-train-batch-size 16, --seed 1, --max-steps 100 (of each stage), --report-to tensorboard.
An interrupted run resumes when the same command is given again.
"""

DEV_FRACTION = 0.1


@dataclass(frozen=True)
class Run:
    """What to train. The names are those of the flags and of the run file."""

    data: str
    model: str
    output: str
    method: str = ""
    """Default: the best known for the task (`stretto.methods.default_method`)."""
    dev: str | None = None
    unlabelled: str | None = None
    text: str | None = None
    text_b: str | None = None
    label: str | None = None
    delimiter: str | None = None
    split: str | None = None
    dev_split: str | None = None
    task: str | None = None
    max_length: int | None = None
    stride: int | None = None
    skip: tuple[str, ...] = ()
    attention_dropout: float | None = None
    dtype: str = "float32"
    overwrite: bool = False
    restart: bool = False


class TrainVerb(Verb):
    """Takes the settings out of the command line and passes them on as `--set name=value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = with_json_target(args)
        if HELP & set(args):
            args = ["--help"]  # with any settings
        else:
            takes_value = {
                flag: not getattr(option, "is_flag", False)
                for option in self.get_params(ctx)
                for flag in (*option.opts, *option.secondary_opts)
            }
            args, settings = take_flags(args, takes_value, self.known())
            args = [*(part for name, value in settings.items() for part in ("--set", f"{name}={value}")), *args]
        return super().parse_args(ctx, args)

    def known(self) -> Mapping[str, Any]:
        """The settings there are, and their types."""
        return all_types()


def train(
    data: Annotated[
        str | None, Argument(metavar="DATA", help=f"Labelled texts: {SOURCES}.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, Option(help="Encoder to start from: a folder, a hub name, or scratch:marian, …:bart, …:t5.")
    ] = None,
    output: Annotated[str | None, Option(help="Folder for the trained model.")] = None,
    method: Annotated[
        str | None, Option(help="Method (`stretto methods` lists them); default: best for the task.")
    ] = None,
    dev: Annotated[str | None, Option(help="Labelled texts to measure on; default: a tenth of DATA.")] = None,
    unlabelled: Annotated[
        str | None, Option(metavar="DATA", help="Texts without labels; the full model's answers to them are learned.")
    ] = None,
    text: Text = None,
    text_b: TextB = None,
    label: Label = None,
    delimiter: Delimiter = None,
    split: Split = None,
    dev_split: Annotated[str | None, Option(help="Split of a hub dataset to measure on.")] = None,
    task: Annotated[str | None, Option(help=f"{', '.join(TASKS)}; default: {DEFAULT_TASK}.")] = None,
    max_length: Annotated[int | None, Option(min=1, help="Longest input in tokens; default: the encoder's.")] = None,
    stride: Annotated[
        int | None, Option(min=0, help="Overlap of the windows of a context, in tokens (task span); default: 128.")
    ] = None,
    skip: Annotated[
        str | None, Option(help="Stages to leave out: 'backbone' if MODEL is already fine-tuned; default: none.")
    ] = None,
    attention_dropout: Annotated[
        float | None,
        Option(min=0, max=1, help="Dropout of attention in training; default: the encoder's. 0 saves time on a CPU."),
    ] = None,
    dtype: Annotated[str | None, Option(help="Data type of the measurements: float32 (default) or int8.")] = None,
    config: Annotated[Path | None, Option(help="A YAML file with the same names; flags win over the file.")] = None,
    overwrite: Annotated[bool | None, Option("--overwrite", help="Replace a finished model.")] = None,
    restart: Annotated[bool | None, Option("--restart", help="Discard an unfinished run at OUTPUT.")] = None,
    settings: Annotated[list[str] | None, Option("--set", help="name=value.", hidden=True)] = None,
) -> None:
    """Train an adaptive model from an encoder and labelled texts, and save it.

    The stages of the method run one after another. Then its operating points are measured and a dial is chosen. The
    last lines say what it costs in score, how many times faster it is, and what is guaranteed."""
    flags = {
        "data": data, "model": model, "output": output, "method": method, "dev": dev, "unlabelled": unlabelled,
        "text": text, "text_b": text_b,
        "label": label, "delimiter": delimiter, "split": split, "dev_split": dev_split, "task": task, "skip": skip,
        "max_length": max_length, "stride": stride, "attention_dropout": attention_dropout, "dtype": dtype,
        "overwrite": overwrite, "restart": restart,
        **dict(pair.partition("=")[::2] for pair in settings or []),
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    run, loose = make_run({**(read_run_file(config) if config else {}), **given})
    train_run(run, loose)


def read_run_file(path: Path) -> dict[str, Any]:
    """The names and values of a YAML file."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise StrettoError(f"Expected a YAML file after --config, got '{path}': {reason}. Correct it.") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise StrettoError(f"{path}: expected lines such as 'model: bert-base-uncased', got other content. Correct it.")
    return {name.replace("-", "_"): value for name, value in content.items()}


#: What the fields of a run may hold that are not plain text.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "skip": ((str, list, tuple), "text"),
    "overwrite": ((bool,), "true or false"),
    "restart": ((bool,), "true or false"),
    "max_length": ((int,), "a whole number"),
    "stride": ((int,), "a whole number"),
    "attention_dropout": ((int, float), "a number"),
}


def make_run(given: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """Our own options, and the rest: settings still to be sorted."""
    fields = {field.name for field in dataclasses.fields(Run)}
    own = {name: value for name, value in given.items() if name in fields and value is not None}
    missing = [name for name in ("data", "model", "output") if name not in own]
    if missing:
        flags = ", ".join("DATA" if name == "data" else f"--{name}" for name in missing)
        raise typer.BadParameter(f"Missing {flags} (on the command line or in the file given by --config).")
    for name, value in own.items():
        wanted, kind = KINDS.get(name, ((str,), "text"))
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise StrettoError(f"Expected {kind} for '{name}', got {value!r}. Correct it in the run file.")
    if isinstance(own.get("skip"), (str, list)):
        own["skip"] = tuple(words(own["skip"]) if isinstance(own["skip"], str) else map(str, own["skip"]))
    return Run(**own), {name: value for name, value in given.items() if name not in fields}


def train_run(run: Run, loose: dict[str, Any]) -> None:
    """Everything after the command line."""
    from stretto.data.hub import check_model_name
    from stretto.data.sources import check_source

    if not run.model.startswith(SCRATCH):
        check_model_name(run.model)  # before torch is loaded, which takes seconds
    check_source(run.data)
    from transformers import set_seed

    from stretto.methods import METHODS, default_method
    from stretto.model import make_config
    from stretto.saving.folder import SETTINGS, quiet_transformers
    from stretto.saving.place import locked, refuse_finished, remove_work
    from stretto.training.plan import PLAN, enough_epochs, with_defaults
    from stretto.training.processes import wait_for_all
    from stretto.training.run import train as train_model

    if not run.method:
        run = dataclasses.replace(run, method=default_method(task_of(run)))
    sizes, loose = take_scratch(run.method, loose) if run.model.startswith(SCRATCH) else ({}, loose)
    config, arguments = sort_settings(run.method, loose)
    make_config(METHODS[run.method], config)  # unfit settings are named before any work is done
    output, work = Path(run.output), Path(f"{Path(run.output)}.work")  # "out/" and "out" are one
    with locked(output, main=is_main_process()), quiet_transformers(), resumable(work):
        if not run.overwrite:
            refuse_finished(output, SETTINGS, "model")
        complete = with_defaults(arguments)
        check_arguments(complete)
        seed = complete["seed"]
        set_seed(seed)  # exits start from random weights
        model, train_data, dev_data, unlabelled = open_run(run, config, sizes, seed)
        before = model.method.config
        model.method.config = enough_epochs(before, config, len(train_data), complete)
        say_epochs(before, model.method.config, len(train_data))
        if is_main_process():
            remove_work(output, SETTINGS, work / PLAN, restart=run.restart)
            if any(work.glob("[0-9]-*")):
                say(f"resuming the unfinished run in {work}")
            else:
                (work / PLAN).unlink(missing_ok=True)  # it did not get anywhere
        wait_for_all()
        train_model(
            model, train_data, dev_data, output, skip=run.skip, unlabelled=unlabelled,
            attention_dropout=run.attention_dropout, progress=is_main_process(), **arguments,
        )  # fmt: skip
    if is_main_process():
        show_result(run, model, dev_data)


def task_of(run: Run) -> type[Task]:
    """The task that is to be learned, or that MODEL knows."""
    from stretto.saving.folder import load_config, load_task, read_folder

    if "backbone" not in run.skip:
        return TASKS[run.task or DEFAULT_TASK]
    return type(load_task(run.model, load_config(run.model), read_folder(run.model)))


def say_epochs(before: Any, config: Any, examples: int) -> None:
    """Report which epochs were raised for few examples."""
    from stretto.training.plan import FEWEST_STEPS

    raised = {name: value for name, value in vars(config).items() if value != getattr(before, name)}
    if raised:
        flags = ", ".join(
            f"{as_flag(name)} {value:g} (default: {getattr(before, name):g})" for name, value in raised.items()
        )
        say(f"few examples ({examples}): using {flags} to train at least {counted(FEWEST_STEPS, 'step')}")


def open_run(
    run: Run, config: dict[str, Any], sizes: dict[str, Any], seed: int
) -> tuple[AdaptiveModel, Dataset, Dataset, Dataset | None]:
    """The model, the training data, the dev data and the texts without labels; `sizes` are those of a model that starts
    from nothing."""
    from stretto.data import Columns, load, split_off
    from stretto.data.labels import mixed_kinds
    from stretto.model import AdaptiveModel

    columns = Columns(run.text, run.text_b, run.label, run.delimiter)
    knows_task = "backbone" in run.skip
    if knows_task and run.model.startswith(SCRATCH):
        raise StrettoError(f"Expected a trained model with --skip backbone, got {run.model}. Leave out --skip.")

    def open_model(task: Task | None = None) -> AdaptiveModel:
        with without_panics():
            return AdaptiveModel.from_pretrained(
                run.model, run.method, task=task, dtype=run.dtype, max_length=run.max_length, **config
            )

    known = open_model() if knows_task else None
    if known and run.task not in (None, known.task.name):
        raise StrettoError(
            f"Expected the task of MODEL ({known.task.name}) with --skip backbone, got --task {run.task}. Leave it out."
        )
    names = known.task.label_names if known else None
    task_class = type(known.task) if known else TASKS[run.task or DEFAULT_TASK]
    if run.model.startswith(SCRATCH) and task_class.answers != "text":
        raise StrettoError(
            f"Expected --task seq2seq with --model {run.model}, got {task_class.name}. Add it, or name an encoder."
        )
    settings = {} if run.stride is None else {"stride": run.stride}
    if settings and (known or "stride" not in inspect.signature(task_class).parameters):
        raise StrettoError(
            f"Expected --stride only for a new task with windows, got {task_class.name}"
            f"{', which MODEL was trained for' if known else ''}. Leave it out."
        )
    read = partial(load, task=task_class, columns=columns)
    train_data = read(run.data, split=run.split, label_names=names)
    if run.dev is None and run.dev_split is None:
        train_data, dev_data = split_off(train_data, DEV_FRACTION, seed)
        total = counted(len(train_data) + len(dev_data), "example")
        say(f"no --dev: measuring on {len(dev_data)} of {total}, held out from training")
    else:
        dev_data = read(run.dev or run.data, split=run.dev_split, label_names=train_data.label_names)
    if hint := mixed_kinds(train_data.label_names or []):
        say(hint)
    plain = dataclasses.replace(columns, label=None)
    texts = None if run.unlabelled is None else load(run.unlabelled, task=task_class, columns=plain, labelled=False)
    if known is not None:
        return known, train_data, dev_data, texts
    task = task_class.posed_by(train_data, **settings)
    if run.model.startswith(SCRATCH):
        from stretto.training.scratch import fresh_model

        model = fresh_model(
            run.model, sizes, train_data, task, run.method, config, seed, dtype=run.dtype, max_length=run.max_length
        )
        return model, train_data, dev_data, texts
    return open_model(task=task), train_data, dev_data, texts


def check_arguments(arguments: dict[str, Any]) -> None:
    """Let transformers look at its arguments before any work is done; under torchrun, meet the other processes."""
    from transformers import TrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks

    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if arguments.get(name, 1) < 1:
            raise StrettoError(f"Expected {as_flag(name)} of at least 1, got {arguments[name]}. Correct the flag.")
    if not 0 <= arguments["seed"] < 2**32:
        raise StrettoError(f"Expected a --seed from 0 to 2**32 - 1, got {arguments['seed']}. Correct the flag.")
    try:
        args = TrainingArguments(output_dir="unused", use_cpu=True, metric_for_best_model="score", **arguments)
        get_reporting_integration_callbacks(args.report_to)
        _ = args.device  # joins the process group
    except (ValueError, TypeError, ImportError) as error:
        raise StrettoError(
            f"Expected settings that transformers.TrainingArguments accepts, got: "
            f"{' '.join(str(error).split()):.400}. Correct the flag."
        ) from error


def show_result(run: Run, model: AdaptiveModel, dev: Dataset) -> None:
    """The operating points, what to do next, and a summary of three lines."""
    from stretto.budget.choose import how_chosen
    from stretto.saving.points import relied_on
    from stretto.view.tables import show_table

    points = [point for point in model.operating_points if not point.name]
    rows = point_rows(worth_showing(points, model.dial), model)
    show_table(rows, point_formats(points), title=f"Operating points on the dev data ({len(rows)} of {len(points)})")
    chosen = relied_on(model.operating_points, model.dial, model.dtype)
    assert chosen is not None  # the default was measured
    truncated = model.provenance.get("texts truncated", 0)
    if truncated:
        say(f"truncated to {model.max_length} tokens: {counted(truncated, 'text')}")
    kind = "csv" if model.task.flat else "jsonl"
    print(
        f"\nSaved to {run.output}. Default dial: {model.method.dial.name} {model.dial:g}, "
        f"{how_chosen(points, chosen, model.method.dial)}.\n"
        "\nTry:\n"
        f"  stretto evaluate {run.output} TEST.{kind} --plot curve.png\n"
        f"  stretto predict {run.output} TEXTS.{kind} --output answers.jsonl\n"
        f"  stretto bench model {run.output} TEST.{kind}\n"
    )
    for line in three_lines(model, dev):
        print(line)


def three_lines(model: AdaptiveModel, dev: Dataset) -> list[str]:
    """Score before and after, how many times faster, what is guaranteed."""
    from stretto.bench.faster import how_much_faster
    from stretto.budget.risk import INSTALL, have_mapie
    from stretto.saving.versions import cpu_name

    measured = {point.dial: point for point in model.operating_points if not point.name}
    before, after = (measured[dial].score for dial in (model.method.dial.off, model.dial))
    full, hugging_face = how_much_faster(model, dev.texts)
    missing = "" if have_mapie() or not model.task.judged else f". {INSTALL}"
    return [
        f"Score:  {model.task.main_metric} {before:.4f} before, {after:.4f} after ({len(dev)} dev texts).",
        f"Speed:  {full.alone:.1f} times the full model's one text at a time, {full.bulk:.1f} times in bulk "
        f"(Hugging Face's: {hugging_face.alone:.1f} and {hugging_face.bulk:.1f} times), on {cpu_name()}.",
        f"Promise: {model.promise()}{missing}.",
    ]
