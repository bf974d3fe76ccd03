"""The full model: every token goes through every layer. The point all others are compared with.

Reference: none needed. Dial: none that does anything; it is always off.
Differs from the paper: there is no paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.methods.base import ANY_ANSWER, Dial, Method
from stretto.methods.settings import FinetuningConfig


@dataclass(frozen=True)
class FullConfig(FinetuningConfig):
    """Nothing of its own."""


class Full(Method):
    name = "full"
    Config = FullConfig
    needs = ANY_ANSWER
    dial = Dial("none", "the full model always runs", off=0.0, sweep=(0.0,), upper=0.0)
