"""The description of a method, from its docstring, its dial and its Config."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from itertools import pairwise
from typing import Any


def describe(method: Any) -> dict[str, Any]:
    """The description of a method, as JSON."""
    from stretto.methods.base import tasks_of

    doc = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    dial = getattr(method, "dial", None)  # the dial of some methods depends on the model and is only described in words
    words = " ".join(doc.partition("\nDial: ")[2].split())
    return {
        "name": method.name,
        "summary": doc.splitlines()[0].partition(": ")[2] or doc.splitlines()[0],
        "tasks": tasks_of(method),
        "doc": doc,
        "dial": {
            "name": dial.name if dial else words.partition(":")[0].removeprefix("the "),
            "meaning": dial.meaning if dial else words,
            "off": f"{dial.off:g}" if dial else "all layers",
        },
        "settings": settings_of(method.Config),
    }


def settings_of(config: Any) -> list[dict[str, Any]]:
    """Name, type, range, default and help (the string under the field) of every setting."""
    from stretto.methods.settings import Range, limits

    helps, kinds, ranges = field_docs(config), typing.get_type_hints(config), limits(config)
    return [
        {
            "name": field.name,
            "type": inspect.formatannotation(kinds[field.name]),
            "range": str(ranges[field.name]) if isinstance(ranges.get(field.name), Range) else None,
            "default": field.default,
            "help": helps.get(field.name, ""),
        }
        for field in dataclasses.fields(config)
    ]


def field_docs(config: Any) -> dict[str, str]:
    """The strings under the fields of a dataclass and its bases; those of a subclass win."""
    from stretto.methods.combine import setting

    found: dict[str, str] = {}
    for part in getattr(config, "parts", ()):  # of a combination
        found |= {setting(part, name): text for name, text in field_docs(part.Config).items()}
    for cls in reversed(config.__mro__[1 if found else 0 : -1]):
        body: list[Any] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for field, below in pairwise(body):
            is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def flag(setting: dict[str, Any]) -> str:
    return "--" + setting["name"].replace("_", "-")
