"""Marian and BART: post-LN encoder–decoders. They differ in positions, a norm on embeddings and scaling."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stretto.backbones.decoder import AttentionModules, DecoderBlock, EncoderDecoder


def attention_modules(attention: Any, norm: nn.Module) -> AttentionModules:
    return AttentionModules(attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, norm)


class Marian(EncoderDecoder):
    """Sinusoidal positions, which are not saved; embeddings × √d where the config says so."""

    model_types: ClassVar[tuple[str, ...]] = ("marian",)

    def list_blocks(self) -> list[Any]:
        return list(self.model.model.decoder.layers)

    def block(self, number: int) -> DecoderBlock:
        layer = self.layers[number]
        return DecoderBlock(
            attention=attention_modules(layer.self_attn, layer.self_attn_layer_norm),
            cross=attention_modules(layer.encoder_attn, layer.encoder_attn_layer_norm),
            ffn_in=layer.fc1,
            activation=layer.activation_fn,
            ffn_out=layer.fc2,
            ffn_norm=layer.final_layer_norm,
        )

    def count_heads(self) -> int:
        return int(self.config.decoder_attention_heads)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        return self._embedded(tokens, torch.tensor([position], device=tokens.device))

    def embed_texts(self, tokens: Tensor) -> Tensor:
        decoder = self.model.model.decoder
        embedded = self._embedded(tokens, torch.arange(tokens.shape[1], device=tokens.device))
        return nn.functional.dropout(embedded, p=decoder.dropout, training=decoder.training)

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        decoder = self.model.model.decoder
        return decoder.embed_tokens(tokens) * decoder.embed_scale + decoder.embed_positions.weight[positions]

    @property
    def head_bias(self) -> Tensor | None:
        return self.model.final_logits_bias[0]

    @property
    def most_positions(self) -> int | None:
        return int(self.config.max_position_embeddings)

    def run_block(self, number: int, hidden: Tensor, source: Tensor, causal: Tensor, source_mask: Tensor) -> Tensor:
        return self.layers[number](hidden, causal, source, encoder_attention_mask=source_mask, use_cache=False)


class Bart(Marian):
    """Learned positions that start at 2, and a norm on the embeddings."""

    model_types: ClassVar[tuple[str, ...]] = ("bart",)

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        decoder = self.model.model.decoder
        places = decoder.embed_positions.weight[positions + decoder.embed_positions.offset]
        return decoder.layernorm_embedding(decoder.embed_tokens(tokens) + places)
