"""stretto: fewer tokens, fewer layers, same answers.

Importing this package is light: torch and transformers are loaded when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.budget.sweep import sweep
    from stretto.model import AdaptiveModel, Prediction
    from stretto.saving.points import OperatingPoint
    from stretto.training.run import train

__version__ = "0.1.0"

_HOMES = {
    "AdaptiveModel": "stretto.model",
    "Prediction": "stretto.model",
    "OperatingPoint": "stretto.saving.points",
    "sweep": "stretto.budget.sweep",
    "train": "stretto.training.run",
}

__all__ = ["AdaptiveModel", "OperatingPoint", "Prediction", "StrettoError", "sweep", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
