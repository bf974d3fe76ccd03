"""A small pre-LN stack with two-term relative attention: what no architecture of Hugging Face's that we serve has.

Its own forward runs one sequence at a time and spells the scores out pair by pair; its backbone runs padded batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stretto.backbones import AttentionSpec, Backbone, FeedForwardSpec, LayerSpec, RelativeTerms

FARTHEST = 3  # shorter than most texts of the tests


def relative_terms(terms: RelativeTerms, q: Tensor, k: Tensor) -> Tensor:
    """[n, heads, head_dim] of one whole sequence, twice -> [heads, n, n], pair by pair."""
    added = q.new_zeros(q.shape[1], len(q), len(k))
    for i in range(len(q)):
        for j in range(len(k)):
            r = max(-FARTHEST, min(FARTHEST, j - i)) + FARTHEST
            added[:, i, j] = (q[i] @ terms.key_table[r] + k[j] @ terms.query_table[r]) / q.shape[-1] ** 0.5
    return added


class PreNormLayer(nn.Module):
    def __init__(self, d: int, heads: int, f: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.key_table = nn.Parameter(torch.zeros(2 * FARTHEST + 1, d // heads))
        self.query_table = nn.Parameter(torch.zeros(2 * FARTHEST + 1, d // heads))
        self.ffn_in, self.ffn_out = nn.Linear(d, f), nn.Linear(f, d)

    @property
    def relative(self) -> RelativeTerms:
        return RelativeTerms(self.key_table, self.query_table)

    def attention(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[n, d] of one whole sequence -> probabilities [heads, n, n] and values [n, heads, head_dim]."""
        x = self.attention_norm(rows)
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.query, self.key, self.value))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        return (scores + relative_terms(self.relative, q, k)).softmax(dim=-1), v

    def forward(self, rows: Tensor) -> Tensor:
        probabilities, v = self.attention(rows)
        rows = rows + self.out(torch.einsum("hij,jhd->ihd", probabilities, v).flatten(1))
        return rows + self.ffn_out(torch.relu(self.ffn_in(self.ffn_norm(rows))))


class PreNorm(nn.Module):
    def __init__(self, n_labels: int, n_layers: int, vocabulary: int, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=d, num_attention_heads=heads, num_labels=n_labels)
        self.words = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(PreNormLayer(d, heads, 64) for _ in range(n_layers))
        self.final_norm = nn.LayerNorm(d)
        self.classifier = nn.Linear(d, n_labels)
        for norm in (m for m in self.modules() if isinstance(m, nn.LayerNorm)):  # so that no norm can stand for another
            nn.init.normal_(norm.weight, mean=1.0, std=0.2)
            nn.init.normal_(norm.bias, std=0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, output_hidden_states: bool = False) -> Any:
        """Padded on the right. Hidden states as Hugging Face gives them: the last one is behind the final norm."""
        states = torch.zeros(len(self.layers) + 1, *input_ids.shape, self.config.hidden_size)
        for index, length in enumerate(attention_mask.sum(dim=1).tolist()):
            rows = self.words(input_ids[index, :length])
            for layer, block in enumerate(self.layers):
                states[layer, index, :length] = rows
                rows = block(rows)
            states[-1, index, :length] = self.final_norm(rows)
        return SimpleNamespace(logits=self.classifier(self.head_input(states[-1])), hidden_states=tuple(states))

    @property
    def base_model(self) -> PreNorm:
        return self

    def head_input(self, last: Tensor) -> Tensor:
        return last[:, 0]


class PreNormForTokenClassification(PreNorm):
    def head_input(self, last: Tensor) -> Tensor:
        return last


class PreNormBackbone(Backbone):
    model_types: ClassVar[tuple[str, ...]] = ("pre-norm",)

    def list_layers(self) -> list[Any]:
        return list(self.encoder.layers)

    def layer_spec(self, block: Any) -> LayerSpec:
        attention = AttentionSpec(
            block.query, block.key, block.value, block.out, block.heads, nn.Dropout(0.0), relative=block.relative
        )
        ffn = FeedForwardSpec(block.ffn_in, torch.relu, block.ffn_out)
        return LayerSpec(attention, block.attention_norm, ffn, block.ffn_norm, pre_norm=True)

    def embed(self, input_ids: Tensor, token_type_ids: Tensor | None, positions: Tensor) -> Tensor:
        return self.encoder.words(input_ids)

    def attend(self, layer: int, hidden: Tensor, bias: Tensor, positions: Tensor) -> Tensor:
        block, x = self.layers[layer], self.layers[layer].attention_norm(hidden)
        q, k, v = (linear(x).unflatten(-1, (block.heads, -1)) for linear in (block.query, block.key, block.value))
        r = (positions[:, None, :] - positions[:, :, None]).clamp(-FARTHEST, FARTHEST) + FARTHEST  # [B, T, T]
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        scores = scores + torch.einsum("bihd,bijd->bhij", q, block.key_table[r])
        scores = scores + torch.einsum("bjhd,bijd->bhij", k, block.query_table[r])
        weights = (scores / q.shape[-1] ** 0.5 + bias).softmax(dim=-1)
        return hidden + block.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        block = self.layers[layer]
        return hidden + block.ffn_out(torch.relu(block.ffn_in(block.ffn_norm(hidden))))

    @property
    def final_norm(self) -> nn.LayerNorm | None:
        return self.encoder.final_norm

    def head_modules(self) -> list[nn.Module]:
        return [self.model.classifier]

    def classify(self, first_rows: Tensor) -> Tensor:
        return self.model.classifier(first_rows)
