"""The full model: every token goes through every layer. The baseline of all methods.

Reference: none. Differs from the paper: there is none.

Dial: none; it is always off.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.methods.base import ANY_ANSWER, Dial, Method
from stretto.methods.settings import FinetuningConfig


@dataclass(frozen=True)
class FullConfig(FinetuningConfig):
    """No further settings."""


class Full(Method):
    name = "full"
    Config = FullConfig
    needs = ANY_ANSWER
    dial = Dial("none", "the full model always runs", off=0.0, sweep=(0.0,), upper=0.0)
