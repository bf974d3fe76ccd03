"""What the engines need to know about an architecture: the specs of its layers, its embeddings and its head.

A backbone is a stack of layers, each described by a `LayerSpec` (`stretto.backbones.spec`), with perhaps one more norm
behind the last. It hands out the Hugging Face modules themselves; nothing is copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from stretto.backbones import plain
from stretto.backbones.heads import Head, sequence_head, token_head
from stretto.backbones.spec import LayerSpec
from stretto.errors import StrettoError


class Backbone(ABC):
    """An encoder with a head for sequences or for tokens. B sequences, T columns, d hidden size, C labels."""

    model_types: ClassVar[tuple[str, ...]]
    """`config.model_type` values this class serves."""

    def __init__(self, model: Any) -> None:
        self.model = model  # the Hugging Face …ForSequenceClassification, …ForTokenClassification, …
        self.encoder = model.base_model
        self.config = model.config
        self.layers: list[Any] = self.list_layers()
        spec_of = {id(block): self.layer_spec(block) for block in self.layers}
        self.specs = [spec_of[id(block)] for block in self.layers]
        """One per layer; layers that share their parameters share their spec."""
        self.n_layers = len(self.layers)
        self.d = int(self.config.hidden_size)
        self.n_labels = int(self.config.num_labels)

    def list_layers(self) -> list[Any]:
        """The layers in the order they run."""
        return list(self.encoder.encoder.layer)

    @abstractmethod
    def layer_spec(self, block: Any) -> LayerSpec:
        """What a layer is made of; `block` is one of `list_layers`."""

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        """All [b, n] -> [b, n, d]. The packed engine calls it with b = 1 and the rows of many sequences."""
        return self.encoder.embeddings(input_ids, token_type_ids=token_type_ids, position_ids=positions)

    def attend(self, layer: int, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        """Attention block of layer `layer` (from 0) with residual and norm, for the reference engine: [B, T, d] ->
        [B, T, d]. Override it to call Hugging Face's own module if there is one; the default follows the spec.

        The bias ([B, 1 or heads, 1 or T, T]) holds everything that depends on positions alone: window and bias table.
        `positions` ([B, T], in the input) are for rotary positions and relative terms."""
        return plain.attend(self.specs[layer], hidden, bias, positions, self.model.training)

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        """FFN block with residual and norm: […, d] -> […, d]. As `attend`."""
        return plain.feed_forward(self.specs[layer], hidden)

    @property
    def final_norm(self) -> nn.Module | None:
        """A norm between the last layer a row goes through and the model's head, or None."""
        return None

    def for_head(self, rows: Tensor) -> Tensor:
        """Rows behind their last layer as the head reads them: […, d] -> […, d]."""
        return rows if self.final_norm is None else self.final_norm(rows)

    @cached_property
    def head(self) -> Head:
        """The head that the Hugging Face model has for its task."""
        return self.make_head()

    def make_head(self) -> Head:
        name = type(self.model).__name__
        if name.endswith("ForSequenceClassification"):
            return sequence_head(self.model, self.classify, self.head_modules())
        if name.endswith(("ForTokenClassification", "ForQuestionAnswering")):
            return token_head(self.model)
        raise StrettoError(
            f"Expected a model with a head for sequences, tokens or questions, got a {name}. "
            "Load it with AutoModelForSequenceClassification, AutoModelForTokenClassification or "
            "AutoModelForQuestionAnswering."
        )

    @abstractmethod
    def head_modules(self) -> list[nn.Module]:
        """The modules of the head for sequences, all that `classify` uses."""

    @abstractmethod
    def classify(self, pooled: Tensor) -> Tensor:
        """The logits of the head for sequences, from the state that it reads: [B, d] -> [B, C]."""

    def pooler(self) -> nn.Linear | None:
        """A pretrained Linear(d, d) that pools position 0, to initialise exits from; None where there is none."""
        return None

    @property
    def embedding_macs(self) -> int:
        """Multiply-adds per token to bring embeddings to the hidden size (0 where they have it already)."""
        return 0
