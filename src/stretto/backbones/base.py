"""What the engines need to know about an architecture: the specs of its layers, its embeddings and its head.

A backbone is a stack of layers, each described by a `LayerSpec` (`stretto.backbones.spec`), with perhaps one more norm
behind the last. It hands out the Hugging Face modules themselves; nothing is copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from stretto.backbones import plain
from stretto.backbones.spec import LayerSpec


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
        self.token_head: nn.Linear | None = token_head(model)
        """The head of a model that answers every token; None if it answers sequences."""

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
        [B, T, d]. Give it Hugging Face's own module where there is one to call; this is what the spec says.

        The bias ([B, 1 or heads, 1 or T, T]) holds all that depends on positions alone: window and bias table.
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

    @abstractmethod
    def head_modules(self) -> list[nn.Module]:
        """The modules of the sequence head (their cost is counted)."""

    @abstractmethod
    def classify(self, first_rows: Tensor) -> Tensor:
        """The sequence head on the states of position 0 (see `for_head`): [B, d] -> [B, C]."""

    def label_tokens(self, rows: Tensor) -> Tensor:
        """The token head on any rows (see `for_head`): […, d] -> […, C]."""
        assert self.token_head is not None
        dropout = getattr(self.model, "dropout", None)
        return self.token_head(rows if dropout is None else dropout(rows))

    def pooler(self) -> nn.Linear | None:
        """A pretrained Linear(d, d) that pools position 0, to initialise exits from; None where there is none."""
        return None

    @property
    def embedding_macs(self) -> int:
        """Multiply-adds per token to bring embeddings to the hidden size (0 where they have it already)."""
        return 0

    @property
    def head_macs(self) -> int:
        """Multiply-adds of the final head, for one sequence or (token head) for one token."""
        heads = self.head_modules() if self.token_head is None else [self.token_head]
        linears = (m for module in heads for m in module.modules() if isinstance(m, nn.Linear))
        return sum(linear.weight.numel() for linear in linears)


def token_head(model: Any) -> nn.Linear | None:
    """The Linear with which a Hugging Face model answers every token, by the names all architectures use."""
    if type(model).__name__.endswith("ForTokenClassification"):
        return model.classifier
    return getattr(model, "qa_outputs", None)
