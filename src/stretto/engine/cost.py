"""From a trace to FLOPs: one formula for every method.

Per sequence and layer, in multiply-adds (d hidden size, w width of all heads, f size of the FFN):

    d w (n_query + n_ffn + 2 n_key)    projections: query; output; key and value
    + w n_key (n_query + n_ffn)        attention: scores; weighted sums
    - w skipped                        local windows
    + 2 d f n_ffn                      FFN (3 d f n_ffn if it is gated)
    + w r (n_query + n_key)            relative terms, if the attention has them: r rows of each table

`LayerSpec.macs` has the factors of each layer. A row that is dropped between attention and FFN has its scores computed
but no weighted sum and no output projection, so the two are counted separately. Where nothing is dropped there,
n_query = n_ffn and the formula is the usual one. Exits, predictors, the final head and narrow embeddings are added from
the trace. FLOPs are twice the multiply-adds.

Windows are counted as executed. Up to `SHORT` keys the packed engine computes all pairs of a query and a key, and masks
those that a local window hides: they count. In longer sequences it skips most hidden pairs (`stretto.engine.windows`);
the trace has their number. The full model, the denominator of `cost`, computes all pairs and masks them.

Where the model's head reads position 0 alone, the last layer has one query and one row in the FFN per sequence, and
keys and values of all rows. The same holds for the full model (`updated_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.backbones import Backbone, LayerSpec
from stretto.backbones.decoder import EncoderDecoder
from stretto.engine.decode_cost import decoder_flops
from stretto.engine.written import TextTrace
from stretto.state import Trace


def layer_macs(
    specs: Sequence[LayerSpec], n_query: Tensor, n_key: Tensor, n_ffn: Tensor, skipped: Tensor | int = 0
) -> Tensor:
    """Multiply-adds of each layer; the tensors are [B, L] (or [B, 1], if all layers have the same numbers)."""
    factors = torch.tensor([spec.macs for spec in specs], device=n_query.device)
    query, key, ffn, pair = factors.unbind(dim=1)  # [L] each
    return query * n_query + key * n_key + ffn * n_ffn + pair * (n_key * (n_query + n_ffn) - skipped)


def flops(trace: Trace, backbone: Backbone) -> Tensor:
    """[B] FLOPs executed for each sequence, deciders included."""
    layers = layer_macs(backbone.specs, trace.n_query, trace.n_key, trace.n_ffn, trace.skipped)
    return 2 * (layers.sum(dim=1) + trace.decider_macs)


def updated_rows(rows: Tensor, backbone: Backbone) -> Tensor:
    """[B, L] rows that reach each layer -> [B, L] rows that it updates, if the model's head answers and none is frozen:
    in the last layer only those that the head reads."""
    if not backbone.head.first_row:
        return rows
    return torch.cat([rows[:, :-1], rows[:, -1:].clamp(max=1)], dim=1)


def full_flops(lengths: Tensor, backbone: Backbone, *, every_row: bool = False) -> Tensor:
    """[B] FLOPs of the full model on unpadded sequences of these lengths ([B]), final head included.

    `every_row`: as Hugging Face computes it, whose last layer updates rows that its head does not read, too."""
    rows = lengths.unsqueeze(1).expand(-1, backbone.n_layers)
    updated = rows if every_row else updated_rows(rows, backbone)
    layers = layer_macs(backbone.specs, updated, rows, updated).sum(dim=1)
    return 2 * (layers + lengths * backbone.embedding_macs + backbone.head.macs_of(lengths))


@dataclass(frozen=True)
class Cost:
    """The FLOPs of a trace."""

    flops: Tensor
    """[B]"""
    full: Tensor
    """[B] FLOPs of the full model on the same sequences."""
    depth: Tensor
    """[B] layers run; for texts the average number of decoder blocks that a token went through."""

    @classmethod
    def of(cls, trace: Trace | TextTrace, backbone: Backbone) -> Cost:
        if isinstance(trace, Trace):
            return cls(flops(trace, backbone), full_flops(trace.lengths, backbone), trace.depth)
        assert isinstance(backbone, EncoderDecoder)
        executed = flops(trace.encoder, backbone) + decoder_flops(trace.decoder, backbone)
        full = full_flops(trace.lengths, backbone) + decoder_flops(trace.decoder.at_full_depth(), backbone)
        return cls(executed, full, trace.depth)

    def per_example(self, example_of: Tensor, count: int) -> Cost:
        """The cost of inputs split into several sequences: sums, and the greatest depth. `example_of` is [B]."""
        empty = torch.zeros(count, dtype=self.flops.dtype, device=self.flops.device)
        example_of = example_of.to(empty.device)
        return Cost(
            empty.index_add(0, example_of, self.flops),
            empty.index_add(0, example_of, self.full),
            empty.to(self.depth.dtype).scatter_reduce(0, example_of, self.depth, "amax"),
        )

    @property
    def per_sequence(self) -> Tensor:
        """[B] fraction of the full model's FLOPs."""
        return self.flops / self.full

    @property
    def total(self) -> float:
        """Fraction of the full model's FLOPs over all sequences together."""
        return float(self.flops.sum() / self.full.sum())

    @property
    def mean_depth(self) -> float:
        return float(self.depth.double().mean())
