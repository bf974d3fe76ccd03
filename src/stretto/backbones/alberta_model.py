"""ALBERTa's own architecture: groups of pre-LN layers that share parameters, with relative and absolute positions.

Li, Li, Wang: *From Static to Dynamic: A Deeper, Faster, and Adaptive Language Modeling Approach*.

    H̃ = H + Attn(LN(H)), H' = H̃ + FFN(LN(H̃))                     -> `AlbertaLayer.forward`
    AS_ij = (q_i·k_j + q_i·E_r + k_j·E_r) / √d_head, r = j - i     -> `relative_scores`, and SDPA for q_i·k_j

r is clipped at ±max_relative_distance. Tokens are embedded narrow and widened once, as in ALBERT. The residual stream
is normalised once more behind the last layer (`final_norm`), before any head.

The gates p_i on the two branches and the structure predictor that sets them are part of the method `alberta`, which
works on any backbone. This file is the model with all gates open.

Differs from the paper: the two relative terms are divided by √d_head like the first; E is one table per group, for all
heads and both terms. The paper does not define its largest distance, nor the norm after the last layer.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from stretto.backbones.alberta_config import AlbertaConfig


def token_positions(attention_mask: Tensor) -> Tensor:
    """[B, T] -> [B, T]: the position of each token in its sequence, for either padding side."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)


def distances(positions: Tensor, farthest: int) -> Tensor:
    """[B, T] -> [B, T, T]: row of the table for query i and key j, clip(j - i) counted from -farthest."""
    return (positions[:, None, :] - positions[:, :, None]).clamp(-farthest, farthest) + farthest


def relative_scores(query: Tensor, key: Tensor, table: Tensor, distance: Tensor) -> Tensor:
    """q_i·E_r + k_j·E_r: two [B, heads, T, d_head], [2R + 1, d_head], [B, T, T] -> [B, heads, T, T]."""
    index = distance.unsqueeze(1).expand(-1, query.shape[1], -1, -1)
    of_query = (query @ table.T).gather(3, index)
    of_key = (key @ table.T).gather(3, index.transpose(2, 3)).transpose(2, 3)  # looked up by key, read by query
    return of_query + of_key


class AlbertaEmbeddings(nn.Module):
    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__()
        width = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width) if config.use_absolute else None
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.widen = nn.Linear(width, config.hidden_size)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, position_ids: Tensor) -> Tensor:
        """All [B, T] -> [B, T, d]."""
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        embedded = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        if self.position_embeddings is not None:
            embedded = embedded + self.position_embeddings(position_ids)
        return self.widen(self.dropout(self.norm(embedded)))


class AlbertaLayer(nn.Module):
    """One layer's parameters, which all layers of a group share."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__()
        d, heads = config.hidden_size, config.num_attention_heads
        self.heads, self.attention_dropout = heads, nn.Dropout(config.attention_probs_dropout_prob)
        self.attention_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.relative = nn.Embedding(2 * config.max_relative_distance + 1, d // heads) if config.use_relative else None
        self.attention_output = nn.Linear(d, d)
        self.ffn_norm = nn.LayerNorm(d, eps=config.layer_norm_eps)
        self.ffn_in = nn.Linear(d, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.ffn_out = nn.Linear(config.intermediate_size, d)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, bias: Tensor, distance: Tensor | None) -> Tensor:
        """[B, T, d], additive bias [B, 1, 1, T], distance [B, T, T] (None without relative terms) -> [B, T, d]."""
        hidden = hidden + self.attend(self.attention_norm(hidden), bias, distance)
        return hidden + self.feed_forward(self.ffn_norm(hidden))

    def attend(self, normed: Tensor, bias: Tensor, distance: Tensor | None) -> Tensor:
        query, key, value = (
            linear(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if self.relative is not None:
            assert distance is not None
            scores = relative_scores(query, key, self.relative.weight, distance)
            bias = bias + scores / query.shape[-1] ** 0.5
        dropout = self.attention_dropout.p if self.training else 0.0
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        return self.dropout(self.attention_output(context.transpose(1, 2).flatten(2)))

    def feed_forward(self, normed: Tensor) -> Tensor:
        return self.dropout(self.ffn_out(self.activation(self.ffn_in(normed))))


class AlbertaPreTrainedModel(PreTrainedModel):
    config: AlbertaConfig
    config_class = AlbertaConfig
    base_model_prefix = "alberta"
    _supports_sdpa = True
    accepts_loss_kwargs = False  # losses are means; Trainer divides them over accumulated batches itself

    base_model: Any

    def get_input_embeddings(self) -> nn.Module:
        return self.base_model.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base_model.embeddings.word_embeddings = value


class AlbertaModel(AlbertaPreTrainedModel):
    """The encoder."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.embeddings = AlbertaEmbeddings(config)
        self.groups = nn.ModuleList([AlbertaLayer(config) for _ in range(config.num_hidden_groups)])
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @property
    def layers(self) -> list[AlbertaLayer]:
        """The layers in the order they run; a layer is in the list as often as its group has layers."""
        return [self.groups[self.config.group_of(layer)] for layer in range(self.config.num_hidden_layers)]  # type: ignore[misc]

    def distances_of(self, positions: Tensor) -> Tensor | None:
        """[B, T] -> [B, T, T] for the relative terms; None without them."""
        return distances(positions, self.config.max_relative_distance) if self.config.use_relative else None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutput:
        """All [B, T] -> `last_hidden_state` [B, T, d], normalised.

        `hidden_states` (with `output_hidden_states`) are the residual stream after the embeddings and after each layer
        but the last, and then `last_hidden_state`."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = token_positions(mask) if position_ids is None else position_ids
        hidden = self.embeddings(input_ids, token_type_ids, positions)
        bias = hidden.new_zeros(mask.shape).masked_fill(mask == 0, torch.finfo(hidden.dtype).min)[:, None, None, :]
        distance = self.distances_of(positions)
        stream = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, bias, distance)
            stream.append(hidden)
        last = self.final_norm(hidden)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutput(last_hidden_state=last, hidden_states=(*stream[:-1], last) if wanted else None)


class AlbertaLMHead(nn.Module):
    """Back to the width of the embeddings, then a score for every entry of the vocabulary."""

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__()
        self.narrow = nn.Linear(config.hidden_size, config.embedding_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, rows: Tensor) -> Tensor:
        """[…, d] -> […, vocabulary]"""
        return self.decoder(self.norm(self.activation(self.narrow(rows))))


class AlbertaForMaskedLM(AlbertaPreTrainedModel):
    _tied_weights_keys = {"lm_head.decoder.weight": "alberta.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.lm_head = AlbertaLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head.decoder = new_embeddings

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **inputs: Any
    ) -> MaskedLMOutput:
        """`labels` [B, T] are the tokens to predict, -100 elsewhere."""
        encoded = self.alberta(input_ids, attention_mask, **inputs)
        logits = self.lm_head(encoded.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)


class AlbertaForSequenceClassification(AlbertaPreTrainedModel):
    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, cast(int, config.num_labels))
        self.post_init()

    def classify(self, first_rows: Tensor) -> Any:
        """[B, d] -> [B, C]"""
        return self.classifier(self.dropout(torch.tanh(self.pooler(first_rows))))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **inputs: Any
    ) -> SequenceClassifierOutput:
        encoded = self.alberta(input_ids, attention_mask, **inputs)
        everyone = torch.arange(len(input_ids), device=input_ids.device)
        first = torch.zeros_like(everyone) if attention_mask is None else attention_mask.long().argmax(dim=1)
        logits = self.classify(encoded.last_hidden_state[everyone, first])
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)


class AlbertaForTokenClassification(AlbertaPreTrainedModel):
    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, cast(int, config.num_labels))
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **inputs: Any
    ) -> TokenClassifierOutput:
        encoded = self.alberta(input_ids, attention_mask, **inputs)
        logits = self.classifier(self.dropout(encoded.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return TokenClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)


class AlbertaForQuestionAnswering(AlbertaPreTrainedModel):
    def __init__(self, config: AlbertaConfig) -> None:
        super().__init__(config)
        self.alberta = AlbertaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **inputs: Any,
    ) -> QuestionAnsweringModelOutput:
        encoded = self.alberta(input_ids, attention_mask, **inputs)
        start, end = self.qa_outputs(encoded.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=encoded.hidden_states
        )
