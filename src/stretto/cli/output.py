"""What the verbs say (stderr), print (stdout) and write (files that appear whole or not at all)."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.streams import without_panics
from stretto.errors import StrettoError, counted
from stretto.saving import files
from stretto.saving.files import write_errors
from stretto.training.processes import is_main_process

if TYPE_CHECKING:
    from stretto.model import AdaptiveModel
    from stretto.saving.points import OperatingPoint

STDOUT = "-"


def say(line: str) -> None:
    """Report something that is not a result, on stderr."""
    if is_main_process():
        print(line, file=sys.stderr, flush=True)


def say_cut(truncated: int, count: int, model: AdaptiveModel) -> None:
    """Report how many texts were truncated."""
    if truncated:
        say(f"truncated to {model.max_length} tokens: {truncated} of {counted(count, 'text')}")


def on_terminal() -> bool:
    """Whether progress bars make sense."""
    return is_main_process() and sys.stderr.isatty()


def writable(target: str | None) -> str | None:
    """The target itself. A file that cannot be written is refused now, before any work is done."""
    if target is None or target == STDOUT or (Path(target).exists() and not Path(target).is_dir()):
        return target
    with write_errors(target):
        if Path(target).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=Path(target).parent):
            return target


@contextmanager
def keeping(place: Path, how: str = "the same command resumes it.") -> Iterator[None]:
    """Say after Ctrl-C how to resume what is kept at `place`, a file or a folder."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if place.exists():
            interrupt.add_note(f"The work so far is in '{place}': {how}")
        raise


@contextmanager
def resumable(work: Path) -> Iterator[None]:
    """Say how to resume what is kept in the folder `work`, after Ctrl-C and after an error."""
    how = "the same command resumes it, --restart discards it."
    try:
        with keeping(work, how):
            yield
    except StrettoError as error:
        if work.exists() and "--restart" not in str(error):
            raise StrettoError(f"{error} The work so far is in '{work}': {how}") from error
        raise


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """To a file, or to stdout for '-'; None writes nothing."""
    if target is None:
        return
    if target == STDOUT:
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return
    files.write_json(target, content)
    say(f"wrote {target}")


def worth_showing(points: list[OperatingPoint], default: float, step: float = 0.03) -> list[OperatingPoint]:
    """The first, the last, the default, and of the others those that cost clearly less than the one shown before."""
    shown = points[:1]
    for point in points[1:]:
        if point.dial == default or point is points[-1] or shown[-1].cost - point.cost >= step:
            shown.append(point)
    return shown


def point_rows(points: list[OperatingPoint], model: AdaptiveModel) -> list[dict[str, Any]]:
    """Operating points as rows of a table; the model's own dial is marked, and whether it is guaranteed."""
    return [
        {
            "dial": point.dial,
            **point.metrics,
            "cost": point.cost,
            "depth": point.depth,
            "": f"default ({model.standing()})" if point.dial == model.dial else "",
        }
        for point in points
    ]


def point_formats(points: list[OperatingPoint]) -> dict[str, str]:
    return {**dict.fromkeys(points[0].metrics, ".4f"), "cost": ".3f", "depth": ".2f"}


def open_model(
    path: str, dtype: str = "float32", num_beams: int | None = None, max_new_tokens: int | None = None
) -> AdaptiveModel:
    """A model folder, silently. Beams and new tokens are for models that write texts."""
    from stretto.model import AdaptiveModel
    from stretto.saving.folder import quiet_transformers

    with quiet_transformers(), without_panics():
        model = AdaptiveModel.from_pretrained(path, dtype=dtype)
    given = {"num_beams": num_beams, "max_new_tokens": max_new_tokens}
    writing = {name: value for name, value in given.items() if value is not None}
    if writing and model.task.answers != "text":
        raise StrettoError(
            f"Expected a model that writes texts with --{min(writing).replace('_', '-')}, got one for the task "
            f"{model.task.name}. Leave it out."
        )
    model.generation.update(writing)
    return model


def numbers(text: str, flag: str) -> list[float]:
    """'0, 0.1,0.3' as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise StrettoError(
            f"Expected numbers separated by commas after {flag}, got '{text}'. Write 0,0.1,0.3."
        ) from None


def words(text: str) -> list[str]:
    """'a, b' as ['a', 'b']."""
    return [part.strip() for part in text.split(",") if part.strip()]
