"""`stretto compare`: the methods of a suite on its data sets, trained, measured and compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from stretto.cli.guard import output_file
from stretto.cli.output import keeping, say

EXAMPLES = """
stretto compare benchmarks/suites/quick.yaml --data DATA --models MODELS --plan    # what would run, and how long
stretto compare benchmarks/suites/text.yaml --data DATA --models MODELS            # the same command resumes
stretto compare benchmarks/suites/text.yaml --only set=trec,method=deebert,seed=42
stretto compare benchmarks/suites/text.yaml --clock --threads 2                    # times, on an idle machine
"""


def compare(
    suite: Annotated[Path, Argument(metavar="SUITE", help="A suite: .yaml.")],
    data: Annotated[Path, Option(envvar="STRETTO_DATA", help="Folder of the data sets: <name>.jsonl.gz.")] = Path(
        "data"
    ),
    models: Annotated[
        Path | None, Option(envvar="STRETTO_MODELS", help="Folder of encoders; default: names are those of the hub.")
    ] = None,
    model: Annotated[str | None, Option(help="Use this encoder instead of the suite's.")] = None,
    output: Annotated[Path | None, Option(help="Work folder; default: runs/NAME of the suite.")] = None,
    results: Annotated[
        str | None,
        Option(metavar="FILE", help="The results; default: results.json in the work folder.", callback=output_file),
    ] = None,
    only: Annotated[str | None, Option(help="A part of the suite: set=trec,method=deebert,seed=42.")] = None,
    plan: Annotated[bool, Option("--plan", help="Print what would run and the estimated hours, and stop.")] = False,
    clock: Annotated[bool, Option("--clock", help="Time what has been trained; train nothing.")] = False,
    retime: Annotated[bool, Option("--retime", help="With --clock: time again what has been timed.")] = False,
    threads: Annotated[int, Option(min=1, help="Threads.")] = 1,
) -> None:
    """Train and compare methods as a suite describes: one JSON, one Markdown table, one HTML page."""
    import torch

    from stretto.bench.compare import Comparison, Only
    from stretto.bench.rows import Places
    from stretto.bench.suite import Suite
    from stretto.view.tables import show_table

    torch.set_num_threads(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false" if threads == 1 else "true")
    loaded = Suite.load(suite)
    work = output or Path("runs") / loaded.name
    comparison = Comparison(
        loaded, Places(data, models, work), Path(results or work / "results.json"), Only.read(only), model, say
    )
    comparison.check()
    rows = comparison.plan_clock(retime) if clock else comparison.plan()
    total = sum(row["hours"] for row in rows)
    show_table(rows, {"hours": ".2f"}, title=f"Time on one core: about {total:.1f} h")
    if plan:
        return
    with keeping(work):
        if clock:
            comparison.clock(retime)
        else:
            comparison.run()
        comparison.report()
    say(f"wrote {comparison.results_file}, {work / 'report.md'} and {work / 'report.html'}")
