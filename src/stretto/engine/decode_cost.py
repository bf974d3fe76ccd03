"""What a decoder executed, and its FLOPs.

Per sentence and block, in multiply-adds (d hidden size, w width of all heads, f size of the FFN):

    tokens · (4 d w + 2 d f)           own query and output; query and output of the attention to the source; FFN
    + projected · 2 d w                own keys and values: of tokens that came here, and of those that had left below
    + source · 2 d w                   keys and values of the source, once
    + 2 w (pairs + tokens · n_source)  scores and weighted sums, own and to the source

and the output head, d V for every state it read, whoever asked. Deciders add theirs. FLOPs are twice the multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.backbones.decoder import EncoderDecoder
from stretto.state import Stack


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

    @staticmethod
    def concatenate(traces: list[DecoderTrace]) -> DecoderTrace:
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


def decoder_flops(trace: DecoderTrace, backbone: EncoderDecoder) -> Tensor:
    """[S] FLOPs executed for each sentence by the decoder, its deciders and the output head."""
    specs, device = backbone.block_specs, trace.tokens.device
    token, key, source, own, cross = torch.tensor(
        [(s.token_macs, s.key_macs, s.source_macs, 2 * s.attention.width, 2 * s.cross.width) for s in specs],
        device=device,
    ).unbind(dim=1)  # [N] each
    blocks = token * trace.tokens + key * trace.projected + source * trace.source
    attention = own * trace.pairs + cross * trace.tokens * trace.lengths.unsqueeze(1)
    head = trace.heads * backbone.lm_head.weight.numel()
    return 2 * ((blocks + attention).sum(dim=1) + head + trace.decider_macs)
