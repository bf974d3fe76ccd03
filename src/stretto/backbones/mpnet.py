"""MPNet: a relative-position bias on the attention scores, shared by all layers; no token types."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from stretto.backbones.base import LayerModules
from stretto.backbones.bert import Roberta


class MPNet(Roberta):
    model_types: ClassVar[tuple[str, ...]] = ("mpnet",)

    def modules(self, layer: int) -> LayerModules:
        block = self.layers[layer]
        attention = block.attention
        return LayerModules(
            query=attention.attn.q,
            key=attention.attn.k,
            value=attention.attn.v,
            attention_dropout=attention.attn.dropout,
            attention_output=attention.attn.o,
            attention_norm=attention.LayerNorm,
            ffn_in=block.intermediate.dense,
            activation=block.intermediate.intermediate_act_fn,
            ffn_out=block.output.dense,
            ffn_norm=block.output.LayerNorm,
        )

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return super().embed(input_ids, None, positions)  # the embeddings module swallows what it does not know

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.output(block.intermediate(hidden), hidden)

    def position_bias(self, length: int) -> Tensor | None:
        like = self.encoder.embeddings.word_embeddings.weight.new_empty(1, length, 1)  # only its shape is read
        return self.encoder.encoder.compute_position_bias(like)[0]
