"""A small architecture with all that a `LayerSpec` can say, in one stack; no architecture of Hugging Face's has it all.

Pre-norm layers with a last norm behind them; the first layer's attention has no norm. Layer 3 has separate query, key
and value with biases and a plain FFN; the others a fused QKV and a gated FFN, without biases. The heads together are
narrower than the rows, and scores have a scale of their own. Rotary positions with two θ, local windows in two of three
layers, a bias table that all layers share, relative terms in every layer.

Its own forward runs one sequence at a time and spells the scores out pair by pair. Its backbone gives specs alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from stretto.backbones import (
    AttentionSpec,
    Backbone,
    BiasTable,
    FeedForwardSpec,
    LayerSpec,
    RelativeTerms,
    Rotary,
)
from stretto.backbones.spec import ABSENT, equal_parts

HEAD_SIZE, SCALE = 6, 0.3
FARTHEST = 3  # of relative terms; shorter than most texts of the tests, as is the window
WINDOW = 2
BUCKETS = [0, 0, 1, 2, 3, 4, 4]  # of distances -3 to 3
THETA = {"global": 100.0, "local": 7.0}


class PatchworkConfig(PreTrainedConfig):
    model_type = "patchwork"

    vocab_size: int = 50
    hidden_size: int = 32
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    intermediate_size: int = 64
    max_position_embeddings: int = 70
    pad_token_id: int | None = 0


class PatchworkLayer(nn.Module):
    def __init__(self, config: PatchworkConfig, index: int) -> None:
        super().__init__()
        d, f, width = config.hidden_size, config.intermediate_size, config.num_attention_heads * HEAD_SIZE
        self.heads, self.local, self.fused = config.num_attention_heads, index % 3 > 0, index != 2
        if self.fused:
            self.qkv, self.ffn_in = nn.Linear(d, 3 * width, bias=False), nn.Linear(d, 2 * f, bias=False)
        else:
            self.query, self.key, self.value = (nn.Linear(d, width) for _ in range(3))
            self.ffn_in = nn.Linear(d, f)
        self.out, self.ffn_out = nn.Linear(width, d, bias=not self.fused), nn.Linear(f, d, bias=not self.fused)
        self.attention_norm = ABSENT if index == 0 else nn.LayerNorm(d)
        self.ffn_norm = nn.LayerNorm(d)
        self.key_table, self.query_table = (nn.Parameter(torch.zeros(2 * FARTHEST + 1, HEAD_SIZE)) for _ in range(2))
        self.attention_dropout = nn.Dropout(0.0)

    def attention(self, rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """[n, d] of one whole sequence, the bias table -> probabilities [heads, n, n], values [n, heads, head_size]."""
        x = self.attention_norm(rows)
        projected = self.qkv(x).chunk(3, dim=1) if self.fused else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(1, (self.heads, HEAD_SIZE)) for part in projected)
        q, k = self.turned(q), self.turned(k)
        pairs = [[self.score(q[i], k[j], j - i, table) for j in range(len(k))] for i in range(len(q))]
        return torch.stack([torch.stack(row, dim=1) for row in pairs], dim=1).softmax(dim=-1), v

    def turned(self, x: Tensor) -> Tensor:
        """Values m and m + h/2 of a head are one complex number, turned by position · θ^(-2m/h): [n, heads, h]."""
        theta = THETA["local" if self.local else "global"]
        turns = [
            [n * theta ** (-2 * m / HEAD_SIZE) for m in range(HEAD_SIZE // 2)] for n in range(len(x))
        ]  # [n, h / 2] radians
        turn = torch.polar(torch.ones(len(x), HEAD_SIZE // 2), torch.tensor(turns)).unsqueeze(1)
        both = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat([both.real, both.imag], dim=-1)

    def score(self, q: Tensor, k: Tensor, distance: int, table: Tensor) -> Tensor:
        """[heads, head_size] twice, distance from query to key -> [heads]."""
        if self.local and abs(distance) > WINDOW:
            return q.new_full((self.heads,), -torch.inf)
        r = max(-FARTHEST, min(FARTHEST, distance)) + FARTHEST
        content = (q * k).sum(dim=1) + q @ self.key_table[r] + k @ self.query_table[r]
        return SCALE * content + table[BUCKETS[r]]

    def forward(self, rows: Tensor, table: Tensor) -> Tensor:
        probabilities, v = self.attention(rows, table)
        rows = rows + self.out(torch.einsum("hij,jhd->ihd", probabilities, v).flatten(1))
        inner = self.ffn_in(self.ffn_norm(rows))
        if not self.fused:
            return rows + self.ffn_out(torch.relu(inner))
        first, second = inner.chunk(2, dim=1)
        return rows + self.ffn_out(torch.relu(first) * second)


class PatchworkPreTrainedModel(PreTrainedModel):
    config: PatchworkConfig
    config_class = PatchworkConfig
    base_model_prefix = "patchwork"
    _supports_sdpa = True  # it has no kernel to choose: any will do

    def _init_weights(self, module: nn.Module) -> None:
        """Norms are random too, so that none can stand for another."""
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.2)
            nn.init.normal_(module.bias, std=0.2)


class PatchworkModel(PatchworkPreTrainedModel):
    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.bias = nn.Embedding(max(BUCKETS) + 1, config.num_attention_heads)
        self.layers = nn.ModuleList(PatchworkLayer(config, index) for index in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> BaseModelOutput:
        """Padded on the right. Hidden states as Hugging Face gives them: the last one is behind the final norm."""
        states = torch.zeros(len(self.layers) + 1, *input_ids.shape, self.config.hidden_size)
        for index, length in enumerate(attention_mask.sum(dim=1).tolist()):
            rows = self.words(input_ids[index, :length])
            for layer, block in enumerate(self.layers):
                states[layer, index, :length] = rows
                rows = block(rows, self.bias.weight)
            states[-1, index, :length] = self.final_norm(rows)
        return BaseModelOutput(last_hidden_state=states[-1], hidden_states=tuple(states))


class PatchworkHead(PatchworkPreTrainedModel):
    """A bare Linear on the first row or on every row."""

    def __init__(self, config: PatchworkConfig) -> None:
        super().__init__(config)
        self.patchwork = PatchworkModel(config)
        setattr(self, self.head_name, nn.Linear(config.hidden_size, int(config.num_labels or 0)))
        self.post_init()

    head_name = "classifier"


class PatchworkForSequenceClassification(PatchworkHead):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SequenceClassifierOutput:
        encoded = self.patchwork(input_ids, attention_mask)
        logits = self.classifier(encoded.last_hidden_state[:, 0])
        return SequenceClassifierOutput(logits=logits, hidden_states=encoded.hidden_states)


class PatchworkForTokenClassification(PatchworkHead):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> TokenClassifierOutput:
        encoded = self.patchwork(input_ids, attention_mask)
        logits = self.classifier(encoded.last_hidden_state)
        return TokenClassifierOutput(logits=logits, hidden_states=encoded.hidden_states)


class PatchworkForQuestionAnswering(PatchworkHead):
    head_name = "qa_outputs"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> QuestionAnsweringModelOutput:
        start, end = self.qa_outputs(self.patchwork(input_ids, attention_mask).last_hidden_state).unbind(dim=-1)
        return QuestionAnsweringModelOutput(start_logits=start, end_logits=end)


class Patchwork(Backbone):
    model_types: ClassVar[tuple[str, ...]] = ("patchwork",)

    def list_layers(self) -> list[Any]:
        self.table = BiasTable(self.encoder.bias.weight, torch.tensor(BUCKETS))
        return list(self.encoder.layers)

    def layer_spec(self, block: Any) -> LayerSpec:
        projections = equal_parts(block.qkv, 3) if block.fused else (block.query, block.key, block.value)
        attention = AttentionSpec(
            *projections, block.out, block.heads, block.attention_dropout, scaling=SCALE,
            rotary=Rotary.of(THETA["local" if block.local else "global"], HEAD_SIZE),
            window=WINDOW if block.local else None,
            bias=self.table,
            relative=RelativeTerms(block.key_table, block.query_table),
        )  # fmt: skip
        into, factor = equal_parts(block.ffn_in, 2) if block.fused else (block.ffn_in, None)
        ffn = FeedForwardSpec(into, torch.relu, block.ffn_out, factor)
        return LayerSpec(attention, block.attention_norm, ffn, block.ffn_norm, pre_norm=True)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return self.encoder.words(input_ids)

    @property
    def final_norm(self) -> nn.LayerNorm | None:
        return self.encoder.final_norm

    def head_modules(self) -> list[nn.Module]:
        return [self.model.classifier]

    def classify(self, pooled: Tensor) -> Tensor:
        return self.model.classifier(pooled)


def register() -> None:
    """Let Hugging Face's Auto classes know it."""
    AutoConfig.register("patchwork", PatchworkConfig)
    AutoModelForSequenceClassification.register(PatchworkConfig, PatchworkForSequenceClassification)
    AutoModelForTokenClassification.register(PatchworkConfig, PatchworkForTokenClassification)
    AutoModelForQuestionAnswering.register(PatchworkConfig, PatchworkForQuestionAnswering)
