"""What a decoder wrote (`Text`) and computed (`DecoderTrace`; `stretto.engine.decode_cost` has the FLOPs)."""

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
    """Log-probability of the text; with beam search divided by its length to the power of the length penalty. None: not
    kept."""
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
    """[S] steps of the decoder: the tokens that each of its rows has read."""
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


class Ledger:
    """Notes what the steps execute, and counts it at the end: counting at every step would take as long as a block."""

    def __init__(self, lengths: Tensor, n_blocks: int, beams: int) -> None:
        """`lengths` ([S]) are the sources'. Most other tensors are numbers of sentences, one for each thing done."""
        self.lengths, self.n_blocks, self.beams = lengths, n_blocks, beams
        self.steps: list[tuple[Tensor, Tensor]] = []
        self.projected: list[list[Tensor]] = [[] for _ in range(n_blocks)]
        self.sources: list[list[Tensor]] = [[] for _ in range(n_blocks)]
        self.heads: list[Tensor] = []
        self.decider_macs: list[tuple[Tensor, Tensor]] = []

    def step(self, sentences: Tensor, exits: Tensor) -> None:
        """A token of each row: [R] its sentence and the block it left at."""
        self.steps.append((sentences, exits))

    def project(self, block: int, sentences: Tensor) -> None:
        """Keys and values made in a block (from 0): [P] the sentence of each token."""
        self.projected[block].append(sentences)

    def project_source(self, block: int, sentences: Tensor) -> None:
        """Keys and values made of the whole sources of these sentences."""
        self.sources[block].append(sentences)

    def read(self, sentences: Tensor) -> None:
        """[R] the sentence of each state that the output head reads."""
        self.heads.append(sentences)

    def add_macs(self, sentences: Tensor, macs: Tensor) -> None:
        """[R] multiply-adds of deciders."""
        self.decider_macs.append((sentences, macs))

    def trace(self) -> DecoderTrace:
        rows = [len(sentences) for sentences, _ in self.steps]
        sentence, exits = self._pairs(self.steps)
        length = torch.arange(1, len(rows) + 1).repeat_interleave(torch.tensor(rows, dtype=torch.long)).to(exits)
        blocks = torch.arange(1, self.n_blocks + 1, device=exits.device)
        through = (exits.unsqueeze(1) >= blocks).long()  # [rows of all steps, N]
        sources = torch.stack([self._count(parts) for parts in self.sources], dim=1)
        return DecoderTrace(
            lengths=self.lengths,
            beams=self.beams,
            steps=self._count([sentence]) // self.beams,
            tokens=self._sum(sentence, through),
            pairs=self._sum(sentence, through * length.unsqueeze(1)),
            projected=torch.stack([self._count(parts) for parts in self.projected], dim=1),
            source=sources * self.lengths.unsqueeze(1),
            heads=self._count(self.heads),
            decider_macs=self._sum(*self._pairs(self.decider_macs)),
        )

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One after another; there may be none."""
        return torch.cat([self.lengths.new_zeros(0), *parts])

    def _pairs(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return self._joined([first for first, _ in pairs]), self._joined([second for _, second in pairs])

    def _count(self, parts: Sequence[Tensor]) -> Tensor:
        """[S] how often each sentence is named."""
        return torch.bincount(self._joined(parts), minlength=len(self.lengths))

    def _sum(self, sentence: Tensor, values: Tensor) -> Tensor:
        """[S, …] sums of [P, …] values by their sentences ([P])."""
        return values.new_zeros(len(self.lengths), *values.shape[1:]).index_add_(0, sentence, values)


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
        """The trace of one sentence."""
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
