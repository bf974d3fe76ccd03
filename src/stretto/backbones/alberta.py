"""ALBERTa's own architecture: pre-LN layers that share parameters in groups, relative terms, narrow embeddings."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from stretto.backbones.base import Backbone, LayerModules, RelativeTerms


class Alberta(Backbone):
    model_types: ClassVar[tuple[str, ...]] = ("alberta",)
    pre_norm: ClassVar[bool] = True

    def list_layers(self) -> list[Any]:
        """The same module stands in the list as often as it runs."""
        return self.encoder.layers

    def modules(self, layer: int) -> LayerModules:
        block = self.layers[layer]
        table = None if block.relative is None else block.relative.weight
        return LayerModules(
            query=block.query,
            key=block.key,
            value=block.value,
            attention_dropout=block.attention_dropout,
            attention_output=block.attention_output,
            attention_norm=block.attention_norm,
            ffn_in=block.ffn_in,
            activation=block.activation,
            ffn_out=block.ffn_out,
            ffn_norm=block.ffn_norm,
            relative=None if table is None else RelativeTerms(key_table=table, query_table=table),
        )

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

    def classify(self, first_rows: Tensor) -> Tensor:
        return self.model.classify(first_rows)

    def pooler(self) -> nn.Linear | None:
        return cast(nn.Linear, self.model.pooler)

    @property
    def embedding_macs(self) -> int:
        return self.encoder.embeddings.widen.weight.numel()
