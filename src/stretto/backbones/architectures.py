"""Registers stretto's own architectures with the Auto classes of transformers.

Everything in stretto that loads a model calls `register_architectures` first. To load such a model with plain
transformers, call it once yourself.
"""

from __future__ import annotations

from typing import Any


def register_architectures() -> None:
    """Register ALBERTa with transformers. Calling it again changes nothing."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    from stretto.backbones import alberta_model as alberta

    AutoConfig.register(alberta.AlbertaConfig.model_type, alberta.AlbertaConfig, exist_ok=True)
    modeling_auto.AutoModel.register(alberta.AlbertaConfig, alberta.AlbertaModel, exist_ok=True)
    for head in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
        auto_class: Any = getattr(modeling_auto, f"AutoModelFor{head}")
        auto_class.register(alberta.AlbertaConfig, getattr(alberta, f"AlbertaFor{head}"), exist_ok=True)
