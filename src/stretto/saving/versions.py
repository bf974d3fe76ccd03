"""What results depend on besides the code: versions of packages, and the processor."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import stretto


def versions(*more: str) -> dict[str, str | None]:
    """Versions of stretto, Python and the packages that compute, and of `more` packages; None if not installed."""
    found: dict[str, str | None] = {"stretto": stretto.__version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "onnxruntime", *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def known_versions() -> dict[str, str]:
    """The same, of what is installed."""
    return {name: version for name, version in versions().items() if version is not None}


def cpu_name() -> str:
    """The name of the processor, from Linux or else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
