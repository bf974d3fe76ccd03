"""Parts of a batch: what goes through a layer at once.

A large batch is computed in parts, and all of them go through one layer before any goes through the next. Where
sequences leave or lose tokens the parts shrink, and matrix products on few rows run at a lower rate. So neighbouring
parts are joined, up to the size of the largest matrix in the first layer, or `TALL`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.errors import StrettoError
from stretto.state import Notes, State

#: Rows up to which parts are always joined: work per part (not per row) is then done less often, and the matrices still
#: fit the cache.
TALL = 1536


@dataclass
class Part:
    """Sequences that are computed together."""

    state: State
    matrix: Tensor
    """[≥ N, d]: the live rows, and a few unused ones (`round_up`)."""

    def can_join(self, other: Part) -> bool:
        """A decider may keep notes on some sequences only (for example by their dial): these stay separate."""
        return self.state.note_names == other.state.note_names


def round_up(rows: int) -> int:
    """Rows the matrix gets. A oneDNN kernel is built once per shape (~0.5 ms): ever-new shapes would cost more."""
    step = 8 if rows <= 256 else 32
    return -(-max(rows, 1) // step) * step


def take(matrix: Tensor, index: Tensor) -> Tensor:
    """The indexed rows, rounded up; the content of the surplus rows is never read (but must be finite)."""
    missing = round_up(len(index)) - len(index)
    return matrix.index_select(0, F.pad(index, (0, missing)) if missing else index)


def rounded(matrix: Tensor) -> Tensor:
    """The matrix with rows of zeros behind it, rounded up."""
    missing = round_up(len(matrix)) - len(matrix)
    return F.pad(matrix, (0, 0, 0, missing)) if missing else matrix


def check_batch_size(batch_size: int) -> None:
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise StrettoError(f"Expected a batch_size of 1 or more, got {batch_size!r}. Try 32.")


def cut(lengths: Tensor, batch_size: int | None) -> list[Tensor]:
    """[B] tokens of each sequence -> the sequences of each part (indices), `batch_size` of them as they come (None: all
    in one part), the shortest first: attention takes those of nearly equal length in one call."""
    batch_size = len(lengths) if batch_size is None else batch_size
    check_batch_size(batch_size)
    together = torch.arange(len(lengths), device=lengths.device).split(batch_size)
    return [which[lengths[which].argsort(stable=True)] for which in together]


def joined(parts: Sequence[Part]) -> Part:
    """Join several parts; the shortest sequences come first again."""
    state = State.join([part.state for part in parts])
    rows = torch.cat([part.matrix[: part.state.n_rows] for part in parts])
    return Part(state, take(rows, state.sort_by_length()))


def only(part: Part, which: Tensor) -> Part:
    """A new part with the sequences where `which` ([B] bool) is True; this one is not changed."""
    own = {who: Notes(dict(notes.sequences), dict(notes.rows)) for who, notes in part.state.notes.items()}
    state = replace(part.state, notes=own)
    return Part(state, take(part.matrix, state.forget_sequences((~which).nonzero().squeeze(1))))


def merged(parts: Sequence[Part], most_rows: int) -> list[Part]:
    """The same sequences in fewer parts where `most_rows` in each allow it, neighbours with neighbours."""
    groups: list[list[Part]] = []
    rows = 0  # of the last group
    for part in parts:
        rows += part.state.n_rows
        if groups and rows <= most_rows and groups[-1][0].can_join(part):
            groups[-1].append(part)
        else:
            groups.append([part])
            rows = part.state.n_rows
    return [group[0] if len(group) == 1 else joined(group) for group in groups]
