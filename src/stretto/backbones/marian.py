"""Marian and BART: post-norm encoder–decoders. They differ in positions, a norm on embeddings and scaling."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from stretto.backbones.decoder import BlockSpec, EncoderDecoder, ModuleDropout
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec


def attention_spec(own: Any) -> AttentionSpec:
    return AttentionSpec(own.q_proj, own.k_proj, own.v_proj, own.out_proj, own.num_heads, ModuleDropout(own))


def ffn_spec(block: Any) -> FeedForwardSpec:
    return FeedForwardSpec(block.fc1, block.activation_fn, block.fc2)


def dropped(x: Tensor, block: nn.Module) -> Tensor:
    return dropout(x, p=block.dropout, training=block.training)  # type: ignore[arg-type]


class Marian(EncoderDecoder):
    """Sinusoidal positions, which are not saved; embeddings × √d if the config sets `scale_embedding`."""

    model_types: ClassVar[tuple[str, ...]] = ("marian",)

    def list_layers(self) -> list[Any]:
        return list(self.encoder.encoder.layers)

    def layer_spec(self, block: Any) -> LayerSpec:
        attention, ffn = attention_spec(block.self_attn), ffn_spec(block)
        return LayerSpec(attention, block.self_attn_layer_norm, ffn, block.final_layer_norm)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return self._embedded(self.encoder.encoder, input_ids, positions)

    def attend(self, layer: int, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.self_attn_layer_norm(hidden + dropped(block.self_attn(hidden, attention_mask=bias)[0], block))

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        block = self.layers[layer]
        wide = dropout(block.activation_fn(block.fc1(hidden)), p=block.activation_dropout, training=block.training)
        return block.final_layer_norm(hidden + dropped(block.fc2(wide), block))

    def list_blocks(self) -> list[Any]:
        return list(self.encoder.decoder.layers)

    def block_spec(self, block: Any) -> BlockSpec:
        return BlockSpec(
            attention_spec(block.self_attn), block.self_attn_layer_norm,
            attention_spec(block.encoder_attn), block.encoder_attn_layer_norm,
            ffn_spec(block), block.final_layer_norm,
        )  # fmt: skip

    def embed_texts(self, tokens: Tensor, position: int = 0) -> Tensor:
        places = torch.arange(position, position + tokens.shape[1], device=tokens.device)
        return self._embedded(self.encoder.decoder, tokens, places)

    def _embedded(self, stack: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        """The encoder and the decoder embed alike."""
        return dropped(stack.embed_tokens(tokens) * stack.embed_scale + stack.embed_positions.weight[positions], stack)

    @property
    def head_bias(self) -> Tensor | None:
        return self.model.final_logits_bias[0]

    @property
    def most_positions(self) -> int | None:
        return int(self.config.max_position_embeddings)

    def run_block(self, number: int, hidden: Tensor, source: Tensor, causal: Tensor, source_mask: Tensor) -> Tensor:
        return self.blocks[number](hidden, causal, source, encoder_attention_mask=source_mask, use_cache=False)


class Bart(Marian):
    """Learned positions that start at 2, and a norm on the embeddings, which scale themselves."""

    model_types: ClassVar[tuple[str, ...]] = ("bart",)

    def _embedded(self, stack: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        places = stack.embed_positions.weight[positions + stack.embed_positions.offset]
        return dropped(stack.layernorm_embedding(stack.embed_tokens(tokens) + places), stack)
