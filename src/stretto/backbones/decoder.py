"""What the engines need to know about an encoder–decoder: its encoder is a `Backbone`, its decoder is described here.

A decoder block is self-attention over the tokens written so far, attention over the source (cross-attention) and an
FFN, each with a residual and a norm behind it (post-norm: Marian, BART) or before it (pre-norm: T5). A family hands out
the Hugging Face modules themselves; nothing is copied. d is the hidden size, R rows, V the size of the vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stretto.backbones.base import Backbone
from stretto.backbones.heads import Head, MeanOfRows
from stretto.backbones.spec import AttentionSpec, FeedForwardSpec
from stretto.errors import StrettoError


class ModuleDropout:
    """The dropout of a module that keeps its probability as a plain number."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def p(self) -> float:
        return self.module.dropout

    @p.setter
    def p(self, value: float) -> None:
        self.module.dropout = value


@dataclass(frozen=True, eq=False)
class BlockSpec:
    """One decoder block."""

    attention: AttentionSpec
    attention_norm: nn.Module
    cross: AttentionSpec
    cross_norm: nn.Module
    ffn: FeedForwardSpec
    ffn_norm: nn.Module
    pre_norm: bool = False
    """Whether the norms stand before attention and FFN, inside the residual branches, instead of behind them."""

    @property
    def token_macs(self) -> int:
        """Multiply-adds of each token: own query and output, query and output of the cross-attention, FFN."""
        linears = (self.attention.query, self.attention.output, self.cross.query, self.cross.output)
        return sum(linear.weight.numel() for linear in linears) + self.ffn.macs

    @property
    def key_macs(self) -> int:
        """Multiply-adds of each token whose own keys and values are made."""
        return self.attention.key.weight.numel() + self.attention.value.weight.numel()

    @property
    def source_macs(self) -> int:
        """Multiply-adds of each token of the source whose keys and values are made."""
        return self.cross.key.weight.numel() + self.cross.value.weight.numel()


class EncoderDecoder(Backbone):
    """A Hugging Face …ForConditionalGeneration (or MarianMTModel). As a `Backbone` it is the encoder, with no head."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        if not hasattr(model, "lm_head"):
            raise StrettoError(
                f"Expected an encoder-decoder that writes texts, got a {type(model).__name__}. "
                "Load it with AutoModelForSeq2SeqLM."
            )
        self.blocks: list[Any] = self.list_blocks()
        self.block_specs = [self.block_spec(block) for block in self.blocks]
        self.n_blocks = len(self.blocks)
        self.lm_head: nn.Linear = model.lm_head
        self.vocabulary = int(self.lm_head.out_features)

    def make_head(self) -> Head:
        return MeanOfRows(self.classify)  # of the encoder alone: it answers nothing, and costs nothing

    def head_modules(self) -> list[nn.Module]:
        return []

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled.new_zeros(len(pooled), self.n_labels)  # the decoder reads all rows, and answers

    # ---- the decoder

    @abstractmethod
    def list_blocks(self) -> list[Any]:
        """The decoder's blocks in the order they run."""

    @abstractmethod
    def block_spec(self, block: Any) -> BlockSpec:
        """What a block is made of; `block` is one of `list_blocks`."""

    @abstractmethod
    def embed_texts(self, tokens: Tensor, position: int = 0) -> Tensor:
        """[B, T] tokens that stand at `position` and behind it -> [B, T, d], with dropout in training."""

    def decoder_bias(self, length: int) -> Tensor | None:
        """[heads, length] added to the attention scores of the token at position length - 1, for each position up to
        its own."""
        return None

    def for_output(self, rows: Tensor) -> Tensor:
        """Rows behind their last block as the output head reads them: […, d] -> […, d]."""
        return rows

    @property
    def head_bias(self) -> Tensor | None:
        """[V] added to the logits of the output head."""
        return None

    @property
    def most_positions(self) -> int | None:
        """The longest text, in tokens and with its start token, that the decoder has positions for; None: any."""
        return None

    @abstractmethod
    def run_block(self, number: int, hidden: Tensor, source: Tensor, causal: Tensor, source_mask: Tensor) -> Tensor:
        """Block `number` by Hugging Face's own module, for training: [B, T, d] and the source's [B, S, d] -> [B, T, d].

        Both masks are added to scores: [B, 1, T, T] and [B, 1, 1, S]; `decoder_bias` is added here."""
