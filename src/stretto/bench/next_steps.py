"""The commands that the demo prints at its end: they work when pasted as they are."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def next_commands(output: Path, text: tuple[str, ...]) -> list[str]:
    """Commands to try on the demo's folder. A single `text` is also sent through a pipe."""
    stretto, model, test = stretto_command(), shlex.quote(f"{output}/model"), shlex.quote(f"{output}/test.jsonl")
    commands = [
        f"{stretto} evaluate {model} {test}",
        f"{stretto} predict {model} {test} --output answers.jsonl",
        f"{stretto} bench model {model} {test}",
        f"{stretto} train --help",
        f"{stretto} methods",
    ]
    if len(text) == 1:
        commands.insert(1, f"echo {shlex.quote(text[0])} | {stretto} predict {model}")
    return commands


def stretto_command() -> str:
    """How the shell can start the stretto that is running: by its name if the PATH has it, else by its path (relative
    to the current folder if it is below it)."""
    python = Path(sys.executable)
    script = python.with_name("stretto")
    if not script.exists():
        return f"{shlex.quote(str(python))} -m stretto"
    found = shutil.which("stretto")
    if found is not None and Path(found).samefile(script):
        return "stretto"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
