"""What a decoder wrote (`Text`), and what it took (`DecoderTrace`; `stretto.engine.decode_cost` has the FLOPs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.state import Stack, Trace


@dataclass(frozen=True)
class Text:
    """What was written for one sentence."""

    tokens: list[int]
    """Without the start token; the end token, if it came, included."""
    score: float | None
    """Log-probability of the text; of beam search divided by its length, as the length penalty says. None: not kept."""
    exits: list[int]
    """The block at which each token left."""
    text: str = ""
    """The tokens as text, once a tokenizer has read them."""

    @property
    def average_exit(self) -> float:
        return sum(self.exits) / len(self.exits)


@dataclass
class DecoderTrace:
    """Per sentence (S) and block (N), over all steps; a row is a sentence or one of its beams."""

    stack: ClassVar[Stack] = "decoder"
    lengths: Tensor
    """[S] tokens of the source."""
    beams: int
    steps: Tensor
    """[S] tokens that each of its rows was taken through the decoder for."""
    tokens: Tensor
    """[S, N] tokens computed."""
    pairs: Tensor
    """[S, N] pairs of such a token and a token before it, or itself."""
    projected: Tensor
    """[S, N] tokens whose keys and values were made."""
    source: Tensor
    """[S, N] tokens of the source whose keys and values were made."""
    heads: Tensor
    """[S] states the output head read."""
    decider_macs: Tensor
    """[S] multiply-adds of deciders."""

    @classmethod
    def empty(cls, lengths: Tensor, n_blocks: int, beams: int) -> DecoderTrace:
        def zeros(*more: int) -> Tensor:
            return torch.zeros(len(lengths), *more, dtype=torch.long, device=lengths.device)

        return cls(
            lengths,
            beams,
            zeros(),
            zeros(n_blocks),
            zeros(n_blocks),
            zeros(n_blocks),
            zeros(n_blocks),
            zeros(),
            zeros(),
        )

    def count(self, sentences: Tensor, exits: Tensor, position: int) -> None:
        """A step: [R] the sentence of each row and the block it left at."""
        blocks = torch.arange(1, self.tokens.shape[1] + 1, device=exits.device)
        through = (exits.unsqueeze(1) >= blocks).long()  # [R, N]
        self.tokens.index_add_(0, sentences, through)
        self.projected.index_add_(0, sentences, through)
        self.pairs.index_add_(0, sentences, through * (position + 1))
        self.steps[sentences] = position + 1

    def count_missing(self, block: int, sentences: Tensor) -> None:
        """Keys and values made for tokens that had left below a block (from 0): [P] the sentence of each."""
        self.projected[:, block].index_add_(0, sentences, torch.ones_like(sentences))

    def count_heads(self, sentences: Tensor) -> None:
        """[R] the sentence of each state that the output head reads."""
        self.heads.index_add_(0, sentences, torch.ones_like(sentences))

    def take(self, sentences: Tensor) -> DecoderTrace:
        """These sentences, in this order."""
        values = {name: value if name == "beams" else value[sentences] for name, value in vars(self).items()}
        return DecoderTrace(**values)

    @staticmethod
    def concatenate(traces: Sequence[DecoderTrace]) -> DecoderTrace:
        """Several runs with the same number of beams."""
        names = [name for name in vars(traces[0]) if name != "beams"]
        joined = {name: torch.cat([getattr(trace, name) for trace in traces]) for name in names}
        return DecoderTrace(beams=traces[0].beams, **joined)

    def at_full_depth(self) -> DecoderTrace:
        """The same texts with no token leaving and no decider."""
        n_blocks, rows = self.tokens.shape[1], self.steps * self.beams
        every = rows.unsqueeze(1).expand(-1, n_blocks)
        pairs = (rows * (self.steps + 1) // 2).unsqueeze(1).expand(-1, n_blocks)
        source = self.lengths.unsqueeze(1).expand(-1, n_blocks)
        return DecoderTrace(
            self.lengths, self.beams, self.steps, every, pairs, every, source, rows, torch.zeros_like(rows)
        )


@dataclass
class TextTrace:
    """What an encoder–decoder executed for each sentence."""

    encoder: Trace
    decoder: DecoderTrace

    @property
    def lengths(self) -> Tensor:
        """[S] tokens that came in."""
        return self.encoder.lengths

    @property
    def depth(self) -> Tensor:
        """[S] the average exit: decoder blocks that a token went through."""
        rows = self.decoder.steps * self.decoder.beams
        return self.decoder.tokens.sum(dim=1) / rows.clamp(min=1)

    def one(self, index: int) -> TextTrace:
        """That of a single sentence."""
        return TextTrace(self.encoder.one(index), self.decoder.take(torch.tensor([index])))

    @staticmethod
    def concatenate(traces: Sequence[TextTrace]) -> TextTrace:
        decoders = DecoderTrace.concatenate([trace.decoder for trace in traces])
        return TextTrace(Trace.concatenate([trace.encoder for trace in traces]), decoders)


@dataclass
class Written:
    """What an engine returns for a batch of sentences."""

    texts: list[Text]
    trace: TextTrace
