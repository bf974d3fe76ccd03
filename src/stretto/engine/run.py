"""The bookkeeping of one batch on its way through the layers; both engines keep their books here.

An engine computes hidden states in its own way (padded and masked, or packed) and asks the `Run` at the
three points of every layer what was decided. The run checks the decision, applies it to the
`State`, writes the `Trace` and collects the answers of the sequences that leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.decider import NOTHING, Decider, LayerExits, ask
from stretto.state import Decision, Inputs, Output, Point, State, Trace


def first_state(inputs: Inputs, dial: float | Tensor, order: Tensor | None = None, context: Any = None) -> State:
    """All tokens live. `order` says which sequences there are (default: all of them), as they stand."""
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
        ids=ids,
        row_ids=ids[sequence] * mask.shape[1] + position,  # row of a [B, T] table with column = position
        dial=dials[ids],
        lengths=lengths[ids],
        spent=torch.zeros_like(ids),
        input_notes=MappingProxyType(notes),
        context=context,
    )


class LayerExit:
    """The exit after one layer, run (and paid for) only as far as somebody asks."""

    def __init__(self, exits: LayerExits, layer: int, rows: Tensor, state: State) -> None:
        self.exits, self.layer, self.rows, self.state = exits, layer, rows, state

    @cached_property
    def pooled(self) -> Tensor:
        return self.exits.pool_rows(self.rows, self.state)

    @cached_property
    def logits(self) -> Tensor:
        self.state.spend(self.exits.macs)
        return self.exits(self.layer, self.pooled)

    @property
    def providers(self) -> dict[str, Callable[[], Tensor]]:
        return {"pooled": lambda: self.pooled, "exit_logits": lambda: self.logits}

    def answers(self, leaving: Tensor) -> Tensor:
        """[leaving, C]: what the decider saw, or computed now for the leaving sequences (indices) alone."""
        if "logits" in self.__dict__:
            return self.logits.index_select(0, leaving)
        self.state.spend(self.exits.macs, leaving)
        return self.exits(self.layer, self.pooled.index_select(0, leaving))


class Booked(NamedTuple):
    """What one layer did, for the trace. All tensors are [B], B the sequences that were alive."""

    layer: int
    ids: Tensor
    n_query: Tensor
    n_key: Tensor
    n_ffn: Tensor


class Run:
    """One batch, one decider."""

    def __init__(
        self,
        backbone: Backbone,
        decider: Decider,
        inputs: Inputs,
        state: State,
        *,
        exits: LayerExits | None = None,
        keep_hidden: bool = False,
        soft: bool = False,
    ) -> None:
        self.backbone, self.decider, self.soft = backbone, decider, soft
        self.exits = exits or decider.exits
        self.state = state
        """The sequences at hand: all of the batch, or those of one part after another."""
        batch, columns = inputs.input_ids.shape
        self.trace = Trace.empty(inputs.attention_mask.sum(dim=1), backbone.n_layers)
        self.trace.decider_macs += self.trace.lengths * backbone.embedding_macs
        weight = backbone.specs[0].attention.query.weight
        self.answers_tokens = backbone.token_head is not None
        shape = (batch, columns) if self.answers_tokens else (batch,)
        self.logits = weight.new_zeros(*shape, backbone.n_labels)
        self.shelf = weight.new_zeros(batch * columns, backbone.d) if keep_hidden or self.answers_tokens else None
        self.booked: list[Booked] = []

    @property
    def finished(self) -> bool:
        return self.state.n_sequences == 0

    def listens(self, point: Point) -> bool:
        """Whether anything is decided at this point (if not, the engine need not prepare a state)."""
        return point in self.decider.points

    def ask(self, point: Point, layer: int, rows: Tensor, **providers: Callable[[], Tensor]) -> Decision:
        """The decider's checked decision. `rows` is [N, d]; `layer` counts from 1."""
        if not self.listens(point):
            return NOTHING
        state = self.state
        state.point, state.layer, state.rows = point, layer, rows
        state.providers = dict(providers)
        decision = ask(self.decider, state)
        state.providers = {}  # they hold the rows, and the state: a circle that would keep both from being freed
        decision.check(state, soft=self.soft)
        return decision

    def drop(self, decision: Decision, rows: Tensor) -> Tensor | None:
        """[N] bool, True for rows that stay; None if all do. Those of `rows` [N, d] that go are kept to be restored."""
        if decision.drop is None:
            return None
        dropped = decision.drop & ~self.state.protected
        if not bool(dropped.any()):
            return None
        if self.decider.restore or self.answers_tokens:
            self._shelve(dropped, self.backbone.for_head(rows))
        return ~dropped

    def freeze(self, decision: Decision) -> None:
        if decision.freeze is not None:
            self.state.frozen = self.state.frozen | decision.freeze
            self.state.any_frozen = bool(self.state.frozen.any())

    def gate(self, decision: Decision) -> None:
        """Said before every layer anew: a layer nobody gates has no gate."""
        self.state.gate = decision.gate

    def all_frozen(self) -> Tensor | None:
        """Indices of the sequences in which nothing will change any more, or None if there are none."""
        if not self.state.any_frozen:
            return None
        active = (~self.state.frozen).double()
        still = torch.bincount(self.state.sequence, weights=active, minlength=self.state.n_sequences)
        done = (still == 0).nonzero().squeeze(1)
        return done if len(done) else None

    def count(self, layer: int, n_query: Tensor, n_ffn: Tensor) -> None:
        """Book one layer's rows (all [B]); keys are all live rows."""
        self.book(layer, n_query, self.state.lengths, n_ffn)

    def book(self, layer: int, n_query: Tensor, n_key: Tensor, n_ffn: Tensor) -> None:
        """`count` with keys of one's own. The trace is written in the end, all at once: small writes take time."""
        self.booked.append(Booked(layer, self.state.ids, n_query, n_key, n_ffn))

    def leave(self, leaving: Tensor, rows: Tensor, logits: Tensor | None = None) -> Tensor:
        """Sequences `leaving` (indices) are answered by `logits` ([leaving, C]), or by the final head if None.

        Returns the indices of the rows that stay."""
        return self.answer(leaving, self.backbone.for_head(rows), logits)

    def answer(self, leaving: Tensor, rows: Tensor, logits: Tensor | None = None) -> Tensor:
        """`leave` with rows as the head reads them."""
        ids = self.state.ids.index_select(0, leaving)
        if logits is None and not self.answers_tokens:  # tokens are answered in the end, all together
            logits = self._final_answers(leaving, rows)
        if logits is not None:
            self.logits = self.logits.index_copy(0, ids, logits.to(self.logits.dtype))
        self.trace.decider_macs.index_add_(0, ids, self.state.spent.index_select(0, leaving))
        if self.shelf is not None:
            gone = torch.zeros_like(self.state.ids, dtype=torch.bool).index_fill_(0, leaving, True)
            self._shelve(gone.index_select(0, self.state.sequence), rows)
        return self.state.forget_sequences(leaving)

    def _final_answers(self, leaving: Tensor, rows: Tensor) -> Tensor:
        """[leaving, C] from the model's own head, or from the decider's for the sequences that it answers."""
        state, head, theirs = self.state, self.decider.own_head(), self.backbone.head_macs
        first = state.starts.index_select(0, leaving)
        answered = None if head is None else head.answers(state)  # [B]
        mine = None if answered is None else answered.index_select(0, leaving)
        if head is None or mine is None or not bool(mine.any()):
            state.spend(theirs, leaving)
            return self.backbone.classify(rows.index_select(0, first))
        state.spend(torch.where(mine, head.macs, theirs), leaving)
        logits = self.logits.new_zeros(len(mine), self.backbone.n_labels)
        logits[mine] = head(head.pool_rows(rows, state)[leaving[mine]]).to(logits.dtype)
        if not bool(mine.all()):
            logits[~mine] = self.backbone.classify(rows[first[~mine]]).to(logits.dtype)
        return logits

    def after(self, layer: int, rows: Tensor) -> Tensor | None:
        """Exits after `layer`. Returns the indices of the rows that stay, or None if all do."""
        state = self.state
        if layer == self.backbone.n_layers:
            return self.leave(torch.arange(state.n_sequences, device=rows.device), rows)
        exit_here = None if self.exits is None else LayerExit(self.exits, layer, rows, state)
        exit = self.ask("after", layer, rows, **(exit_here.providers if exit_here else {})).exit
        leaving = None if exit is None else exit.nonzero().squeeze(1)
        if leaving is None or not len(leaving):
            return None
        return self.leave(leaving, rows, None if exit_here is None else exit_here.answers(leaving))

    def output(self) -> Output:
        self._write_trace()
        if self.answers_tokens:
            assert self.shelf is not None
            self.trace.decider_macs += self.trace.lengths * self.backbone.head_macs
            columns = torch.arange(self.logits.shape[1], device=self.shelf.device)
            there = (columns < self.trace.lengths.unsqueeze(1)).flatten().nonzero().squeeze(1)  # column = position
            answers = self.backbone.label_tokens(self.shelf[there])
            self.logits.view(-1, self.backbone.n_labels)[there] = answers.to(self.logits.dtype)
        hidden = None if self.shelf is None else self.shelf.view(len(self.trace.lengths), -1, self.backbone.d)
        return Output(self.logits, self.trace, hidden)

    def _write_trace(self) -> None:
        if not self.booked:
            return
        sizes = [len(entry.ids) for entry in self.booked]
        ids = torch.cat([entry.ids for entry in self.booked])
        layers = torch.tensor([entry.layer for entry in self.booked], device=ids.device)
        column = layers.repeat_interleave(torch.tensor(sizes, device=ids.device)) - 1
        for name in ("n_query", "n_key", "n_ffn"):
            getattr(self.trace, name)[ids, column] = torch.cat([getattr(entry, name) for entry in self.booked])

    def _shelve(self, which: Tensor, rows: Tensor) -> None:
        """Set rows aside, as the head reads them."""
        if self.shelf is not None:
            self.shelf[self.state.row_ids[which]] = rows[which].to(self.shelf.dtype)  # autocast may have made it narrow
