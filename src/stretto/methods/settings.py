"""The allowed values of a method's settings. A Config declares them by its types and checks them when it is created."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from stretto.errors import StrettoError


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`, including both ends except those in `without`."""

    low: float
    high: float = math.inf
    without: tuple[float, ...] = ()

    def __contains__(self, value: Any) -> bool:
        is_number = isinstance(value, int | float) and math.isfinite(value)
        return is_number and self.low <= value <= self.high and value not in self.without

    def __str__(self) -> str:
        """For example [0, 1)."""
        left = "(" if self.low in self.without else "["
        right = ")" if self.high in (*self.without, math.inf) else "]"
        return f"{left}{self.low:g}, {'∞' if self.high == math.inf else format(self.high, 'g')}{right}"


Epochs = Annotated[float, Range(0)]
LearningRate = Annotated[float, Range(0)]
Weight = Annotated[float, Range(0)]  # for example of a term of a loss
Positive = Annotated[float, Range(0, without=(0,))]
Share = Annotated[float, Range(0, 1)]
SomeShare = Annotated[float, Range(0, 1, without=(0,))]
TrueShare = Annotated[float, Range(0, 1, without=(0, 1))]
Count = Annotated[int, Range(0)]
Size = Annotated[int, Range(1)]


@dataclass(frozen=True)
class Settings:
    """Base of every Config."""

    def __post_init__(self) -> None:
        for name, allowed in limits(type(self)).items():
            value = getattr(self, name)
            if value not in allowed:
                among = f"in {allowed}" if isinstance(allowed, Range) else f"among {', '.join(map(repr, allowed))}"
                raise StrettoError(f"Expected {name} {among}, got {value!r}. Choose another value.")


def limits(config: type[Settings]) -> dict[str, Range | tuple[Any, ...]]:
    """name -> the range or the choices of each setting that has one."""
    hints = get_type_hints(config, include_extras=True)
    found: dict[str, Range | tuple[Any, ...]] = {}
    for field in fields(config):
        hint = hints[field.name]
        if get_origin(hint) is Annotated:
            found[field.name] = hint.__metadata__[0]
        elif get_origin(hint) is Literal:
            found[field.name] = get_args(hint)
    return found


@dataclass(frozen=True)
class FinetuningConfig(Settings):
    """Settings of the first stage, which most methods share (`Method.finetuning`)."""

    num_train_epochs: Epochs = 3
    """Epochs of ordinary fine-tuning (the first stage)."""
    learning_rate: LearningRate = 5e-5
    """Learning rate of ordinary fine-tuning."""
