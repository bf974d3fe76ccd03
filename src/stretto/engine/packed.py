"""The packed engine: the live rows of all live sequences in one [rows, d] matrix. Inference only.

Dropping a token is an index, an exit is a smaller matrix, freezing shrinks queries and FFN. There is no padding
between sequences but a little inside attention (`groups`); the matrix as a whole is rounded up (`parts.round_up`), so
that oneDNN meets few shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stretto.backbones import Backbone
from stretto.engine.decider import Decider, LayerExits
from stretto.engine.layer import PackedLayer
from stretto.engine.parts import Part, only, take
from stretto.engine.run import Run
from stretto.engine.stepping import Stepping
from stretto.state import Inputs, Output, State


def blank_tail(like: Tensor, rows: int, width: int) -> Tensor:
    """An uninitialised matrix, as tall as `like` and `width` wide, whose rows beyond `rows` are zero."""
    blank = like.new_empty(len(like), width)
    blank[rows:] = 0
    return blank


def count_by(sequence: Tensor, state: State) -> Tensor:
    """[B] how many of some rows, given by their sequence, belong to each sequence."""
    return torch.bincount(sequence, minlength=state.n_sequences)


def stamp(weights: Iterable[Tensor]) -> int:
    """A number that changes when a weight is written or replaced (except by fused optimizers)."""
    return hash(tuple((weight.data_ptr(), weight._version) for weight in weights))


def gate_of(state: State, rows: Tensor | None, like: Tensor) -> Tensor | None:
    """[M, 1] the gate of each of these rows' sequences (None: all rows), as long as the matrix `like`."""
    if state.gate is None:
        return None
    gates = state.gate.to(like)[state.sequence if rows is None else state.sequence[rows]]
    return F.pad(gates, (0, len(like) - len(gates)), value=1.0).unsqueeze(1)


class PackedEngine:
    def __init__(self, backbone: Backbone, dtype: str = "float32") -> None:
        self.backbone, self.dtype = backbone, dtype
        laid_out = {spec: PackedLayer(spec, dtype) for spec in set(backbone.specs)}  # ALBERT runs one many times
        self.layers = [laid_out[spec] for spec in backbone.specs]
        self._exits: tuple[object, int, LayerExits] | None = None

    @torch.inference_mode()
    def run(
        self, inputs: Inputs, decider: Decider, dial: float | Tensor, *,
        batch_size: int | None = None, keep_hidden: bool = False, context: Any = None,
    ) -> Output:  # fmt: skip
        """Logits and trace of all sequences. `batch_size` of them (default: all) are computed at once; where they are
        short, or little is left of them, those of several batches (see `parts`). `context` reaches the decider as
        `State.context`."""
        stepping = Stepping(self, decider, keep_hidden=keep_hidden, context=context)
        stepping.add(inputs, dial, batch_size=batch_size)
        while stepping.parts:
            stepping.advance()
        return stepping.run.output(*inputs.input_ids.shape)

    def through(self, run: Run, layer: int, part: Part) -> list[Part]:
        """Run one layer (from 1) for one part; return what is left of it, in two parts if only some sequences skip the
        layer."""
        part = Part(part.state, self._before(run, layer, part))
        skip = part.state.skip
        if skip is None or bool(skip.all()):
            return [self._after(run, layer, part)]
        return [self._after(run, layer, only(part, which)) for which in (skip, ~skip)]

    def _after(self, run: Run, layer: int, part: Part) -> Part:
        """The layer itself, unless it is skipped, and the exits after it."""
        state, rows = part.state, part.matrix
        if state.n_sequences:
            if state.skip is None or not bool(state.skip.all()):
                rows = self._layer(run, layer, part)
            stay = run.after(state, layer, rows[: state.n_rows])
            if stay is not None and state.n_sequences:
                rows = take(rows, stay)
        return Part(state, rows)

    def exits_of(self, decider: Decider) -> LayerExits | None:
        """Converted once, and again for other exits or after a weight has changed."""
        exits = decider.exits
        if exits is None:
            return None
        now = stamp(exits.parameters())
        if self._exits is None or self._exits[0] is not exits or self._exits[1] != now:
            self._exits = (exits, now, exits.packed())
        return self._exits[2]

    def embed(self, inputs: Inputs, state: State, first_id: int) -> Tensor:
        """[≥ N, d] the rows of the state of these inputs, numbered from `first_id` on."""
        sequence = state.ids[state.sequence] - first_id
        column = inputs.attention_mask.argmax(dim=1)[sequence] + state.position
        everything = torch.arange(state.n_rows, device=sequence.device)
        cells = [take(part, everything) for part in (sequence, column, state.position)]
        types = None if inputs.token_type_ids is None else inputs.token_type_ids[cells[0], cells[1]].unsqueeze(0)
        ids = inputs.input_ids[cells[0], cells[1]].unsqueeze(0)
        return self.backbone.embed(ids, types, cells[2].unsqueeze(0)).squeeze(0)

    def _before(self, run: Run, layer: int, part: Part) -> Tensor:
        state, rows = part.state, part.matrix
        if not run.listens("before"):
            run.freeze_unread(state, layer)
            return rows
        live = rows[: state.n_rows]
        decision = run.ask(state, "before", layer, live)
        keep = run.drop(state, decision, live)
        run.freeze(state, decision)
        run.freeze_unread(state, layer)
        run.gate(state, decision)
        if keep is not None:
            stay = state.select_rows(keep)
            rows = take(rows, stay[state.sort_by_length()])  # equal sizes together, as at the start
        if (done := run.all_frozen(state)) is not None:
            rows = take(rows, run.leave(state, done, rows[: state.n_rows]))
        return rows

    def _layer(self, run: Run, layer: int, part: Part) -> Tensor:
        """[M', d]: the rows that survive the layer."""
        state, rows, weights = part.state, part.matrix, self.layers[layer - 1]
        live = rows[: state.n_rows]
        updated = (~state.frozen).nonzero().squeeze(1) if state.any_frozen else None  # [N_query]; None: all rows
        n_query = state.lengths if updated is None else count_by(state.sequence[updated], state)
        attention, width = weights.attention(rows, state, updated, n_query), weights.spec.attention.width
        decision = run.ask(state, "between", layer, live, attention_received=attention.received)
        keep = run.drop(state, decision, live)

        if keep is None:
            kept, renewed, n_ffn = None, updated, n_query
            residual = rows if updated is None else take(rows, updated)
            context = blank_tail(residual, state.n_rows if updated is None else len(updated), width)
            attention.context(context)
        else:  # a row that goes now needs no weighted sum, no output projection and no FFN
            kept = (keep if updated is None else keep[updated]).nonzero().squeeze(1)  # among the query rows
            renewed = kept if updated is None else updated[kept]
            n_ffn = count_by(state.sequence[renewed], state)
            residual = take(rows, renewed)
            context = blank_tail(residual, len(renewed), width)
            attention.context_of(kept, context)
        run.count(state, layer, n_query, n_ffn, attention.skipped(state.lengths, kept))
        nothing_new = renewed is not None and len(renewed) == 0
        new = residual if nothing_new else weights.finish(context, residual, gate_of(state, renewed, residual))

        if updated is not None:  # frozen rows keep the state they have
            assert renewed is not None
            merged = rows.clone()
            merged[renewed] = new[: len(renewed)]
            return merged if keep is None else take(merged, state.select_rows(keep))
        if keep is not None:
            state.select_rows(keep)
        return new
