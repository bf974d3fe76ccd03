"""Settings of a training run: the fields of a method's Config and the names of `transformers.TrainingArguments`.

They are not declared as options: what the dataclasses hold is what the command line (`--exit-epochs 5`) and a run
file (`exit_epochs: 5`) accept.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from stretto.errors import StrettoError

#: TrainingArguments that `stretto.training` sets itself.
OWN = frozenset({
    "output_dir", "metric_for_best_model", "greater_is_better", "disable_tqdm", "remove_unused_columns", "use_cpu",
    "ddp_find_unused_parameters", "resume_from_checkpoint", "do_train", "do_eval", "do_predict", "local_rank",
})  # fmt: skip

TRUE, FALSE, NONE = ("true", "yes", "on"), ("false", "no", "off"), ("none", "null", "")


@functools.cache
def training_types() -> dict[str, Any]:
    from transformers import TrainingArguments

    kinds = {**field_types(TrainingArguments), "report_to": list[str]}  # for which "none" is an ordinary word
    return {name: kind for name, kind in kinds.items() if name not in OWN}


def config_types(method: str) -> dict[str, Any]:
    from stretto.methods import METHODS

    return field_types(METHODS[method].Config)


@functools.cache
def all_types() -> dict[str, Any]:
    """All settings of all methods. Those of a part of a combination have the method's name as a prefix."""
    from stretto.methods import METHODS

    known = {**scratch_types(), **training_types()}
    for method in METHODS:
        of_method = config_types(method)
        known = {**known, **of_method, **{f"{method}_{name}": kind for name, kind in of_method.items()}}
    return known


def scratch_types() -> dict[str, Any]:
    """The sizes of a model that starts from nothing."""
    from stretto.training.scratch import ScratchConfig

    return field_types(ScratchConfig)


def field_types(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass and their types, with annotations written as strings resolved."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


# ---- flags to settings -------------------------------------------------------------------------------------


def take_flags(
    args: list[str], options: Mapping[str, bool], known: Mapping[str, Any] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Split a command line into what its declared options take and the settings: (the rest, {name: text}).

    `options` names the declared options and says of each whether a value follows it; `known` are the settings there
    are and their types (default: all)."""
    known = all_types() if known is None else known
    rest: list[str] = []
    settings: dict[str, str] = {}
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        flag, has_value, value = arg.partition("=")
        if arg == "--":
            return [*rest, arg, *queue], settings
        if flag in options or not flag.startswith("--"):
            rest.append(arg)
            if options.get(flag) and not has_value and queue:
                rest.append(queue.pop(0))
            continue
        name, positive = setting_name(flag, options, known)
        if has_value:
            settings[name] = value
        elif is_bool(known[name]):
            explicit = positive and queue and queue[0].lower() in (*TRUE, *FALSE)
            settings[name] = queue.pop(0) if explicit else str(positive).lower()
        elif queue and not queue[0].startswith("--"):
            settings[name] = queue.pop(0)
        else:
            raise StrettoError(f"Expected a value after {flag}, got none. Write {flag} VALUE.")
    return rest, settings


def setting_name(flag: str, options: Iterable[str], known: Mapping[str, Any]) -> tuple[str, bool]:
    """The setting a flag names, and False for `--no-…` of a yes-or-no setting."""
    name = flag.removeprefix("--").replace("-", "_")
    if name in known:
        return name, True
    positive = name.removeprefix("no_")
    if is_bool(known.get(positive)):
        return positive, False
    raise unknown_setting(flag, [*options, *(as_flag(setting) for setting in known)])


def unknown_setting(flag: str, known: Iterable[str]) -> StrettoError:
    if flag.removeprefix("--").replace("-", "_") in OWN:
        return StrettoError(
            f"Expected a setting that can be changed, got {flag}, which stretto sets itself. Leave it out."
        )
    close = difflib.get_close_matches(flag, list(known), n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    return StrettoError(
        f"Expected an option of the command, a setting of the method or a name of TrainingArguments, got {flag}. "
        f"{guess}`--help` and `stretto methods NAME` list them."
    )


def as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# ---- settings to values ------------------------------------------------------------------------------------


def take_scratch(method: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Typed sizes of a model that starts from nothing, and the settings that are left."""
    sizes = {name: kind for name, kind in scratch_types().items() if name not in config_types(method)}
    taken = {name: parse(name, value, sizes[name]) for name, value in settings.items() if name in sizes}
    return taken, {name: value for name, value in settings.items() if name not in taken}


def sort_settings(method: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Typed fields of the method's Config, and typed `TrainingArguments`."""
    of_method, of_training = config_types(method), training_types()
    config, arguments = {}, {}
    for name, value in settings.items():
        if name in of_method:
            config[name] = parse(name, value, of_method[name])
        elif name in of_training:
            arguments[name] = parse(name, value, of_training[name])
        elif name in scratch_types():
            raise StrettoError(
                f"Expected {as_flag(name)} with a model that starts from nothing, got another model. "
                "Use --model scratch:marian, or leave it out."
            )
        elif name in all_types():
            raise StrettoError(
                f"Expected settings of {method} ({', '.join(map(as_flag, of_method))}), got {as_flag(name)} of another "
                f"method. Leave it out; `stretto methods {method}` describes its settings."
            )
        else:
            raise unknown_setting(as_flag(name), map(as_flag, (*of_method, *of_training)))
    return config, arguments


def parse(name: str, value: Any, kind: Any) -> Any:
    """The text of a flag, or a value of a run file, as the type of its field."""
    if isinstance(value, dict):
        if dict not in (typing.get_origin(option) or option for option in _alternatives(kind)):
            raise StrettoError(f"Expected a single value for {as_flag(name)}, got names and values. Correct it.")
        return value
    if isinstance(value, (list, tuple)):
        value = as_text(value)
    text = ("true" if value else "false") if isinstance(value, bool) else "none" if value is None else str(value)
    failures = []
    for option in _alternatives(kind):
        try:
            return _parse_as(option, text.strip())
        except ValueError as error:
            failures.append(str(error))
    raise StrettoError(f"Expected {' or '.join(failures)} for {as_flag(name)}, got '{text}'. Correct the value.")


def as_text(values: list[Any] | tuple[Any, ...]) -> str:
    """A list as a flag has it: 1,2,3; a list of lists: 1,2;3,4."""
    parts = [as_text(value) if isinstance(value, (list, tuple)) else str(value) for value in values]
    return (";" if any(isinstance(value, (list, tuple)) for value in values) else ",").join(parts)


def is_bool(kind: Any) -> bool:
    return kind is bool or set(_alternatives(kind)) == {bool, type(None)}


def _alternatives(kind: Any) -> list[Any]:
    """What a union offers, the strictest first: None, yes or no, numbers, lists, then any text."""
    order: list[Any] = [type(None), bool, int, float]
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = list(typing.get_args(kind)) if is_union else [kind]
    return sorted(kinds, key=lambda k: order.index(k) if k in order else len(order) + (k is str))


def _parse_as(kind: Any, text: str) -> Any:
    """One type; a ValueError says what was expected."""
    if kind is type(None):
        if text.lower() in NONE:
            return None
        raise ValueError("none")
    if kind is bool:
        if text.lower() in (*TRUE, *FALSE):
            return text.lower() in TRUE
        raise ValueError("true or false")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError("a whole number" if kind is int else "a number") from None
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if text in map(str, inner):
            return next(choice for choice in inner if str(choice) == text)
        raise ValueError(" or ".join(f"'{choice}'" for choice in inner))
    if origin in (tuple, list):
        of_lists = typing.get_origin(inner[0]) in (tuple, list)
        mark, name = (";", "semicolons") if of_lists else (",", "commas")
        try:
            return origin(_parse_as(inner[0], part.strip()) for part in text.split(mark) if part.strip())
        except ValueError as error:
            raise ValueError(f"{error} (several are separated by {name})") from None
    return text  # str, and what TrainingArguments reads from text itself: enumerations, JSON
