"""The mutants: small changes to the source, each of which some test must notice (`*.yaml` in this folder).

An entry of a list has a `file` of src/stretto, the `tests` that should fail (what pytest is given), and `mutants`:
[name, fragment, replacement]. A fragment occurs once in its file. `explained` says of a mutant by name why no test can
notice it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCE = ROOT / "src"
SUMMARY = HERE / "summary.json"


@dataclass(frozen=True)
class Mutant:
    file: str
    """Below src/stretto."""
    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest."""
    explained: str = ""
    """Why it survives."""

    @property
    def key(self) -> str:
        return f"{self.file}: {self.name}"

    def apply(self, source: Path) -> str:
        """The changed text of its file in a copy of `src`."""
        text = (source / "stretto" / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"Expected '{self.old}' once in {self.file}, got it {count} times. Correct the list.")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    found = []
    for path in sorted(HERE.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            tests, explained = tuple(shlex.split(entry["tests"])), entry.get("explained", {})
            found += [
                Mutant(entry["file"], *change, tests, explained.get(change[0], "")) for change in entry["mutants"]
            ]
    return found
