"""MPNet: a bias on the attention scores by relative position, shared by all layers; no token types."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.backbones.bert import Roberta
from stretto.backbones.positions import BiasTable
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec

#: Where Hugging Face's buckets end: all that is farther shares the last one.
FARTHEST = 128


class MPNet(Roberta):
    model_types: ClassVar[tuple[str, ...]] = ("mpnet",)

    @cached_property
    def bias_table(self) -> BiasTable:
        stack = self.encoder.encoder
        buckets = stack.relative_position_bucket(torch.arange(-FARTHEST, FARTHEST + 1), max_distance=FARTHEST)
        return BiasTable(stack.relative_attention_bias.weight, buckets)

    def layer_spec(self, block: Any) -> LayerSpec:
        own, into, out = block.attention, block.intermediate, block.output
        inner, heads = own.attn, self.config.num_attention_heads
        attention = AttentionSpec(
            inner.q, inner.k, inner.v, inner.o, heads, inner.dropout, own.dropout, bias=self.bias_table
        )
        ffn = FeedForwardSpec(into.dense, into.intermediate_act_fn, out.dense, output_dropout=out.dropout)
        return LayerSpec(attention, own.LayerNorm, ffn, out.LayerNorm)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return super().embed(input_ids, None, positions)  # the embeddings module swallows what it does not know

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.output(block.intermediate(hidden), hidden)
