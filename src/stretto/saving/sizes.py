"""Whether the sizes in config.json can be those of the weights beside it, asked before anything is made of that size.

A damaged or hostile config.json may ask for a billion layers. transformers would build them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from stretto.errors import StrettoError
from stretto.saving.trust import NO_CODE
from stretto.tasks import Task

#: Fields that say how large something is.
SIZE = re.compile(r"size|dim|^d_|layers|heads|group|position|labels|num|^n_")
#: Fields of which there must be one or more; others may say 0 or -1 for "none".
AT_LEAST_ONE = re.compile(r"layers|heads|group")
#: More than any published model has, by what the name of a field holds; the first that fits counts.
MOST = {"layers": 1000, "group": 1000, "heads": 10_000, "labels": 1_000_000, "": 100_000_000}
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


def check_sizes(name_or_path: str, file: str) -> None:
    """Refuse a config.json with a size that no weights could have."""
    try:
        fields = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # who reads it next reports the damage
    most = weight_bytes(name_or_path)
    for name, value in sizes(fields):
        allowed = next(limit for part, limit in MOST.items() if part in name)
        if value > min(allowed, most or allowed) or (value < 1 and AT_LEAST_ONE.search(name)):
            raise StrettoError(
                f"Expected sizes in config.json of '{name_or_path}' that fit its weights, got {name} {value}. "
                "Copy config.json and the weights of the same model."
            )


def sizes(fields: Any) -> Iterator[tuple[str, int]]:
    """The whole numbers of a config that are sizes, in configs within it too."""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, int) and SIZE.search(name):
            yield name, value
        yield from sizes(value)


def weight_bytes(name_or_path: str) -> int:
    """Bytes of the Hugging Face weights in a folder; 0 if they are not known: on the hub, missing, or unreadable."""
    folder = Path(name_or_path)
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)] if folder.is_dir() else []
    try:
        for file in files:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass  # its header has been checked
        return sum(file.stat().st_size for file in files)
    except (SafetensorError, OSError):
        return 0


def check_parameters(name_or_path: str, config: Any, task: Task) -> None:
    """Refuse a config whose model has more parameters than its weights have bytes. Nothing is allocated for it."""
    most = weight_bytes(name_or_path)
    if not most:
        return
    with torch.device("meta"):
        built = getattr(transformers, task.auto_class).from_config(config, **NO_CODE)
    count = sum(parameter.numel() for parameter in built.parameters())
    if count > most:
        raise StrettoError(
            f"Expected sizes in config.json of '{name_or_path}' that fit its weights, got those of {count:,} "
            f"parameters for {most:,} bytes. Copy config.json and the weights of the same model."
        )
