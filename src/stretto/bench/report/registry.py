"""Tables that are read off the code: methods, settings, backbones, recipes."""

from __future__ import annotations

import dataclasses
from typing import Any

from stretto.backbones import BACKBONES
from stretto.bench.suite import Suite
from stretto.methods import METHODS, Shape
from stretto.methods.base import tasks_of
from stretto.tasks import TASKS
from stretto.view.describe import describe, flag
from stretto.view.tables import markdown_table


def stages_of(method: Any) -> list[Any]:
    """The stages of a method as it is by default, for the first task it can do."""
    task = TASKS[tasks_of(method)[0]].make(["no", "yes"])
    return method(method.Config(), Shape(d=8, n_layers=12, n_labels=2), task).stages()


def method_table() -> str:
    lines = []
    for method in METHODS.values():
        about = describe(method)
        lines.append(
            {
                "method": f"`{about['name']}`",
                "in a line": about["summary"],
                "dial (off)": f"{about['dial']['name']} ({about['dial']['off']})",
                "stages": " → ".join(stage.name for stage in stages_of(method)),
                "tasks": ", ".join(about["tasks"]),
            }
        )
    return markdown_table(lines)


def method_sections() -> str:
    """Every method in the words of its own file, with its stages and settings."""
    parts = []
    for method in METHODS.values():
        about = describe(method)
        stages = [
            f"{stage.name} ({stage.epochs:g} epochs{'' if stage.trains_backbone else ', backbone frozen'})"
            for stage in stages_of(method)
        ]
        settings = [
            {"flag": f"`{flag(setting)}`", "default": str(setting["default"]), "what it does": setting["help"]}
            for setting in about["settings"]
        ]
        parts += [f"### {about['name']}", about["doc"], f"Stages: {' → '.join(stages)}.", markdown_table(settings)]
    return "\n\n".join(parts)


def recipe_table(suite: Suite) -> str:
    """What each row of a suite starts from and trains."""
    lines: list[dict[str, Any]] = []
    for name, recipe in suite.recipes.items():
        trained = [stage.name for stage in stages_of(METHODS[recipe.method]) if stage.name not in recipe.skip]
        lines.append(
            {
                "row": name,
                "starts from": recipe.start or "the encoder",
                "stages of its own": " → ".join(trained) or "none",
                "settings": ", ".join(f"{key} {value}" for key, value in recipe.settings.items()),
            }
        )
    return markdown_table(lines)


def defaults_table(ours: dict[str, Any]) -> str:
    """Our defaults where they are not those of `TrainingArguments`."""
    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    lines = [
        {"setting": f"`{name}`", "here": plain(value), "Hugging Face": plain(theirs[name])}
        for name, value in ours.items()
        if plain(value) != plain(theirs[name])
    ]
    return markdown_table(lines)


def plain(value: Any) -> str:
    return str(getattr(value, "value", value))  # an enumeration's value


def backbone_table() -> str:
    files: dict[str, list[str]] = {}
    for name, cls in BACKBONES.items():
        files.setdefault(cls.__module__.rpartition(".")[2], []).append(f"`{name}`")
    return markdown_table(
        [
            {"`model_type`": ", ".join(names), "file": f"`src/stretto/backbones/{file}.py`"}
            for file, names in files.items()
        ]
    )
