"""`stretto predict` to a folder: many files, several processes or a cluster, and a job that can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.cli.output import on_terminal, resumable, say, say_cut
from stretto.errors import StrettoError, counted

if TYPE_CHECKING:
    from stretto.data.records import Columns
    from stretto.deploy.bulk import Answering, Done
    from stretto.deploy.predict import Predictor


def check_many(source: str, in_parts: bool, workers: int | None, ray: str | None, split: str | None) -> None:
    """Refuse options that need an output folder if there is none, and inputs that cannot be split into parts."""
    from stretto.data.places import is_pattern, is_url

    if not in_parts:
        for given, what in (
            (workers is not None, "--workers"), (ray is not None, "--ray"),
            (is_url(source) or is_pattern(source), f"'{source}'"),
        ):  # fmt: skip
            if given:
                raise StrettoError(f"Expected a folder to write to with {what}, got none. Add --output FOLDER/.")
    elif source == "-" or split is not None:
        raise StrettoError(
            f"Expected files to answer in parts, got {'stdin' if source == '-' else 'a split of a hub dataset'}. "
            "Write to a file, such as --output answers.jsonl."
        )


def predict_folder(
    predictor: Predictor, model: str, source: str, output: str, *, columns: Columns, keep: Sequence[str], ending: str,
    block_size: int, workers: int | None, ray: str | None, restart: bool,
) -> None:  # fmt: skip
    from tqdm.auto import tqdm

    from stretto.data.places import expand, is_url
    from stretto.deploy.bulk import WORK, Job, run_job
    from stretto.saving.folder import SETTINGS

    sources, folder = expand(source), Path(output).absolute()
    if (folder / SETTINGS).exists():
        raise StrettoError(
            f"Expected an output folder of its own, got '{output}', which holds a model. Choose another."
        )
    if inside := [each for each in sources if not is_url(each) and Path(each).parent.resolve() == folder.resolve()]:
        raise StrettoError(
            f"Expected an output folder that is not read, got '{output}', which holds '{Path(inside[0]).name}'. "
            "Choose another."
        )
    loaded = predictor.model
    job = Job(
        str(Path(model).absolute()) if Path(model).exists() else model, sources, str(folder), predictor.dial, ending,
        block_size, predictor.batch_size, predictor.probabilities, loaded.dtype, columns, tuple(keep),
        dict(loaded.generation), loaded.task.form.layout,
    )  # fmt: skip
    answered = 0
    with (
        resumable(folder / WORK),
        tqdm(unit=" texts", disable=not on_terminal(), leave=False) as bar,
    ):

        def after(done: Done) -> None:
            nonlocal answered
            answered += 1
            bar.update(done.records)

        manifest = run_job(job, loaded, answering(predictor, workers, ray), restart=restart, after=after)
    before = len(manifest["parts"]) - answered
    say(
        f"wrote {counted(manifest['records'], 'answer')} in {counted(len(manifest['parts']), 'part')} to {output}"
        + (f", {before} of them before" if before else "")
        + f"; average cost {manifest['cost']:.2f}"
    )
    say_cut(manifest["truncated"], manifest["records"], loaded)


def answering(predictor: Predictor, workers: int | None, ray: str | None) -> Answering:
    """The function that answers: in this process, in several, or on a cluster."""
    from stretto.deploy.bulk import alone

    if ray is not None:
        from stretto.deploy.cluster import on_ray

        return partial(on_ray, address=ray, workers=workers)
    if workers is not None and workers > 1:
        from stretto.deploy.processes import in_processes

        return partial(in_processes, workers=workers)
    return partial(alone, model=predictor.model)
