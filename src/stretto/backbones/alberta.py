"""ALBERTa's own architecture: pre-LN layers that share parameters in groups, relative terms, narrow embeddings."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from stretto.backbones.base import Backbone
from stretto.backbones.positions import RelativeTerms
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec


class Alberta(Backbone):
    model_types: ClassVar[tuple[str, ...]] = ("alberta",)

    def list_layers(self) -> list[Any]:
        """The same module is in the list as often as it runs."""
        return self.encoder.layers

    def layer_spec(self, block: Any) -> LayerSpec:
        table = None if block.relative is None else block.relative.weight
        relative = None if table is None else RelativeTerms(key_table=table, query_table=table)
        attention = AttentionSpec(
            block.query, block.key, block.value, block.attention_output, block.heads, block.attention_dropout,
            block.dropout, relative=relative,
        )  # fmt: skip
        ffn = FeedForwardSpec(block.ffn_in, block.activation, block.ffn_out, output_dropout=block.dropout)
        return LayerSpec(attention, block.attention_norm, ffn, block.ffn_norm, pre_norm=True)

    def attend(self, layer: int, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        block = self.layers[layer]
        return hidden + block.attend(block.attention_norm(hidden), bias, self.encoder.distances_of(positions))

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        block = self.layers[layer]
        return hidden + block.feed_forward(block.ffn_norm(hidden))

    @property
    def final_norm(self) -> nn.LayerNorm | None:
        return cast(nn.LayerNorm, self.encoder.final_norm)

    def head_modules(self) -> list[nn.Module]:
        return [self.model.pooler, self.model.classifier]

    def classify(self, pooled: Tensor) -> Tensor:
        return self.model.classify(pooled)

    def pooler(self) -> nn.Linear | None:
        return cast(nn.Linear, self.model.pooler)

    @property
    def embedding_macs(self) -> int:
        return self.encoder.embeddings.widen.weight.numel()
