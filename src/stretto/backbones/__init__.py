"""Supported architectures, by Hugging Face `model_type`."""

from __future__ import annotations

from typing import Any

from stretto.backbones.albert import Albert
from stretto.backbones.alberta import Alberta
from stretto.backbones.architectures import register_architectures
from stretto.backbones.base import Backbone
from stretto.backbones.bert import Bert, Electra, Roberta
from stretto.backbones.decoder import EncoderDecoder
from stretto.backbones.distilbert import DistilBert
from stretto.backbones.marian import Bart, Marian
from stretto.backbones.mpnet import MPNet
from stretto.backbones.positions import BiasTable, RelativeTerms, Rotary
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec
from stretto.backbones.t5 import T5
from stretto.errors import Registry

BACKBONES: Registry[type[Backbone]] = Registry(
    "backbone architecture",
    {
        name: cls
        for cls in (Bert, Roberta, DistilBert, Electra, Albert, MPNet, Alberta, Marian, Bart, T5)
        for name in cls.model_types
    },
    hint="To add one, write a Backbone subclass in stretto/backbones (see docs/backbones.md) and list it there.",
)


def backbone_for(model: Any) -> Backbone:
    """The backbone that serves a Hugging Face model with a head for sequences or tokens, or with a decoder."""
    return BACKBONES[model.config.model_type](model)


__all__ = [
    "BACKBONES", "AttentionSpec", "Backbone", "BiasTable", "EncoderDecoder", "FeedForwardSpec", "LayerSpec",
    "RelativeTerms", "Rotary", "backbone_for", "register_architectures",
]  # fmt: skip
