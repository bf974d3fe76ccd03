"""Training: a method's stages, resumable, on `transformers.Trainer`."""

from stretto.training.plan import DEFAULTS, with_defaults
from stretto.training.run import train
from stretto.training.trainer import StageTrainer

__all__ = ["DEFAULTS", "StageTrainer", "train", "with_defaults"]
