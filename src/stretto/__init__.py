"""stretto: fewer tokens, fewer layers, same answers.

Importing this package is light: torch and transformers are loaded when a name is first used. From then on the Auto
classes of transformers know our own architectures too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto import architectures
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.evaluate import OperatingPoint, sweep
    from stretto.model import AdaptiveModel, Prediction
    from stretto.training import train

__version__ = "0.1.0"

_HOMES = {
    "AdaptiveModel": "stretto.model",
    "Prediction": "stretto.model",
    "OperatingPoint": "stretto.evaluate",
    "sweep": "stretto.evaluate",
    "train": "stretto.training",
}

__all__ = ["AdaptiveModel", "OperatingPoint", "Prediction", "StrettoError", "sweep", "train"]

architectures.announce()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stretto' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
