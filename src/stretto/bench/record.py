"""Dataclasses that are read strictly from JSON or YAML: nothing missing, nothing unknown, nothing of another type."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields
from typing import Any, Self

from stretto.errors import StrettoError


class Record:
    """Base of the dataclasses of results and suites. Fields are plain types, lists of plain types or of Records."""

    @classmethod
    def read(cls, content: Any, where: str) -> Self:
        """`where` is named in errors: the file, and the place in it."""
        known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
        needed = {name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
        if not isinstance(content, dict):
            raise StrettoError(f"{where}: expected {', '.join(known)}; got {content!r:.40}. Correct the file.")
        if missing := sorted(needed - set(content)):
            raise StrettoError(f"{where}: expected {', '.join(missing)}, got none. Correct the file.")
        if unknown := sorted(map(str, set(content) - set(known))):
            raise StrettoError(
                f"{where}: expected only {', '.join(known)}; got {', '.join(unknown)}. Correct the file."
            )
        kinds = typing.get_type_hints(cls)
        return cls(**{name: value_of(kinds[name], value, f"{where}, {name}") for name, value in content.items()})

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults."""
        content = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if value != default:
                is_parts = isinstance(value, list) and bool(value) and isinstance(value[0], Record)
                content[field.name] = [part.to_json() for part in value] if is_parts else value
        return content


def value_of(kind: Any, value: Any, where: str) -> Any:
    """The value itself, checked against the type of its field; parts become Records."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if value is None:
            return None
        (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
    origin: Any = typing.get_origin(kind) or kind
    inner = typing.get_args(kind)
    if origin is Any:
        return value
    if issubclass(origin, Record):
        return origin.read(value, where)
    wanted = (int, float) if origin is float else origin
    if not isinstance(value, wanted) or (origin in (int, float) and isinstance(value, bool)):
        raise StrettoError(f"{where}: expected a value of type {origin.__name__}, got {value!r:.40}. Correct the file.")
    if isinstance(value, list) and inner:
        return [value_of(inner[0], each, f"{where} {number}") for number, each in enumerate(value)]
    if isinstance(value, dict) and inner:
        return {key: value_of(inner[1], each, f"{where}, {key}") for key, each in value.items()}
    return value
