"""ALBERT: layers share parameters, embeddings are narrow, the pooler is a bare Linear."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from stretto.backbones.base import Backbone
from stretto.backbones.bert import Bert
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec


class Albert(Backbone):
    model_types: ClassVar[tuple[str, ...]] = ("albert",)

    def list_layers(self) -> list[Any]:
        """The same module is in the list as often as it runs."""
        config, groups = self.config, self.encoder.encoder.albert_layer_groups
        per_group = config.num_hidden_layers / config.num_hidden_groups
        group_of = [int(i / per_group) for i in range(config.num_hidden_layers)]
        return [layer for group in group_of for layer in groups[group].albert_layers]

    def layer_spec(self, block: Any) -> LayerSpec:
        own, heads = block.attention, self.config.num_attention_heads
        attention = AttentionSpec(
            own.query, own.key, own.value, own.dense, heads, own.attention_dropout, own.output_dropout
        )
        ffn = FeedForwardSpec(block.ffn, block.activation, block.ffn_output)
        return LayerSpec(attention, own.LayerNorm, ffn, block.full_layer_layer_norm)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return self.encoder.encoder.embedding_hidden_mapping_in(super().embed(input_ids, token_type_ids, positions))

    attend = Bert.attend

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.full_layer_layer_norm(block.ff_chunk(hidden) + hidden)

    def head_modules(self) -> list[nn.Module]:
        return [self.encoder.pooler, self.model.classifier]

    def classify(self, pooled: Tensor) -> Tensor:
        return self.model.classifier(self.model.dropout(torch.tanh(self.encoder.pooler(pooled))))

    def pooler(self) -> nn.Linear | None:
        return cast(nn.Linear, self.encoder.pooler)

    @property
    def embedding_macs(self) -> int:
        return self.encoder.encoder.embedding_hidden_mapping_in.weight.numel()
