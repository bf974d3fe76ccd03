"""`stretto methods` and `stretto backbones`: lists that come from the code itself."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from stretto.cli.options import Json
from stretto.cli.output import STDOUT, write_json
from stretto.view.describe import describe, flag

METHODS_EXAMPLES = """
stretto methods
stretto methods deebert
stretto methods --json
"""
BACKBONES_EXAMPLES = """
stretto backbones
stretto backbones --json
"""


def methods(
    name: Annotated[str | None, Argument(help="One method, described in full.", show_default=False)] = None,
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
        print("\n`stretto methods NAME` describes one.")
        return
    (method,) = described
    dial = method["dial"]
    print(f"{method['name']} (tasks: {', '.join(method['tasks'])})\n\n{method['doc']}\n")
    print(f"--dial ({dial['name']}): {dial['meaning']}; off: {dial['off']}\n")
    rows = [{"flag": flag(s), "default": str(s["default"]), "what it does": s["help"]} for s in method["settings"]]
    show_table(rows, title="Settings of `stretto train`")


def backbones(json: Json = None) -> None:
    """List the supported architectures."""
    from stretto.backbones import BACKBONES
    from stretto.view.tables import show_table

    rows = [{"model_type": name, "class": f"{cls.__module__}.{cls.__name__}"} for name, cls in BACKBONES.items()]
    write_json(json, {"backbones": [row["model_type"] for row in rows]})
    if json != STDOUT:
        show_table(rows)
