"""Check that a resumed run is the same run: its plan is stored, and another plan is refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.saving.files import write_json

#: How many differences an error names.
SHOWN = 3


def hold_to(path: Path, plan: Mapping[str, Any], *, what: str, place: Path, write: bool = True) -> None:
    """Keep the plan of a run in the file `path`, or refuse if the file holds another plan.

    `what` names the run, `place` is what to delete to start again. Only one of several processes may `write`."""
    now = as_json(plan)
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise unreadable(path, place, error) from error
        check_same(before, now, what=what, place=place)
    elif write:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, now)


def as_json(plan: Any) -> Any:
    """A plan as in its file."""
    return json.loads(json.dumps(plan, default=str))


def digest(plan: Any) -> str:
    """A short name of a plan, stored with the result of its run."""
    return f"{zlib.crc32(json.dumps(as_json(plan), sort_keys=True).encode()):08x}"


def check_same(before: Any, now: Mapping[str, Any], *, what: str, place: Path) -> None:
    """Refuse to resume `what` with another plan, and say where the plans differ."""
    found = list(differences(before, now))
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise StrettoError(
            f"Expected to resume {what} in '{place}' with the same plan, got another {'; '.join(found[:SHOWN])}{more}. "
            f"Use the same settings, choose another output, or add --restart to start again (in Python: delete "
            f"'{place}')."
        )


def unreadable(path: Path, place: Path, error: Exception) -> StrettoError:
    return StrettoError(
        f"Expected the unfinished work in '{path}' to be readable, got {error}. "
        f"Add --restart to start again (in Python: delete '{place}')."
    )


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """The differences, such as `arguments seed: 1, before 2`. Plans are JSON values."""
    if isinstance(before, dict) and isinstance(now, Mapping):
        for key in [*now, *(key for key in before if key not in now)]:
            yield from differences(before.get(key), now.get(key), f"{name} {key}".strip())
    elif are_alike(before, now):
        for place, (old, new) in enumerate(zip(before, now, strict=True), start=1):
            yield from differences(old, new, f"{name} {place}")
    elif before != now:
        yield f"{name}: {shown(now)}, before {shown(before)}"


def are_alike(before: Any, now: Any) -> bool:
    """As many objects in one list as in the other, such as the stages of a training."""
    lists = isinstance(before, list) and isinstance(now, list) and len(before) == len(now)
    return lists and all(isinstance(each, dict) for each in (*before, *now))


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"
