"""What the decoder engine needs to know about an encoder–decoder: its blocks by role, and its few peculiarities.

A decoder block is self-attention over the tokens written so far, attention over the source (cross-attention) and an
FFN, each with a residual and a norm behind it (post-LN: Marian, BART) or before it (pre-LN: T5). A family hands out
the Hugging Face modules themselves; nothing is copied. d is the hidden size, R rows, V the size of the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn


@dataclass(frozen=True)
class AttentionModules:
    """One attention with its norm."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    norm: nn.Module


@dataclass(frozen=True)
class DecoderBlock:
    """The parts of one decoder block by role."""

    attention: AttentionModules
    cross: AttentionModules
    ffn_in: nn.Linear
    activation: Callable[[Tensor], Tensor]
    ffn_out: nn.Linear
    ffn_norm: nn.Module
    ffn_factor: nn.Linear | None = None
    """A gated FFN multiplies activation(ffn_in(x)) by ffn_factor(x)."""


class EncoderDecoder(ABC):
    """A Hugging Face …ForConditionalGeneration (or MarianMTModel) as the engines see it."""

    model_types: ClassVar[tuple[str, ...]]
    """`config.model_type` values this class serves."""
    pre_norm: ClassVar[bool] = False
    """Whether a block's norms stand before attention and FFN, inside the residual branches, instead of behind them."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.layers: list[Any] = self.list_blocks()
        self.n_blocks = len(self.layers)
        first = self.block(0)
        self.d = int(first.attention.query.in_features)
        self.inner = int(first.attention.query.out_features)
        """Heads × head size; T5's may differ from d."""
        self.n_heads = self.count_heads()
        self.ffn_size = int(first.ffn_in.out_features)
        self.ffn_products = 2 if first.ffn_factor is None else 3
        self.head: nn.Linear = model.lm_head
        self.vocabulary = int(self.head.out_features)

    @abstractmethod
    def list_blocks(self) -> list[Any]:
        """The decoder's blocks in the order they run."""

    @abstractmethod
    def block(self, number: int) -> DecoderBlock:
        """The parts of block `number` (from 0)."""

    @abstractmethod
    def count_heads(self) -> int:
        """Heads of the decoder's attention."""

    @abstractmethod
    def embed(self, tokens: Tensor, position: int) -> Tensor:
        """[R] tokens that stand at one position of their texts -> [R, d]."""

    @property
    def attention_scale(self) -> float:
        """The factor on attention scores."""
        return (self.inner // self.n_heads) ** -0.5

    def position_bias(self, length: int) -> Tensor | None:
        """[heads, length] what the scores of the token at position length - 1 get for each position up to its own."""
        return None

    def for_head(self, rows: Tensor) -> Tensor:
        """Rows behind their last block as the output head reads them: […, d] -> […, d]."""
        return rows

    @property
    def head_bias(self) -> Tensor | None:
        """[V] added to what the output head says."""
        return None

    @property
    def most_positions(self) -> int | None:
        """The longest text, in tokens and with its start token, that the decoder has positions for; None: any."""
        return None

    @abstractmethod
    def run_block(self, number: int, hidden: Tensor, source: Tensor, causal: Tensor, source_mask: Tensor) -> Tensor:
        """Block `number` by Hugging Face's own module, for training: [B, T, d] and the source's [B, S, d] -> [B, T, d].

        Both masks are added to scores: [B, 1, T, T] and [B, 1, 1, S]; what `position_bias` says is added here."""

    @abstractmethod
    def embed_texts(self, tokens: Tensor) -> Tensor:
        """[B, T] target tokens from position 0 on -> [B, T, d], with dropout in training."""
