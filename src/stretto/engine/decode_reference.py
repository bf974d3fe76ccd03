"""The decoder on Hugging Face's own modules, whole texts at once: for training, and as the oracle of the engine.

Tokens are given (teacher forcing), so the state of every token after every block is known. B texts of T tokens, S
columns of source, N blocks, V the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones.decoder import EncoderDecoder


@dataclass(frozen=True)
class Given:
    """Texts and what they are translated from."""

    source: Tensor
    """[B, S, d] the encoder's last states."""
    source_mask: Tensor
    """[B, S]"""
    tokens: Tensor
    """[B, T] the start token and all but the last of the text, padded on the right."""

    @classmethod
    def from_labels(cls, source: Tensor, source_mask: Tensor, labels: Tensor, config: Any) -> Given:
        """[B, T] the tokens of right texts (negative where there is none): each is predicted from those before it."""
        shifted = labels.new_full(labels.shape, config.decoder_start_token_id)
        shifted[:, 1:] = labels[:, :-1]
        return cls(source, source_mask, shifted.masked_fill(shifted < 0, config.pad_token_id))

    def repeated(self, times: int) -> Given:
        """The batch several times, one after another."""
        return Given(*(part.repeat(times, *[1] * (part.dim() - 1)) for part in vars(self).values()))


class DecoderReference:
    def __init__(self, backbone: EncoderDecoder) -> None:
        self.backbone = backbone

    def states(self, given: Given) -> list[Tensor]:
        """N tensors [B, T, d]: after each block, with every token at that depth."""
        found, hidden = [], self.backbone.embed_texts(given.tokens)
        for number in range(self.backbone.n_blocks):
            hidden = self._block(number, hidden, given)
            found.append(hidden)
        return found

    def states_at(self, given: Given, exits: Tensor) -> Tensor:
        """[B, T, d]: the state of each token after the block where it leaves, `exits` ([B, T], from 1). Above that
        block its state is copied: that is what deeper tokens see."""
        hidden = self.backbone.embed_texts(given.tokens)
        for number in range(self.backbone.n_blocks):
            goes_on = (exits > number).unsqueeze(2)
            hidden = torch.where(goes_on, self._block(number, hidden, given), hidden)
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """[…, d] -> […, V]"""
        return F.linear(self.backbone.for_output(states), self.backbone.lm_head.weight, self.backbone.head_bias)

    def _block(self, number: int, hidden: Tensor, given: Given) -> Tensor:
        length, lowest = hidden.shape[1], torch.finfo(hidden.dtype).min
        future = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        causal = hidden.new_zeros(1, 1, length, length).masked_fill(future, lowest)
        padding = hidden.new_zeros(given.source_mask.shape).masked_fill(given.source_mask == 0, lowest)
        return self.backbone.run_block(number, hidden, given.source, causal, padding[:, None, None, :])
