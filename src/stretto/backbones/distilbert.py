"""DistilBERT: other names, no token types, no pooler but a `pre_classifier`."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from stretto.backbones.base import Backbone
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec


class DistilBert(Backbone):
    model_types: ClassVar[tuple[str, ...]] = ("distilbert",)

    def list_layers(self) -> list[Any]:
        return list(self.encoder.transformer.layer)

    def layer_spec(self, block: Any) -> LayerSpec:
        own, ffn = block.attention, block.ffn
        heads = self.config.num_attention_heads
        return LayerSpec(
            AttentionSpec(own.q_lin, own.k_lin, own.v_lin, own.out_lin, heads, own.dropout),
            block.sa_layer_norm,
            FeedForwardSpec(ffn.lin1, ffn.activation, ffn.lin2, output_dropout=ffn.dropout),
            block.output_layer_norm,
        )

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return self.encoder.embeddings(input_ids, position_ids=positions)

    def attend(self, layer: int, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.sa_layer_norm(block.attention(hidden, attention_mask=bias)[0] + hidden)

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.output_layer_norm(block.ffn(hidden) + hidden)

    def head_modules(self) -> list[nn.Module]:
        return [self.model.pre_classifier, self.model.classifier]

    def classify(self, pooled: Tensor) -> Tensor:
        return self.model.classifier(self.model.dropout(torch.relu(self.model.pre_classifier(pooled))))

    def pooler(self) -> nn.Linear | None:
        return cast(nn.Linear, self.model.pre_classifier)
