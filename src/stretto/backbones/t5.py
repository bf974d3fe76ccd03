"""T5: a pre-LN encoder–decoder without biases, with relative positions in place of embedded ones."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from stretto.backbones.decoder import AttentionModules, DecoderBlock, EncoderDecoder


def attention_modules(layer: Any, attention: Any) -> AttentionModules:
    return AttentionModules(attention.q, attention.k, attention.v, attention.o, layer.layer_norm)


class T5(EncoderDecoder):
    """Scores are not scaled. Only block 0 owns the table of relative positions; all blocks use it."""

    model_types: ClassVar[tuple[str, ...]] = ("t5",)
    pre_norm: ClassVar[bool] = True

    def list_blocks(self) -> list[Any]:
        return list(self.model.decoder.block)

    def block(self, number: int) -> DecoderBlock:
        own, cross, ffn = self.layers[number].layer
        dense = ffn.DenseReluDense
        gated = hasattr(dense, "wi_0")
        return DecoderBlock(
            attention=attention_modules(own, own.SelfAttention),
            cross=attention_modules(cross, cross.EncDecAttention),
            ffn_in=dense.wi_0 if gated else dense.wi,
            activation=dense.act,
            ffn_out=dense.wo,
            ffn_norm=ffn.layer_norm,
            ffn_factor=dense.wi_1 if gated else None,
        )

    def count_heads(self) -> int:
        return int(self.config.num_heads)

    def embed(self, tokens: Tensor, position: int) -> Tensor:
        return self.model.decoder.embed_tokens(tokens)

    def embed_texts(self, tokens: Tensor) -> Tensor:
        return self.model.decoder.dropout(self.model.decoder.embed_tokens(tokens))

    @property
    def attention_scale(self) -> float:
        return 1.0

    @property
    def _table(self) -> Any:
        return self.layers[0].layer[0].SelfAttention

    def position_bias(self, length: int) -> Tensor | None:
        return self._table.compute_bias(1, length, past_seen_tokens=length - 1)[0, :, 0]

    def for_head(self, rows: Tensor) -> Tensor:
        rows = self.model.decoder.dropout(self.model.decoder.final_layer_norm(rows))
        return rows * self.config.d_model**-0.5 if self.config.scale_decoder_outputs else rows

    def run_block(self, number: int, hidden: Tensor, source: Tensor, causal: Tensor, source_mask: Tensor) -> Tensor:
        length = hidden.shape[1]
        bias = self._table.compute_bias(length, length)  # [1, heads, T, T]
        return self.layers[number](hidden, causal, bias, source, source_mask)[0]
