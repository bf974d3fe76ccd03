"""Files of a model from a folder or the hub: code in them is never executed.

transformers runs Python files of a model if its config.json or tokenizer_config.json names them under `auto_map`. For
an unknown architecture it asks first, and reads the answer from stdin, where our texts may come from. So both files are
checked here before transformers reads them. It is always called with `NO_CODE`, so that it neither asks nor runs
anything. Without a network it is called for what is in the cache only (see data/hub.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from stretto.data.hub import check_model_name, reachable
from stretto.errors import StrettoError

#: Neither ask for code nor run it.
NO_CODE: dict[str, Any] = {"trust_remote_code": False}


def as_data(name_or_path: str) -> dict[str, Any]:
    """The arguments for every `from_pretrained` of transformers."""
    return {**NO_CODE, "local_files_only": not Path(name_or_path).is_dir() and not reachable()}


#: The files that may name code to run.
CAN_NAME_CODE = ("config.json", "tokenizer_config.json")


def find(name_or_path: str, file: str) -> str | None:
    """A file of a local folder or a hub repository, or None."""
    check_name(name_or_path)
    if Path(name_or_path).is_dir():
        path = Path(name_or_path) / file
        return str(path) if path.is_file() else None
    check_model_name(name_or_path)
    try:
        return cached_file(
            name_or_path, file, local_files_only=not reachable(), _raise_exceptions_for_missing_entries=False
        )
    except OSError as error:
        raise StrettoError(
            f"Expected a model folder or a hub id, got '{name_or_path}', which is neither a folder here nor "
            f"reachable on the hub. Check the path. ({str(error).splitlines()[0]})"
        ) from error


def check_name(path: str) -> None:
    """Refuse a model name that other libraries cannot handle."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise StrettoError(
            f"Expected the name of a model in UTF-8, got {path!a}. Rename the folder, or link to it under another name."
        ) from None


def refuse_code(name_or_path: str) -> None:
    """Refuse a model that names code to run, before any other library reads it."""
    for file in CAN_NAME_CODE:
        path = find(name_or_path, file)
        code = auto_map(Path(path)) if path else None
        if code:
            raise StrettoError(
                f"Expected a model that runs without code of its own, got '{name_or_path}', whose {file} names code to "
                f"execute (auto_map: {code!r:.80}). stretto never executes code from a model: use one of an "
                "architecture that `stretto backbones` lists."
            )


def auto_map(path: Path) -> Any:
    """What a JSON file names as code, at any depth. A damaged file names none; the next reader reports the damage."""
    try:
        left = [json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, RecursionError):
        return None
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if value.get("auto_map"):
                return value["auto_map"]
            left += value.values()
        elif isinstance(value, list):
            left += value
    return None
