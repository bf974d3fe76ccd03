"""What is looked at before a verb runs: the files it is to write, and the names of what it is to read.

Every option that names a file to write has the callback `output_file`. Before a verb runs, `check_outputs` compares
these files with everything else on its command line: the same path, a symbolic link and a hard link are all refused.
The callbacks `model_name` and `data_name` are for what names a model or data: `check_inputs` refuses what is neither
here nor within reach, before torch is loaded, which takes seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import typer

from stretto.cli.output import STDOUT, writable
from stretto.errors import StrettoError
from stretto.saving.files import write_errors

STDIN = "-"
MODEL, DATA = "stretto.model", "stretto.data"  # in a context: what is read
OUTPUTS = "stretto.outputs"  # in a context: parameter -> its flag and the file
#: Files of a model or dataset folder that are read from it.
OF_A_FOLDER = (
    "config.json", "generation_config.json", "stretto.json", "pretraining.json", "*.safetensors",
    "*.safetensors.index.json", "pytorch_model*", "*token*.json", "vocab.*", "merges.txt", "*.model", "*.arrow",
    "dataset_info.json", "dataset_dict.json", "state.json",
)  # fmt: skip


def output_file(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
    """The callback of an option that writes. A file that cannot be written is refused before any work is done."""
    if value is not None and value != STDOUT:
        ctx.meta.setdefault(OUTPUTS, {})[param.name] = (param.opts[0], value)
    return writable(value)


def model_name(ctx: typer.Context, value: str | None) -> str | None:
    """The callback of an argument or option that names a model to read."""
    ctx.meta[MODEL] = value
    return value


def data_name(ctx: typer.Context, value: str | None) -> str | None:
    """The callback of an argument that names data to read."""
    ctx.meta[DATA] = value
    return value


def check_inputs(ctx: typer.Context) -> None:
    """Refuse a model or data on a hub that does not answer."""
    from stretto.data.hub import check_model_name
    from stretto.data.sources import check_source

    if ctx.meta.get(MODEL) is not None:
        check_model_name(ctx.meta[MODEL])
    if ctx.meta.get(DATA) is not None:
        check_source(ctx.meta[DATA])


def output_place(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
    """The same for a file, or for a folder that parts are written to: its name ends in a slash."""
    if value is None or not value.endswith(os.sep):
        return output_file(ctx, param, value)
    there = next(folder for folder in (Path(value), *Path(value).absolute().parents) if folder.exists())
    with write_errors(value), tempfile.TemporaryFile(dir=there):
        return value


def check_outputs(ctx: typer.Context) -> None:
    """Refuse to write to what is read, into the files of a folder that is read, or twice to one file."""
    written: dict[str, tuple[str, str]] = ctx.meta.get(OUTPUTS, {})
    outputs = {flag: Path(value) for flag, value in written.values()}
    given = [value for name, value in ctx.params.items() if name not in written]
    flat = [each for value in given for each in (value if isinstance(value, (list, tuple)) else [value])]
    others = [str(each) for each in flat if isinstance(each, (str, Path))]
    for flag, path in outputs.items():
        for other in others:
            if is_same(path, other):
                raise StrettoError(
                    f"Expected an output that is not the input, got '{path}' for both. Choose another {flag}."
                )
            if path.parent.resolve() == Path(other).resolve() and any(fnmatch(path.name, each) for each in OF_A_FOLDER):
                raise StrettoError(
                    f"Expected another file after {flag}, got '{path}', which belongs to the folder '{other}'. "
                    "Choose another name."
                )
    flags = list(outputs)
    for one, other in ((a, b) for i, a in enumerate(flags) for b in flags[:i]):
        if outputs[one].resolve() == outputs[other].resolve():
            raise StrettoError(
                f"Expected a file for each of {other} and {one}, got '{outputs[one]}' for both. Rename one."
            )


def is_same(path: Path, other: str) -> bool:
    """Whether a regular file to write is the file `other`, or the one that stdin reads."""
    if not path.is_file():
        return False
    if other == STDIN:
        return sys.stdin is not None and _is_stdin(path)
    return os.path.exists(other) and path.samefile(other)


def _is_stdin(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdin.fileno()))
    except (OSError, ValueError):  # closed, or no file at all
        return False
