"""The results of `stretto bench engine`: one JSON file, complete after every group, so that a rerun can go on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import stretto
from stretto.bench.timing import Timed
from stretto.errors import StrettoError

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
        for name, value in fixed.items():
            if found[name] != value:
                raise StrettoError(
                    f"Expected to go on with {name} {found[name]}, as {path} began, got {value}. "
                    "Write to another file, or delete this one to begin anew."
                )
        return cls(path, content)

    def has(self, *key: object) -> bool:
        return any(tuple(group[name] for name in KEY) == key for group in self.content["groups"])

    def add(self, groups: Sequence[dict[str, Any]]) -> None:
        """Append groups and rewrite the file in one move: a kill leaves the old file or the new one."""
        self.content["groups"] += groups
        self.content["date"] = now()
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_name(self.path.name + ".part")
            unfinished.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, self.path)


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


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"stretto": stretto.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "onnxruntime"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def cpu_name() -> str:
    """The processor as Linux names it, else whatever Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
