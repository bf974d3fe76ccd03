"""The rooms of the package: who may import whom, and that every module can be the first one imported."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tempfile
import warnings
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


#: The code of every module that may be imported.
SOURCES = {name_of(path): path.read_text(encoding="utf-8") for path in MODULES if path.name != "__main__.py"}


def imported_by(path: Path) -> list[str]:
    """The stretto modules that a file imports, wherever in the file it does."""
    return [name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for name in named_in(node)]


def named_in(node: ast.AST) -> list[str]:
    """The stretto modules that an import statement names; none if it is none."""
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module]
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return [name for name in names if name.startswith("stretto.")]


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


def loaded_first(name: str) -> str:
    """The module that Python has loaded, and nothing else of stretto, when it begins with the rest of this one.

    Its package, or where packages load nothing themselves, what its first import names. (stretto itself is always
    loaded, and loads stretto.errors.)"""
    packages = [name.rsplit(".", n)[0] for n in range(1, name.count("."))]
    loading = next((package for package in packages if imported_at_once(package)), None)
    first = loading or next((other for other in imported_at_once(name) if other != "stretto.errors"), "stretto")
    return "stretto" if f"{first}.".startswith(f"{name}.") else first  # a package loads itself


def imported_at_once(name: str) -> list[str]:
    """The stretto modules that a module imports when it is imported itself."""
    return [other for node in ast.parse(SOURCES[name]).body for other in named_in(node)]


#: By module, those that load it first.
FOLLOWERS: dict[str, list[str]] = {}
for each in SOURCES:
    if each != "stretto":
        FOLLOWERS.setdefault(loaded_first(each), []).append(each)


def import_with_followers(name: str, report: int) -> None:
    """Import a module and end this process. Before that, a fork of it does so with each module that loads this one
    first: the fork does what a fresh process does that imports that module first."""
    try:
        importlib.import_module(name)
        os.write(report, f"{name}\n".encode())
        for follower in FOLLOWERS.get(name, ()):
            if follower in sys.modules and not follower.startswith(f"{name}."):
                os.write(report, f"{follower} imports {name}, and {name} {follower}\n".encode())
            elif child := os.fork():
                os.waitpid(child, 0)
            else:
                import_with_followers(follower, report)
    except BaseException as error:
        os.write(report, f"{name}: {error!r}\n".encode())
    finally:
        os._exit(0)


def test_every_module_can_be_imported_first() -> None:
    """In forks of this process, which loads the libraries: only stretto is forgotten and imported again."""
    for name in SOURCES:
        importlib.import_module(name)
    with tempfile.TemporaryFile() as report:
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            warnings.simplefilter("ignore")
            for name in [name for name in sys.modules if name.partition(".")[0] == "stretto"]:
                del sys.modules[name]
            import_with_followers("stretto", report.fileno())
        report.seek(0)
        assert sorted(report.read().decode().splitlines()) == sorted(SOURCES)


def test_importing_stretto_changes_no_import_hook() -> None:
    script = "import sys; before = list(sys.meta_path); import stretto; print(sys.meta_path == before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
