"""`stretto bench`: measure the time of engines, models and servers, and write the report."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from stretto.cli.guard import data_name, output_file
from stretto.cli.options import Delimiter, Dtype, Json, Label, ModelFolder, Rounds, Seed, Split, Text, TextB
from stretto.cli.output import STDOUT, keeping, numbers, on_terminal, open_model, say, say_cut, words, write_json
from stretto.errors import StrettoError

ENGINE_EXAMPLES = """
stretto bench engine --json engine.json            # tens of minutes; the same command resumes after a stop
stretto bench engine --shapes minilm-l6 --mixes sst --batch-sizes 1,32 --no-onnx
"""

DECODER_EXAMPLES = """
stretto bench decoder --json decoder.json          # the same command resumes after a stop
stretto bench decoder --shapes multi30k --batch-sizes 8,32 --dtypes float32
"""

MODEL_EXAMPLES = """
stretto bench model reviews-model test.csv
stretto bench model reviews-model test.csv --dials 0.1,0.3 --batch-sizes 1,64 --json bench.json
stretto bench model reviews-model test.csv --batch-sizes 32 --sequences 512 --stream    # as for a file
"""

SERVER_EXAMPLES = """
stretto bench server reviews-model test.csv --json server.json               # about 50 minutes, on a quiet machine
stretto bench server reviews-model test.csv --seconds 5 --contenders stretto,wait_for_batch --lengths short
"""

REPORT_EXAMPLES = """
stretto bench report            # after new results, a new method or a new setting
stretto bench report --check    # exit 1 if anything is out of date
"""

BatchSizes = Annotated[str, Option(help="Batch sizes, separated by commas.")]


def engine(
    json: Annotated[
        str | None,
        Option(metavar="[FILE]", help="Write results to this file after every combination.", callback=output_file),
    ] = None,
    shapes: Annotated[str, Option(help="Model shapes: bert-base, minilm-l6, tiny.")] = "bert-base,minilm-l6",
    mixes: Annotated[str, Option(help="Length mixes: sst, ag_news, imdb.")] = "sst,ag_news,imdb",
    batch_sizes: BatchSizes = "1,8,32",
    dtypes: Annotated[str, Option(help="float32, int8.")] = "float32,int8",
    rounds: Rounds = 9,
    seed: Seed = 0,
    threads: Annotated[int, Option(min=1, help="Threads of each contender.")] = 2,
    onnx: Annotated[bool, Option("--onnx/--no-onnx", help="Compare with ONNX Runtime.")] = True,
) -> None:
    """Measure the engine itself, with scripted decisions, against Hugging Face and ONNX Runtime."""
    from stretto.bench.engine import bench_engine
    from stretto.bench.report.engine import engine_table
    from stretto.view.tables import show_table

    file = results_file(json)
    with nullcontext() if file is None else keeping(file):
        results = bench_engine(
            file, shapes=words(shapes), mixes=words(mixes), dtypes=words(dtypes),
            batches=whole_numbers(batch_sizes, "--batch-sizes"),
            rounds=rounds, seed=seed, threads=threads, onnx=onnx, progress=on_terminal(),
        )  # fmt: skip
    if json == STDOUT:
        write_json(json, results.to_json())
        return
    show_table(engine_table(results.rows))


def decoder(
    json: Annotated[
        str | None,
        Option(metavar="[FILE]", help="Keep results here, after every combination.", callback=output_file),
    ] = None,
    shapes: Annotated[str, Option(help="Model shapes: opus-mt, multi30k, tiny.")] = "opus-mt,multi30k",
    batch_sizes: BatchSizes = "1,8,32",
    dtypes: Annotated[str, Option(help="float32, int8.")] = "float32,int8",
    rounds: Rounds = 5,
    seed: Seed = 0,
    threads: Annotated[int, Option(min=1, help="Threads of each contender.")] = 2,
) -> None:
    """Measure how fast texts are written, against Hugging Face and CTranslate2, and what scripted exits gain."""
    from stretto.bench.decoder import bench_decoder
    from stretto.bench.report.texts import decoder_table
    from stretto.view.tables import show_table

    file = results_file(json)
    with nullcontext() if file is None else keeping(file):
        results = bench_decoder(
            file, shapes=words(shapes), dtypes=words(dtypes), batches=whole_numbers(batch_sizes, "--batch-sizes"),
            rounds=rounds, seed=seed, threads=threads, progress=on_terminal(), say=say,
        )  # fmt: skip
    if json == STDOUT:
        write_json(json, results.to_json())
        return
    show_table(decoder_table(results.rows))


def model(
    model: ModelFolder,
    data: Annotated[
        str, Argument(metavar="DATA", help="Typical texts of your application; no labels needed.", callback=data_name)
    ],
    dials: Annotated[str | None, Option(help="Dials; default: the default and those for a few budgets.")] = None,
    text: Text = None,
    text_b: TextB = None,
    delimiter: Delimiter = None,
    split: Split = None,
    batch_sizes: BatchSizes = "1,8,32",
    sequences: Annotated[int, Option(min=1, help="How many texts to sample.")] = 96,
    stream: Annotated[
        bool, Option("--stream", help="Time several batches at a time, as `predict` does with a file.")
    ] = False,
    rounds: Rounds = 5,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    json: Json = None,
) -> None:
    """Measure how much faster a model is than the full model on this engine and in Hugging Face."""
    from stretto.bench.model import bench_model
    from stretto.budget.choose import dials_to_show
    from stretto.data import Columns, load
    from stretto.saving.versions import cpu_name, versions
    from stretto.view.tables import show_table

    sizes = whole_numbers(batch_sizes, "--batch-sizes")
    loaded = open_model(model, dtype)
    texts = load(
        data, task=loaded.task, columns=Columns(text, text_b, delimiter=delimiter), split=split, labelled=False
    ).texts
    say_cut(loaded.encode(texts).truncated, len(texts), loaded)
    wanted = numbers(dials, "--dials") if dials else dials_to_show(loaded.operating_points, loaded.dial)
    rows = bench_model(
        loaded, texts, wanted, sizes, rounds, seed, sequences=sequences, stream=stream, progress=on_terminal()
    )
    about = {"model": model, "data": data, "dtype": dtype, "rounds": rounds, "seed": seed}
    write_json(json, {**about, "cpu": cpu_name(), "versions": versions(), "rows": rows})
    if json != STDOUT:
        how = "in a stream of batches" if stream else "packed"
        show_table(gain_rows(rows), GAIN_FORMATS, title=f"{loaded.method.name}: gains over the full model, {how}")


def server(
    model: ModelFolder,
    data: Annotated[str, Argument(metavar="DATA", help="Labelled texts such as the server will meet.")],
    text: Text = None,
    label: Label = None,
    delimiter: Delimiter = None,
    split: Split = None,
    dial: Annotated[float | None, Option(help="Dial of stretto's servers; default: the model's own.")] = None,
    seconds: Annotated[float, Option(min=0.1, help="Seconds of each load.")] = 60.0,
    contenders: Annotated[
        str, Option(help="Servers to measure, separated by commas.")
    ] = "stretto,wait_for_batch,stretto_int8,huggingface,onnx_int8",
    lengths: Annotated[str, Option(help="short: the texts; mixed: 1 to 16 of them joined.")] = "short,mixed",
    threads: Annotated[int, Option(min=1, help="Cores and threads of each server; the client has another core.")] = 1,
    malformed: Annotated[int, Option(min=0, help="Malformed requests, each to be refused (4xx).")] = 5000,
    seed: Seed = 0,
    json: Annotated[
        str | None,
        Option(metavar="[FILE]", help="Keep results here, after every server; resumes.", callback=output_file),
    ] = None,
) -> None:
    """Measure `stretto serve` under load, on this machine, against other ways to serve the same model."""
    from stretto.bench.report.server import load_rows
    from stretto.bench.server import Bench, bench_server
    from stretto.cli.serve import require_server
    from stretto.data import Columns, load
    from stretto.view.tables import show_table

    require_server()
    loaded = open_model(model)
    found = load(data, task=loaded.task, columns=Columns(text, label=label, delimiter=delimiter), split=split)
    names = loaded.task.label_names
    if dial is not None:
        loaded.dial = float(loaded.dials_of(dial, 1)[0])
    bench = Bench(
        model, loaded, [each[0] for each in found.texts], [names[int(number)] for number in found.labels or []],
        Path(data).name.partition(".")[0], seconds, threads, seed, malformed,
    )  # fmt: skip
    file = results_file(json)
    with nullcontext() if file is None else keeping(file):
        results = bench_server(bench, words(contenders), words(lengths), file, say)
    if json == STDOUT:
        write_json(json, results.to_json())
        return
    show_table(load_rows(results.rows))


def report(
    root: Annotated[Path, Argument(metavar="[DIR]", help="A checkout: README.md, docs/, benchmarks/.")] = Path(),
    check: Annotated[bool, Option("--check", help="Write nothing; exit 1 if anything is out of date.")] = False,
) -> None:
    """Write the generated tables and plots of the documentation from benchmarks/results."""
    from stretto.bench.report.pages import Pages

    stale = Pages(root).stale(write=not check)
    for path in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(root)}")
    if check and stale:
        raise StrettoError(
            f"Expected pages that agree with the results, got {len(stale)} out of date. Run `stretto bench report`."
        )


GAIN_FORMATS = dict.fromkeys(("FLOPs ÷", "time ÷", "tracking", "× HF padded", "× HF sorted", "ms/text"), ".2f")


def gain_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "batch": row["batch_size"],
            "dial": "full" if row["dial"] is None else f"{row['dial']:g}",
            "ms/text": row["ms_per_text"],
            "FLOPs ÷": row["flops_gain"],
            "time ÷": row["time_gain"],
            "tracking": row["tracking"],
            "× HF padded": row["time_gain_vs_huggingface"],
            "× HF sorted": row["time_gain_vs_huggingface_sorted"],
        }
        for row in rows
    ]


def results_file(json: str | None) -> Path | None:
    """Where results are kept on the way, and found again; None if that is nowhere."""
    return None if json in (None, STDOUT) else Path(str(json))


def whole_numbers(text: str, flag: str) -> list[int]:
    found = numbers(text, flag)
    if not all(number.is_integer() and number >= 1 for number in found):
        raise StrettoError(f"Expected whole numbers from 1 after {flag}, got '{text}'. Write 1,8,32.")
    return [int(number) for number in found]
