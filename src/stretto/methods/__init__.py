"""All methods by name. Adding one is one file and one line here."""

from __future__ import annotations

from stretto.errors import Registry
from stretto.methods.adapler import AdapLeR
from stretto.methods.alberta import ALBERTa
from stretto.methods.base import Dial, Method, Pass, Shape, Stage, TrainingBatch
from stretto.methods.branchynet import BranchyNet
from stretto.methods.constant_ratio import ConstantRatio
from stretto.methods.deebert import DeeBERT
from stretto.methods.depth_mi import DepthMI
from stretto.methods.depth_reconstruction import DepthReconstruction
from stretto.methods.full import Full
from stretto.methods.halting import Halting
from stretto.methods.length_adaptive import LengthAdaptive
from stretto.methods.lte import LTE
from stretto.methods.pabee import PABEE
from stretto.methods.power_bert import PowerBERT
from stretto.methods.shallow_deep import ShallowDeep
from stretto.methods.static_depth import StaticDepth
from stretto.methods.token_halting import TokenHalting

ALL: tuple[type[Method], ...] = (
    Full, StaticDepth, ConstantRatio,
    DeeBERT, BranchyNet, ShallowDeep, PABEE, Halting, LTE, ALBERTa,
    PowerBERT, LengthAdaptive, AdapLeR,
    DepthMI, DepthReconstruction, TokenHalting,
)  # fmt: skip

METHODS: Registry[type[Method]] = Registry(
    "method", {method.name: method for method in ALL}, hint="`stretto methods` describes them."
)

__all__ = ["METHODS", "Dial", "Method", "Pass", "Shape", "Stage", "TrainingBatch"]
