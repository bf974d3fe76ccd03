"""The results of `stretto bench engine`: one JSON file, complete after every group, so that a rerun can resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stretto.bench.timing import Timed
from stretto.errors import StrettoError
from stretto.saving.files import write_json
from stretto.saving.same_run import check_same
from stretto.saving.versions import cpu_name, versions

SHARED = ("hf_padded", "hf_sorted")  # measured once, in fp32; baselines of both dtypes
BASELINES = (*SHARED, "onnx", "gemm")
KEY = ("shape", "mix", "batch", "dtype")


@dataclass
class Results:
    """The content of the file, and where it is (None: in memory only)."""

    path: Path | None
    content: dict[str, Any]

    @classmethod
    def start(cls, path: Path | None, **settings: Any) -> Results:
        """New results, or those in the file, which must come from the same settings, versions and machine."""
        fixed = {"benchmark": "engine", **settings, "cpu": cpu_name(), "versions": versions()}
        if path is None or not path.exists():
            return cls(path, {**fixed, "date": "", "groups": []})
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = {name: content[name] for name in fixed}
            content["groups"] = [group for group in content["groups"] if all(name in group for name in KEY)]
        except (ValueError, KeyError, TypeError) as error:
            raise StrettoError(
                f"Expected {path} to hold results of this benchmark, got something else ({error!r}). "
                "Write to another file."
            ) from None
        check_same(found, fixed, what="the measurements", place=path)
        return cls(path, content)

    def has(self, *key: object) -> bool:
        return any(tuple(group[name] for name in KEY) == key for group in self.content["groups"])

    def add(self, groups: Sequence[dict[str, Any]]) -> None:
        """Append groups and rewrite the file in one move: a kill leaves the old file or the new one."""
        self.content["groups"] += groups
        self.content["date"] = now()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content, indent=1)


def cells(timed: Sequence[Timed], dtype: str) -> list[dict[str, Any]]:
    """One per contender of this dtype and per shared baseline.

    `flops_ratio` says how many times fewer FLOPs than the full packed run, `vs` how many times faster than each
    baseline, and `tracking` which part of the FLOPs gain over the full packed run became a gain in time."""
    own = {t.contender.name: t for t in timed if t.contender.dtype == dtype or t.contender.name in SHARED}
    full = own["full"]
    rows = []
    for name, this in own.items():
        flops_ratio = full.contender.flops / this.contender.flops
        rows.append(
            {
                "contender": name,
                "dtype": this.contender.dtype,
                "gflop": round(this.contender.flops / 1e9, 4),
                "flops_ratio": round(flops_ratio, 4),
                "seconds": this.median,
                "fastest": min(this.times),
                "slowest": max(this.times),
                "vs": {other: own[other].median / this.median for other in BASELINES if other in own and other != name},
                "tracking": full.median / this.median / flops_ratio if this.contender.scripted else None,
            }
        )
    return rows


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
