"""BERT, and the architectures that differ from it only in embeddings or in the final head."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from stretto.backbones.base import Backbone
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec, LayerSpec


class Bert(Backbone):
    model_types: ClassVar[tuple[str, ...]] = ("bert",)

    def layer_spec(self, block: Any) -> LayerSpec:
        own, outer, heads = block.attention.self, block.attention.output, self.config.num_attention_heads
        attention = AttentionSpec(own.query, own.key, own.value, outer.dense, heads, own.dropout, outer.dropout)
        into, out = block.intermediate, block.output
        ffn = FeedForwardSpec(into.dense, into.intermediate_act_fn, out.dense, output_dropout=out.dropout)
        return LayerSpec(attention, outer.LayerNorm, ffn, out.LayerNorm)

    def attend(self, layer: int, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        return self.layers[layer].attention(hidden, attention_mask=bias)[0]

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        return self.layers[layer].feed_forward_chunk(hidden)

    def head_modules(self) -> list[nn.Module]:
        return [self.encoder.pooler, self.model.classifier]

    def classify(self, pooled: Tensor) -> Tensor:
        first = self.encoder.pooler(pooled.unsqueeze(1))  # the pooler itself picks column 0
        return self.model.classifier(self.model.dropout(first))

    def pooler(self) -> nn.Linear | None:
        return cast(nn.Linear, self.encoder.pooler.dense)


class Roberta(Bert):
    """Positions start behind the padding id; the head is one module that reads column 0."""

    model_types: ClassVar[tuple[str, ...]] = ("roberta", "xlm-roberta", "camembert")

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        behind_padding = positions + self.encoder.embeddings.padding_idx + 1
        return super().embed(input_ids, token_type_ids, behind_padding)

    def head_modules(self) -> list[nn.Module]:
        return [self.model.classifier]

    def classify(self, pooled: Tensor) -> Tensor:
        return self.model.classifier(pooled.unsqueeze(1))

    def pooler(self) -> nn.Linear | None:
        return None  # Hugging Face builds these classifiers without a pooler


class Electra(Bert):
    """Embeddings may be narrower than the layers; the head is one module that reads column 0."""

    model_types: ClassVar[tuple[str, ...]] = ("electra",)
    head_modules = Roberta.head_modules
    classify = Roberta.classify
    pooler = Roberta.pooler

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        embedded = super().embed(input_ids, token_type_ids, positions)
        return self.encoder.embeddings_project(embedded) if self.embedding_macs else embedded

    @property
    def embedding_macs(self) -> int:
        project = getattr(self.encoder, "embeddings_project", None)
        return 0 if project is None else project.weight.numel()
