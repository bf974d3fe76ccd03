"""Local attention over long sequences: which keys a stretch of queries is compared with.

Sequences of up to `SHORT` keys are compared with all of them, and what a window hides is masked: there is little to
save. Longer ones are split into stretches of up to `STRETCH` queries. A stretch is compared with the keys from the
start of its first query's window to the end of its last query's window. As rows are ordered by position, that is a
slice; hidden keys within it are masked. Skipped pairs are counted per sequence, independent of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.backbones import AttentionSpec
from stretto.engine.groups import SHORT

#: Queries of a stretch. Fewer skip more, but are more calls.
STRETCH = 64


@dataclass(frozen=True)
class Stretches:
    """Of all long sequences of a part, in order. All tensors are [S]."""

    sequence: Tensor
    q_start: Tensor
    q_end: Tensor
    """Query rows from q_start to before q_end, in the packed matrix of queries."""
    k_start: Tensor
    k_end: Tensor
    """The key rows they are compared with."""

    def skipped(self, spec: AttentionSpec, n_key: Tensor, fed: Tensor | None) -> Tensor:
        """[B] pairs of a query and a key that were not computed, for their scores and for their weighted sums.

        `n_key` is [B]; `fed` ([M] ascending) are the query rows that get weighted sums (None: all). If there are
        relative terms, keys in several stretches are multiplied with their table in each: this extra work is
        subtracted."""
        queries, keys = self.q_end - self.q_start, self.k_end - self.k_start
        summed = queries
        if fed is not None:
            summed = torch.searchsorted(fed, self.q_end) - torch.searchsorted(fed, self.q_start)
        saved = (n_key[self.sequence] - keys) * (queries + summed)
        total = torch.zeros_like(n_key)
        if spec.relative is not None:
            saved = saved - spec.relative.rows * keys
            total[self.sequence] = spec.relative.rows * n_key[self.sequence]
        return total.index_add(0, self.sequence, saved)


def stretches(
    spec: AttentionSpec, n_query: Tensor, n_key: Tensor, q_position: Tensor, k_position: Tensor
) -> Stretches | None:
    """[B], [B], [N_query], [N_key], of sequences one after another. None if nothing is skipped."""
    if spec.window is None or not bool((n_key > SHORT).any()):
        return None
    device, ends = n_key.device, n_query.cumsum(0)
    count = torch.where(n_key > SHORT, (n_query + STRETCH - 1) // STRETCH, 0)
    sequence = torch.arange(len(n_key), device=device).repeat_interleave(count)  # [S]
    within = torch.arange(len(sequence), device=device) - (count.cumsum(0) - count)[sequence]
    q_start = (ends - n_query)[sequence] + STRETCH * within
    q_end = torch.minimum(q_start + STRETCH, ends[sequence])
    # all positions of all sequences on one line, sequences farther apart than a window reaches
    apart = int(k_position.max()) + spec.window + 1
    line = torch.arange(len(n_key), device=device).repeat_interleave(n_key) * apart + k_position
    first, last = (sequence * apart + q_position[row] for row in (q_start, q_end - 1))
    k_start, k_end = torch.searchsorted(line, first - spec.window), torch.searchsorted(line, last + spec.window + 1)
    return Stretches(sequence, q_start, q_end, k_start, k_end)


def skipped_undisturbed(spec: AttentionSpec, n_query: Tensor, lengths: Tensor) -> Tensor | None:
    """[B] what is skipped of sequences of these lengths, whose first `n_query` ([B]) tokens are updated, if nothing is
    decided; None: nothing."""
    if spec.window is None:
        return None
    q_position, k_position = (
        torch.arange(int(count.sum()), device=count.device) - (count.cumsum(0) - count).repeat_interleave(count)
        for count in (n_query, lengths)
    )
    found = stretches(spec, n_query, lengths, q_position, k_position)
    return None if found is None else found.skipped(spec, lengths, None)
