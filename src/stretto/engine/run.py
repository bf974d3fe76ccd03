"""The bookkeeping of sequences on their way through the layers, for both engines.

An engine computes hidden states in its own way (padded and masked, or packed) and asks the `Run` at the
three points of every layer what was decided. The run checks the decision, applies it to the `State`, counts what was
executed and collects the answers of the sequences that leave. New sequences may enter at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.books import Books, Ring
from stretto.engine.decider import NOTHING, Decider, LayerExits, ask
from stretto.state import Decision, Inputs, Output, Point, State


class Numbers(NamedTuple):
    """Where the numbers of a batch's sequences and of its rows start."""

    id: int
    row: int


START = Numbers(0, 0)


def first_state(
    inputs: Inputs, dial: float | Tensor, order: Tensor | None = None, context: Any = None, first: Numbers = START
) -> State:
    """The state of new sequences, all tokens live. `order` lists the sequences of the batch to take (default: all, in
    their order); `first` holds the first free numbers, as earlier sequences use those below."""
    mask = inputs.attention_mask.bool()
    ids = torch.arange(len(mask), device=mask.device) if order is None else order
    sequence, column = mask[ids].nonzero(as_tuple=True)
    position = inputs.positions[ids[sequence], column]
    protected = position == 0
    if inputs.protected is not None:
        protected = protected | inputs.protected[ids[sequence], column]
    lengths = mask.sum(dim=1)
    notes = {name: note[ids[sequence], column] for name, note in inputs.notes.items()}
    dials = torch.as_tensor(dial, dtype=torch.float64, device=mask.device).expand(len(mask))
    return State(
        layer=0,
        point="before",
        rows=torch.empty(0),
        sequence=sequence,
        position=position,
        frozen=torch.zeros_like(sequence, dtype=torch.bool),
        protected=protected,
        ids=ids + first.id,
        row_ids=first.row + ids[sequence] * mask.shape[1] + position,  # in a [B, T] table with column = position
        dial=dials[ids],
        lengths=lengths[ids],
        decider_macs=torch.zeros_like(ids),
        input_notes=MappingProxyType(notes),
        context=context,
    )


class LayerExit:
    """The exit after one layer, run and counted only for the sequences that need it."""

    def __init__(self, exits: LayerExits, layer: int, rows: Tensor, state: State) -> None:
        self.exits, self.layer, self.rows, self.state = exits, layer, rows, state

    @cached_property
    def pooled(self) -> Tensor:
        return self.exits.pool_rows(self.rows, self.state)

    @cached_property
    def logits(self) -> Tensor:
        self.state.add_macs(self.exits.macs)
        return self.exits(self.layer, self.pooled)

    @property
    def providers(self) -> dict[str, Callable[[], Tensor]]:
        return {"pooled": lambda: self.pooled, "exit_logits": lambda: self.logits}

    def answers(self, leaving: Tensor) -> Tensor:
        """[leaving, C]: what the decider saw, or computed now for the leaving sequences (indices) alone."""
        if "logits" in self.__dict__:
            return self.logits.index_select(0, leaving)
        self.state.add_macs(self.exits.macs, leaving)
        return self.exits(self.layer, self.pooled.index_select(0, leaving))


class Departure(NamedTuple):
    """Sequences that have left together."""

    ids: Tensor
    """[k]"""
    logits: Tensor
    """[k, C]; where every token is answered [rows, C], all tokens of one sequence after another."""
    read: Tensor | None
    """[k, d] what the model's head read, or would have read; None unless it is kept (see `Output.read`)."""


def in_order(rows: Tensor, numbers: Tensor, count: int) -> Tensor:
    """[M, …] rows with their numbers ([M], below `count`) -> [count, …], zeros where there is no row."""
    return rows.new_zeros(count, rows.shape[1]).index_copy(0, numbers, rows)


class Run:
    """The live sequences and one decider. They are described by one `State`, or by one per part."""

    def __init__(
        self,
        backbone: Backbone,
        decider: Decider,
        *,
        exits: LayerExits | None = None,
        keep_hidden: bool = False,
        soft: bool = False,
    ) -> None:
        self.backbone, self.decider, self.soft = backbone, decider, soft
        self.exits = exits or decider.exits
        self.head = backbone.head
        weight = backbone.specs[0].attention.query.weight
        self.dtype = weight.dtype
        self.books = Books(backbone.n_layers, weight.device)
        self.shelf: Ring | None = None
        """Rows by their number, as the head reads them, if they are needed after their sequence has moved on."""
        if keep_hidden or self.head.every_row:
            self.shelf = Ring(backbone.d, weight.dtype, weight.device)
        self.next = START
        self.departed: list[Departure] = []

    def enter(self, lengths: Tensor, columns: int) -> Numbers:
        """New sequences of so many tokens ([B]); their rows are numbered as in a table [B, columns]."""
        first, rows = self.next, len(lengths) * columns
        first_rows = first.row + columns * torch.arange(len(lengths), device=lengths.device)
        self.books.enter(lengths, first_rows, lengths * self.backbone.embedding_macs)
        if self.shelf is not None:
            self.shelf.reserve(rows)
        self.next = Numbers(first.id + len(lengths), first.row + rows)
        return first

    def forget_before(self, id: int) -> None:
        """Sequences before `id` are no longer needed."""
        if self.shelf is not None:
            self.shelf.first = self.books.first_row(id) if id < self.next.id else self.next.row
        self.books.ring.first = id

    def listens(self, point: Point) -> bool:
        """Whether anything is decided at this point (if not, the engine need not prepare a state)."""
        return point in self.decider.points

    def ask(self, state: State, point: Point, layer: int, rows: Tensor, **providers: Callable[[], Tensor]) -> Decision:
        """The decider's checked decision. `rows` is [N, d]; `layer` counts from 1."""
        if not self.listens(point):
            return NOTHING
        state.point, state.layer, state.rows = point, layer, rows
        state.providers = dict(providers)
        decision = ask(self.decider, state)
        state.providers = {}  # they refer to the rows and the state: a reference cycle would keep both in memory
        decision.check(state, soft=self.soft)
        return decision

    def drop(self, state: State, decision: Decision, rows: Tensor) -> Tensor | None:
        """[N] bool, True for rows that stay; None if all do. Those of `rows` [N, d] that go are kept to be restored."""
        if decision.drop is None:
            return None
        dropped = decision.drop & ~state.protected
        if not bool(dropped.any()):
            return None
        if self.shelf is not None and (self.decider.restore or self.head.every_row):
            self.shelf.put(state.row_ids[dropped], self.backbone.for_head(rows)[dropped])
        return ~dropped

    def freeze(self, state: State, decision: Decision) -> None:
        if decision.freeze is not None:
            state.frozen = state.frozen | decision.freeze
            state.any_frozen = bool(state.frozen.any())

    def gate(self, state: State, decision: Decision) -> None:
        """Set before every layer: a layer without a decision has no gate and is not skipped."""
        state.gate = decision.gate
        state.skip = decision.skip if decision.skip is not None and bool(decision.skip.any()) else None

    def all_frozen(self, state: State) -> Tensor | None:
        """Indices of the sequences in which nothing will change any more, or None if there are none."""
        if not state.any_frozen:
            return None
        active = (~state.frozen).double()
        still = torch.bincount(state.sequence, weights=active, minlength=state.n_sequences)
        done = (still == 0).nonzero().squeeze(1)
        return done if len(done) else None

    def first_row_alone(self, state: State, layer: int) -> Tensor | None:
        """[B] bool: sequences where only position 0 is read after this layer. None: there is none, or the other rows
        are kept. Before the last layer it is not yet known which sequences will leave."""
        if layer < self.backbone.n_layers or not self.head.first_row or self.shelf is not None:
            return None
        own = self.decider.own_head()
        alone = torch.ones_like(state.ids, dtype=torch.bool) if own is None else ~own.answers(state)
        return alone if own is None or bool(alone.any()) else None

    def freeze_unread(self, state: State, layer: int) -> None:
        """In the last layer, rows that the head does not read are keys and values, but are not updated."""
        alone = self.first_row_alone(state, layer)
        if alone is not None:
            state.frozen = state.frozen | (state.position > 0) & alone[state.sequence]
            state.any_frozen = True

    def count(self, state: State, layer: int, n_query: Tensor, n_ffn: Tensor, skipped: Tensor | None) -> None:
        """Count one layer's rows, and the pairs that a window let it skip (all [B]). Keys are all live rows of the
        sequences that do not skip the layer."""
        n_key = state.lengths if state.skip is None else state.lengths * ~state.skip
        self.books.count(layer, state.ids, n_query, n_key, n_ffn, skipped)

    def leave(self, state: State, leaving: Tensor, rows: Tensor, logits: Tensor | None = None) -> Tensor:
        """Sequences `leaving` (indices) are answered by `logits` ([leaving, C]), or by the final head if None.

        Returns the indices of the rows that stay."""
        return self.answer(state, leaving, self.backbone.for_head(rows), logits)

    def answer(self, state: State, leaving: Tensor, rows: Tensor, logits: Tensor | None = None) -> Tensor:
        """`leave` with rows as the head reads them."""
        ids = state.ids.index_select(0, leaving)
        if self.shelf is not None:
            gone = torch.zeros_like(state.ids, dtype=torch.bool).index_fill_(0, leaving, True)
            gone = gone.index_select(0, state.sequence)
            self.shelf.put(state.row_ids[gone], rows[gone])
        read = None
        if not self.head.every_row and (logits is None or self.shelf is not None):
            read = self.head.pool_rows(rows, state).index_select(0, leaving)
        if logits is None:
            logits = self._token_answers(state, leaving) if read is None else self._answers(state, leaving, rows, read)
        self.books.add_macs(ids, state.decider_macs.index_select(0, leaving))
        self.departed.append(Departure(ids, logits.to(self.dtype), None if self.shelf is None else read))
        return state.forget_sequences(leaving)

    def _token_answers(self, state: State, leaving: Tensor) -> Tensor:
        """[rows, C] for all tokens of these sequences, dropped ones too."""
        assert self.shelf is not None
        ids = state.ids.index_select(0, leaving)
        state.add_macs(self.head.macs_of(self.books.lengths(ids)), leaving)
        return self.head(self.shelf.get(self.books.row_ids(ids)))

    def _answers(self, state: State, leaving: Tensor, rows: Tensor, read: Tensor) -> Tensor:
        """[leaving, C] from the model's head on `read` ([leaving, d]), or from the decider's for those it answers."""
        own = self.decider.own_head()
        answered = None if own is None else own.answers(state)  # [B]
        mine = None if answered is None else answered.index_select(0, leaving)
        if own is None or mine is None or not bool(mine.any()):
            state.add_macs(self.head.macs, leaving)
            return self.head(read)
        state.add_macs(torch.where(mine, own.macs, self.head.macs), leaving)
        logits = rows.new_zeros(len(mine), self.backbone.n_labels, dtype=self.dtype)
        logits[mine] = own(own.pool_rows(rows, state)[leaving[mine]]).to(self.dtype)
        if not bool(mine.all()):
            logits[~mine] = self.head(read[~mine]).to(self.dtype)
        return logits

    def after(self, state: State, layer: int, rows: Tensor) -> Tensor | None:
        """Exits after `layer`. Returns the indices of the rows that stay, or None if all do."""
        if layer == self.backbone.n_layers:
            return self.leave(state, torch.arange(state.n_sequences, device=rows.device), rows)
        exit_here = None if self.exits is None else LayerExit(self.exits, layer, rows, state)
        exit = self.ask(state, "after", layer, rows, **(exit_here.providers if exit_here else {})).exit
        leaving = None if exit is None else exit.nonzero().squeeze(1)
        if leaving is None or not len(leaving):
            return None
        return self.leave(state, leaving, rows, None if exit_here is None else exit_here.answers(leaving))

    def output(self, batch: int, columns: int) -> Output:
        """The answers of a batch that entered first and has left. None of them may have been returned before."""
        ids = torch.cat([left.ids for left in self.departed])
        answers = torch.cat([left.logits for left in self.departed])
        if self.head.every_row:
            logits = in_order(answers, self.books.row_ids(ids), batch * columns).view(batch, columns, -1)
        else:
            logits = in_order(answers, ids, batch)
        reads = [left.read for left in self.departed if left.read is not None]
        hidden = None if self.shelf is None else self.shelf.table.view(batch, columns, -1)
        trace = self.books.trace(torch.arange(batch, device=ids.device))
        return Output(logits, trace, hidden, in_order(torch.cat(reads), ids, batch) if reads else None)
