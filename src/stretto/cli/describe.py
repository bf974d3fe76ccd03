"""`stretto methods` and `stretto backbones`: what there is, told by the code itself."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from itertools import pairwise
from typing import Annotated, Any

from typer import Argument

from stretto.cli.options import Json
from stretto.cli.output import STDOUT, write_json
from stretto.cli.settings import field_types

METHODS_EXAMPLES = """
stretto methods
stretto methods deebert
stretto methods --json
"""


def methods(
    name: Annotated[str | None, Argument(help="One method, told in full.", show_default=False)] = None,
    json: Json = None,
) -> None:
    """List the methods, or describe one in full."""
    from stretto.methods import METHODS
    from stretto.view.tables import show_table

    if name is None and json in METHODS:  # `methods --json deebert`: the name, not a file
        name, json = json, STDOUT
    described = [describe(METHODS[method]) for method in ([name] if name else METHODS)]
    if json is not None:
        write_json(json, described[0] if name else {"methods": described})
    if json == STDOUT:
        return
    if name is None:
        show_table(
            [
                {
                    "name": m["name"],
                    "tasks": ", ".join(m["tasks"]),
                    "dial": m["dial"]["name"],
                    "in a line": m["summary"],
                }
                for m in described
            ]
        )
        print("\n`stretto methods NAME` tells more.")
        return
    (method,) = described
    dial = method["dial"]
    print(f"{method['name']} (tasks: {', '.join(method['tasks'])})\n\n{method['doc']}\n")
    print(f"--dial ({dial['name']}): {dial['meaning']}; off: {dial['off']}\n")
    rows = [{"flag": flag(s), "default": str(s["default"]), "what it does": s["help"]} for s in method["settings"]]
    show_table(rows, title="Settings of `stretto train`")


def describe(method: Any) -> dict[str, Any]:
    """All there is to say of a method, from its docstring, its dial and its Config."""
    from stretto.methods.base import tasks_of

    doc = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    dial = getattr(method, "dial", None)  # some methods' dial depends on the model, and is only told in words
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

    helps, kinds, ranges = field_docs(config), field_types(config), limits(config)
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
    """The strings under the fields of a dataclass and its bases; a subclass's word counts."""
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


def backbones(json: Json = None) -> None:
    """List the supported architectures."""
    from stretto.backbones import BACKBONES
    from stretto.view.tables import show_table

    rows = [{"model_type": name, "served by": f"{cls.__module__}.{cls.__name__}"} for name, cls in BACKBONES.items()]
    write_json(json, {"backbones": [row["model_type"] for row in rows]})
    if json != STDOUT:
        show_table(rows)
