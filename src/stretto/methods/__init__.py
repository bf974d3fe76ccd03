"""All methods by name. Adding one is one file and one line here."""

from __future__ import annotations

from stretto.errors import Registry, StrettoError
from stretto.methods.adapler import AdapLeR
from stretto.methods.alberta import ALBERTa
from stretto.methods.base import Dial, Method, Pass, Shape, Stage, Targets, TrainingBatch
from stretto.methods.branchynet import BranchyNet
from stretto.methods.combine import Combined, combination
from stretto.methods.constant_ratio import ConstantRatio
from stretto.methods.deebert import DeeBERT
from stretto.methods.depth_adaptive import DepthAdaptive
from stretto.methods.depth_mi import DepthMI
from stretto.methods.depth_reconstruction import DepthReconstruction
from stretto.methods.full import Full
from stretto.methods.halting import Halting
from stretto.methods.layer_drop import LayerDrop
from stretto.methods.length_adaptive import LengthAdaptive
from stretto.methods.lte import LTE
from stretto.methods.pabee import PABEE
from stretto.methods.power_bert import PowerBERT
from stretto.methods.shallow_deep import ShallowDeep
from stretto.methods.static_depth import StaticDepth
from stretto.methods.token_halting import TokenHalting
from stretto.tasks import Task

ALL: tuple[type[Method], ...] = (
    Full, StaticDepth, LayerDrop, ConstantRatio,
    DeeBERT, BranchyNet, ShallowDeep, PABEE, Halting, LTE, ALBERTa,
    PowerBERT, LengthAdaptive, AdapLeR,
    DepthMI, DepthReconstruction, TokenHalting, DepthAdaptive,
)  # fmt: skip


class Methods(Registry[type[Method]]):
    """The methods by name, and their combinations: `METHODS["length_adaptive+deebert"]`."""

    def __init__(self, methods: tuple[type[Method], ...]) -> None:
        super().__init__("method", {each.name: each for each in methods}, hint="`stretto methods` describes them.")
        self.combined: dict[str, type[Method]] = {}

    def __contains__(self, name: object) -> bool:
        parts = name.split("+") if isinstance(name, str) and name.count("+") == 1 else [name]
        return all(Registry.__contains__(self, part) for part in parts)

    def __getitem__(self, name: str) -> type[Method]:
        if isinstance(name, str) and name.count("+") == 1 and name not in self.entries:
            if name not in self.combined:
                first, second = name.split("+")
                self.combined[name] = combination(self[first], self[second])
            return self.combined[name]
        return super().__getitem__(name)


METHODS = Methods(ALL)
#: Defaults if no method is named: the first that can do the task.
DEFAULTS = ("deebert", "lte", "depth_adaptive", "length_adaptive")


def default_method(task: Task | type[Task]) -> str:
    """The method for a task where none is named."""
    for name in DEFAULTS:
        if METHODS[name].needs.met_by(task):
            return name
    able = [name for name, method in METHODS.items() if method.needs.met_by(task)]
    raise StrettoError(
        f"Expected a method for the task {task.name}, which has no default, got none. Name one: {', '.join(able)}."
    )


__all__ = [
    "METHODS", "Combined", "Dial", "Method", "Pass", "Shape", "Stage", "Targets", "TrainingBatch", "default_method",
]  # fmt: skip
