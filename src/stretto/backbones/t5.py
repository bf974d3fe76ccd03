"""T5: a pre-norm encoder–decoder without biases, with relative positions in place of embedded ones."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stretto.backbones.decoder import BlockSpec, EncoderDecoder, ModuleDropout
from stretto.backbones.positions import BiasTable
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec


def attention_spec(own: Any, bias: BiasTable | None = None) -> AttentionSpec:
    """Scores are not scaled."""
    return AttentionSpec(own.q, own.k, own.v, own.o, own.n_heads, ModuleDropout(own), bias=bias, scaling=1.0)


def ffn_spec(dense: Any) -> FeedForwardSpec:
    if hasattr(dense, "wi_0"):
        return FeedForwardSpec(dense.wi_0, dense.act, dense.wo, factor=dense.wi_1)
    return FeedForwardSpec(dense.wi, dense.act, dense.wo)


class T5(EncoderDecoder):
    """In each stack only the first layer owns the table of relative positions; all layers use it."""

    model_types: ClassVar[tuple[str, ...]] = ("t5",)

    def list_layers(self) -> list[Any]:
        return list(self.encoder.encoder.block)

    @cached_property
    def bias_table(self) -> BiasTable:
        own = self.encoder.encoder.block[0].layer[0].SelfAttention
        farthest = own.relative_attention_max_distance
        buckets = own._relative_position_bucket(
            torch.arange(-farthest, farthest + 1),
            num_buckets=own.relative_attention_num_buckets,
            max_distance=farthest,
        )
        return BiasTable(own.relative_attention_bias.weight, buckets)

    def layer_spec(self, block: Any) -> LayerSpec:
        own, ffn = block.layer
        attention = attention_spec(own.SelfAttention, self.bias_table)
        return LayerSpec(attention, own.layer_norm, ffn_spec(ffn.DenseReluDense), ffn.layer_norm, pre_norm=True)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return self.encoder.encoder.dropout(self.encoder.encoder.embed_tokens(input_ids))

    def attend(self, layer: int, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        own = self.layers[layer].layer[0]
        attended = own.SelfAttention(own.layer_norm(hidden), position_bias=bias)[0]
        return hidden + own.dropout(attended)

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        return self.layers[layer].layer[1](hidden)

    @property
    def final_norm(self) -> nn.Module | None:
        return self.encoder.encoder.final_layer_norm

    def for_head(self, rows: Tensor) -> Tensor:
        return self.encoder.encoder.dropout(self.encoder.encoder.final_layer_norm(rows))

    def list_blocks(self) -> list[Any]:
        return list(self.encoder.decoder.block)

    def block_spec(self, block: Any) -> BlockSpec:
        own, cross, ffn = block.layer
        return BlockSpec(
            attention_spec(own.SelfAttention), own.layer_norm,
            attention_spec(cross.EncDecAttention), cross.layer_norm,
            ffn_spec(ffn.DenseReluDense), ffn.layer_norm, pre_norm=True,
        )  # fmt: skip

    def embed_texts(self, tokens: Tensor, position: int = 0) -> Tensor:
        return self.encoder.decoder.dropout(self.encoder.decoder.embed_tokens(tokens))

    @property
    def _decoder_table(self) -> Any:
        return self.blocks[0].layer[0].SelfAttention

    def decoder_bias(self, length: int) -> Tensor | None:
        return self._decoder_table.compute_bias(1, length, past_seen_tokens=length - 1)[0, :, 0]

    def for_output(self, rows: Tensor) -> Tensor:
        decoder = self.encoder.decoder
        rows = decoder.dropout(decoder.final_layer_norm(rows))
        return rows * self.config.d_model**-0.5 if self.config.scale_decoder_outputs else rows

    def run_block(self, number: int, hidden: Tensor, source: Tensor, causal: Tensor, source_mask: Tensor) -> Tensor:
        length = hidden.shape[1]
        bias = self._decoder_table.compute_bias(length, length)  # [1, heads, T, T]
        return self.blocks[number](hidden, causal, bias, source, source_mask)[0]
