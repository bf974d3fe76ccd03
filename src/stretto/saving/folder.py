"""The saved model: a plain Hugging Face folder plus `stretto.json` and `stretto.safetensors`.

Loading never executes code from the folder (see trust.py), and reads weights from safetensors only. (A plain
Hugging Face model to start from may have them in pytorch_model.bin, a pickle that transformers reads for its weights
only.) A failed or interrupted save changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from stretto.backbones import BACKBONES, register_architectures
from stretto.errors import StrettoError
from stretto.saving.card import model_card
from stretto.saving.files import replacing_folder, write_json, write_tensors, write_text
from stretto.saving.migrations import FORMAT, to_current
from stretto.saving.points import OperatingPoint
from stretto.saving.sizes import check_parameters, check_sizes
from stretto.saving.trust import as_data, check_name, find, refuse_code
from stretto.tasks import Task, task_from_config

#: Any one of these makes a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model")
SETTINGS, WEIGHTS = "stretto.json", "stretto.safetensors"
#: Types of the fields of stretto.json, in Python and in words.
FIELDS: dict[str, tuple[Any, str]] = {
    "method": (str, "a string"), "config": (dict, "an object"), "dial": ((int, float), "a number"),
    "points": (list, "a list"), "provenance": (dict, "an object"), "task": (dict, "an object"),
}  # fmt: skip
#: Files of an earlier model, which are removed with it.
MODEL_FILES = (
    SETTINGS, *TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json", "merges.txt", "*.spm", "*token*.json",
)  # fmt: skip


@dataclass
class Folder:
    """What `stretto.json` says."""

    method: str
    config: dict[str, Any]
    dial: float
    points: list[OperatingPoint]
    provenance: dict[str, Any]
    task: dict[str, Any] = field(default_factory=dict)  # its name and settings; empty: taken from config.json
    format: int = FORMAT
    weights: str | None = None  # where stretto.safetensors is; not written

    def to_json(self) -> dict[str, Any]:
        """What stretto.json holds."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "weights"}
        return {**fields, "points": [point.to_json() for point in self.points]}

    def load_weights(self, module: nn.Module, prefix: str = "", *, new_labels: bool = False) -> None:
        """Load the saved weights, or those under `prefix`, into a new method or a part of it.

        With `new_labels`, weights that depend on the number of labels stay as built, as in transformers."""
        try:
            saved = load_file(self.weights) if self.weights else {}
            fitting = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
            built = module.state_dict()
            if new_labels:
                fitting = {k: built[k] if k in built and built[k].shape != v.shape else v for k, v in fitting.items()}
            module.load_state_dict(fitting)
        except RuntimeError as error:
            raise StrettoError(
                f"Expected {WEIGHTS} to fit {self.method}, got {unfit_weights(fitting, built)}. "
                "Train again, or copy the folder again."
            ) from error
        except (SafetensorError, OSError) as error:
            raise StrettoError(
                f"Expected {WEIGHTS} to hold the weights of {self.method}, got an unreadable file "
                f"({str(error).splitlines()[0]}). Train again, or copy the folder again."
            ) from error


def unfit_weights(saved: Mapping[str, torch.Tensor], built: Mapping[str, torch.Tensor]) -> str:
    """The first weight that does not fit, and why."""
    for name in sorted({*saved, *built}):
        if name not in saved:
            return f"none for {name} of shape {tuple(built[name].shape)}"
        if name not in built:
            return f"{name} of shape {tuple(saved[name].shape)}, which it does not have"
        if saved[name].shape != built[name].shape:
            return f"{name} of shape {tuple(saved[name].shape)} in place of {tuple(built[name].shape)}"
    return "weights of another form"


def others(names: Sequence[str]) -> str:
    """' and 3 more', after the first of several names."""
    return f" and {len(names) - 1} more" if names[1:] else ""


def read_folder(name_or_path: str) -> Folder | None:
    """The settings of a stretto folder; None for a plain Hugging Face model."""
    path = find(name_or_path, SETTINGS)
    if path is None:
        return None
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        for name, (kind, words) in FIELDS.items():
            if name in settings and not isinstance(settings[name], kind):
                raise StrettoError(
                    f"Expected {words} as '{name}' of {SETTINGS} in '{name_or_path}', got {settings[name]!r:.60}. "
                    "Copy the folder again."
                )
        current = to_current(settings)
        current["points"] = [OperatingPoint.from_json(point) for point in current["points"]]
        return Folder(**current, weights=find(name_or_path, WEIGHTS))
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StrettoError(
            f"Expected a complete {SETTINGS} in '{name_or_path}', got a damaged one ({error!r}). Copy the folder again."
        ) from error


def summary(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first.rstrip('.')}"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide Hugging Face's long report of a new head, which is expected here."""
    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            logging.enable_progress_bar()


def load_config(name_or_path: str) -> Any:
    """The Hugging Face config of a supported architecture."""
    if Path(name_or_path).is_dir() and find(name_or_path, "config.json") is None:
        raise StrettoError(
            f"Expected a model folder with a config.json, got '{name_or_path}' without one. "
            "Point to a folder written by save_pretrained."
        )
    refuse_code(name_or_path)
    if file := find(name_or_path, "config.json"):
        check_sizes(name_or_path, file)
    register_architectures()
    try:
        config = AutoConfig.from_pretrained(name_or_path, **as_data(name_or_path))
    except Exception as error:  # any error: transformers does not check for damaged files
        raise StrettoError(
            f"Expected a readable Hugging Face config (config.json) in '{name_or_path}', got {summary(error)}. "
            "Check the name or the folder."
        ) from error
    BACKBONES[config.model_type]  # unsupported architectures are named before any weight is read
    return config


def load_task(name_or_path: str, config: Any, folder: Folder | None) -> Task:
    """The task of a model: from its stretto.json if it has one, else from its Hugging Face config."""
    if folder is None:
        return task_from_config(config)
    try:
        return task_from_config(config, folder.task)
    except (KeyError, TypeError, StrettoError) as error:
        raise StrettoError(
            f"Expected {SETTINGS} and config.json in '{name_or_path}' to name the task, got {folder.task} "
            f"({summary(error)}). Copy the folder again."
        ) from error


def load_encoder(name_or_path: str, config: Any, task: Task, *, new_labels: bool, safetensors_only: bool) -> Any:
    """The Hugging Face model for a task, in float32. With `new_labels` it gets a new head for the task."""
    try:
        with quiet_transformers():
            check_parameters(name_or_path, config, task)
            model, report = getattr(transformers, task.auto_class).from_pretrained(
                name_or_path,
                dtype=torch.float32,
                attn_implementation="eager" if config.model_type == "mpnet" else "sdpa",  # MPNet has no other
                ignore_mismatched_sizes=True,  # named below
                use_safetensors=safetensors_only or None,  # None: or else pytorch_model.bin
                output_loading_info=True,
                **as_data(name_or_path),
                **(task.hf_config() if new_labels else {}),
            )
    except StrettoError:
        raise
    except Exception as error:  # any error: transformers does not check for damaged files
        form = " as safetensors, the only format of a stretto folder," if safetensors_only else ""
        raise StrettoError(
            f"Expected readable weights{form} in '{name_or_path}', got {summary(error)}. "
            "The download or copy may be incomplete: fetch it again."
        ) from error
    shapes = {key: (tuple(saved), tuple(built)) for key, saved, built in report["mismatched_keys"]}
    check_fresh(name_or_path, {*report["missing_keys"], *shapes}, shapes, model.base_model_prefix, new_head=new_labels)
    return model


def check_fresh(
    name_or_path: str, fresh: set[str], shapes: Mapping[str, tuple[Any, Any]], prefix: str, *, new_head: bool
) -> None:
    """Refuse a model with weights (`fresh`) that were not in its file: its answers would be random.

    `shapes` are those in the file and those of the config, where they differ. A head (with its pooler) may be new if it
    will be trained."""
    head = {key for key in fresh if not key.startswith(f"{prefix}.") or key.startswith(f"{prefix}.pooler.")}
    if unfit := sorted(shapes.keys() - (head if new_head else set())):
        saved, built = shapes[unfit[0]]
        raise StrettoError(
            f"Expected {unfit[0]} of shape {built}, as config.json in '{name_or_path}' says, got {saved} in its weights"
            f"{others(unfit)}. Copy config.json and the weights of the same model."
        )
    if lacking := sorted(fresh - head):
        raise StrettoError(
            f"Expected the weights of every layer in '{name_or_path}', got none for {lacking[0]}{others(lacking)}. "
            "The file may be incomplete or of another model: fetch it again."
        )
    if head and not new_head:
        raise StrettoError(
            f"Expected a fine-tuned model in '{name_or_path}', got one without {min(head, key=len)}, which "
            "has no trained head. Train it with `stretto train`, or in Python with a task named in from_pretrained."
        )


def load_tokenizer(name_or_path: str, task: Task | None = None) -> Any:
    """The tokenizer. If it marks words by the space before them, inputs given as words must get that space."""
    if Path(name_or_path).is_dir() and not any(find(name_or_path, file) for file in TOKENIZER_FILES):
        raise StrettoError(  # transformers would build an empty one
            f"Expected a tokenizer in '{name_or_path}', got none of {', '.join(TOKENIZER_FILES)}. "
            "Save the tokenizer with the model."
        )
    refuse_code(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **as_data(name_or_path))
        if task is not None and task.given_words and getattr(tokenizer, "add_prefix_space", None) is False:
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, add_prefix_space=True, **as_data(name_or_path))
        tokenizer("a text", "\U000e0123")  # a pair, with an unknown word: some damage appears only in use
        if tokenizer.pad_token_id is None:
            raise ValueError("one without a padding token (pad_token)")
        return tokenizer
    except BaseException as error:  # any error: tokenizers raises bare Exceptions, and panics that are BaseExceptions
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise StrettoError(
            f"Expected a readable tokenizer in '{name_or_path}', got {summary(error)}. "
            "Copy tokenizer.json and tokenizer_config.json again, or save the tokenizer with the model."
        ) from error


def check_place(path: Path) -> None:
    """Refuse a place where other files would be lost or nothing can be saved. Long runs check this first."""
    check_name(str(path))
    if path.exists() and not path.is_dir():
        raise StrettoError(f"Expected a folder to save to, got the file '{path}'. Choose another name.")
    if path.is_dir() and any(path.iterdir()) and not (path / SETTINGS).exists():
        raise StrettoError(
            f"Expected an empty folder or an earlier stretto model, got '{path}' with other files in it. "
            "Choose another name, so that nothing is lost."
        )


def write_folder(path: Path, folder: Folder, encoder: Any, tokenizer: Any, method: nn.Module, task: Task) -> None:
    """Write the whole folder, or nothing. Files that the user added stay."""
    check_place(path)
    with replacing_folder(path, own=MODEL_FILES) as temporary:
        encoder.config.update(task.hf_config())
        with quiet_transformers():
            encoder.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        write_method(temporary, folder, method)
        write_text(temporary / "README.md", model_card(folder, encoder.config, task))


def write_points(path: Path, folder: Folder, config: Any, task: Task) -> None:
    """Update the dial, the operating points and the model card of a folder. The weights stay."""
    if not (path / SETTINGS).exists():
        raise StrettoError(
            f"Expected a folder with a stretto model, got '{path}' without {SETTINGS}. Save the model there first."
        )
    write_text(path / "README.md", model_card(folder, config, task))
    write_json(path / SETTINGS, folder.to_json())


def write_method(path: Path, folder: Folder, method: nn.Module) -> None:
    """What stretto adds to a Hugging Face folder."""
    write_tensors(path / WEIGHTS, method.state_dict())
    write_json(path / SETTINGS, folder.to_json())
