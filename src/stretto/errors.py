"""The error for mistakes that a user can correct, and the registry whose look-ups raise it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar


class StrettoError(ValueError):
    """Wrong input.

    Messages have the form `Expected <what>, got <what came>. <What to do>.`, after `<file>:<line>: ` if the error is in
    a file. The command line prints the message alone. Any other exception is a bug and keeps its traceback.
    """


def counted(count: int, thing: str) -> str:
    """'1 example', '2 examples'."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping whose failed look-up is a helpful `StrettoError`."""

    def __init__(self, kind: str, entries: dict[str, T], hint: str = "") -> None:
        self.kind, self.entries, self.hint = kind, entries, hint

    def __getitem__(self, name: str) -> T:
        if name in self:
            return self.entries[name]
        close = difflib.get_close_matches(str(name), self.entries, n=1)
        guess = f"Did you mean '{close[0]}'? " if close else ""
        raise StrettoError(
            f"Expected a {self.kind} among {', '.join(self.entries)}; got {name!r}. {guess}{self.hint}".rstrip()
        )

    def add(self, name: str, entry: T) -> None:
        """Add an entry, for this process only."""
        self.entries[name] = entry

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class LazyRegistry(Registry[T]):
    """A registry of "module.Name": an entry is imported when it is looked up, so that listing names stays light."""

    def __init__(self, kind: str, homes: dict[str, str], hint: str = "") -> None:
        entries: dict[str, Any] = dict(homes)
        super().__init__(kind, entries, hint)

    def __getitem__(self, name: str) -> T:
        entry: Any = super().__getitem__(name)
        if isinstance(entry, str):
            module, _, attribute = entry.rpartition(".")
            self.entries[name] = getattr(import_module(module), attribute)
        return self.entries[name]
