"""The rooms of the package: who may import whom, and that every module can be the first one imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "stretto"
#: Imports go up this list only: a room may use those before it.
ROOMS = (
    "errors", "state", "data", "backbones", "engine", "tasks", "methods", "saving", "model", "budget", "training",
    "view", "deploy", "bench", "cli",
)  # fmt: skip
MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = ("stretto", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(path: Path) -> list[str]:
    """The stretto modules that a file imports, wherever in the file it does."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("stretto."):
            found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("stretto.")]
    return found


def test_imports_go_one_way() -> None:
    wrong = []
    for path in MODULES:
        room = path.relative_to(SOURCE).with_suffix("").parts[0]
        if room in ROOMS:
            others = (name for name in imported_by(path) if ROOMS.index(name.split(".")[1]) > ROOMS.index(room))
            wrong += [f"{name_of(path)} imports {other}" for other in others]
    assert not wrong, "\n".join(wrong)


def test_every_room_is_known() -> None:
    top = {path.relative_to(SOURCE).with_suffix("").parts[0] for path in MODULES} - {"__init__", "__main__"}
    assert top <= set(ROOMS)


def test_every_module_can_be_imported_first() -> None:
    """Each in a fresh process, forked from one that has loaded the libraries, so that it takes seconds."""
    names = [name_of(path) for path in MODULES if path.name != "__main__.py"]
    script = (
        "import os, sys\n"
        "import datasets, matplotlib.pyplot, scipy.stats, sklearn.metrics, torch, transformers\n"
        "from transformers import AutoTokenizer, PreTrainedModel, Trainer\n"
        "for name in sys.argv[1:]:\n"
        "    if not (child := os.fork()):\n"
        "        try:\n"
        "            __import__(name)\n"
        "        except BaseException as error:\n"
        "            print(name, repr(error), flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, *names], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_importing_stretto_changes_no_import_hook() -> None:
    script = "import sys; before = list(sys.meta_path); import stretto; print(sys.meta_path == before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
