"""Measurements stored one by one, so that a killed run can resume: a file of JSON lines that starts with the plan.

An incomplete last line, after a kill, is ignored when the journal is opened again. A journal belongs to one plan;
another plan is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import IO, Any

from stretto.saving.files import write_errors, writing
from stretto.saving.same_run import check_same, unreadable

#: In the folder of a journal.
FILE = "state.jsonl"
Key = tuple[float, ...]


class Journal:
    """Results by key, in memory and in `folder`; a context, as it holds a file open."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder, self.plan = folder, json.loads(json.dumps(plan))
        self.path = folder / FILE
        self.entries: dict[Key, dict[str, Any]] = {}
        self._file: IO[str] | None = None

    def __enter__(self) -> Journal:
        if self.path.exists():
            self._read()
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing(self.path) as file:
            file.write(_line(self.plan))
            file.writelines(_line({"key": key, "value": value}) for key, value in self.entries.items())
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def get(self, key: Key) -> dict[str, Any] | None:
        return self.entries.get(key)

    def add(self, key: Key, value: dict[str, Any]) -> None:
        assert self._file is not None
        self.entries[key] = value
        with write_errors(self.path):
            self._file.write(_line({"key": key, "value": value}))
            self._file.flush()

    def remove(self) -> None:
        """The work is done."""
        self._close()
        shutil.rmtree(self.folder)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> None:
        head, *lines = self.path.read_text(encoding="utf-8").split("\n")
        try:
            plan = json.loads(head)
            entries = [json.loads(line) for line in lines[:-1]]  # an incomplete line after the last line break
            self.entries = {tuple(entry["key"]): entry["value"] for entry in entries}
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable(self.path, self.folder, error) from error
        check_same(plan, self.plan, what="the unfinished work", place=self.folder)


def _line(content: Any) -> str:
    return json.dumps(content) + "\n"
