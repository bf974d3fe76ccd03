"""The newest tokens of all rows, while they go through the blocks of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.engine.decider import ask
from stretto.engine.decode_block import Live, PackedBlock, few, fill
from stretto.errors import StrettoError
from stretto.state import State, taken

if TYPE_CHECKING:
    from stretto.engine.decode import Writing


class Token:
    def __init__(self, writing: Writing, x: Tensor) -> None:
        rows = x.shape[0]
        self.writing = writing
        self.x = fill(x, few(rows))
        """[M, d]: the live rows, then a few unused rows."""
        self.live = Live(rows, None, None)
        self.numbers = writing.sentences
        """[R'] the number of each live row's sentence."""
        self.logits: Tensor | None = None  # [R, V], where a decider has asked for them and the row then left
        self.answered: Tensor | None = None  # [R]
        self.state: State | None = None

    def through(self, block: PackedBlock, bias: Tensor | None) -> None:
        """Run one block for the live rows; keys and values that it needs and that are missing are made first."""
        writing, memory, number = self.writing, self.writing.memory, block.number
        if (new := memory.source.new(number, self.live.sentences)) is not None:
            block.project_source(memory, writing.source, new)
            writing.ledger.project_source(number, writing.ids[new])
        missing = memory.missing(number, self.live.rows, self.live.n_rows)
        writing.ledger.project(number, self.numbers if missing is None else writing.sentences[missing[0]])
        self.x = block(self.x, self.live, memory, missing, bias)

    def keep(self) -> Tensor:
        """Write down what the live rows are now: [R, d] of all rows, those that have left as they left."""
        memory, rows, live = self.writing.memory, self.live.rows, self.x[: self.live.n_rows]
        assert memory.states is not None
        states = memory.states[memory.length]
        return states.copy_(live) if rows is None else states.index_copy_(0, rows, live)

    def ask(self, block: int) -> None:
        """Let the decider choose which rows leave before `block` (from 0)."""
        writing, live = self.writing, self.x[: self.live.n_rows]
        self.keep()
        state = self.state = self._state()
        seen: list[Tensor] = []

        def exit_logits() -> Tensor:
            if not seen:
                seen.append(writing.engine.logits(live))
                writing.ledger.read(state.ids)
            return seen[0]

        def source() -> Tensor:
            return writing.source.mean[state.row_ids // writing.beams]

        state.layer, state.rows = block + 1, live
        state.providers = {"exit_logits": exit_logits, "source": source}
        before = state.decider_macs
        decision = ask(writing.decider, state)
        state.providers = {}  # they refer to the state: a reference cycle would keep both in memory
        if state.decider_macs is not before:
            writing.ledger.add_macs(state.ids, state.decider_macs)
            state.decider_macs = before
        decision.check(state, soft=False)
        if other := sorted(decision.verbs.keys() - {"freeze"}):
            raise StrettoError(f"Expected 'freeze' in a decoder, got {', '.join(other)}. A token there can only leave.")
        if decision.freeze is not None:
            self._leave(decision.freeze, seen[0] if seen else None)

    def _state(self) -> State:
        """What the decider sees of the live rows. It is one object for all blocks, which shrinks where rows leave."""
        if self.state is not None:
            return self.state
        writing, here = self.writing, self.writing.memory.length
        return State(
            layer=1, point="before", stack="decoder", step=here, rows=self.x, sequence=writing.numbers,
            position=writing.zeros + here, frozen=writing.none, protected=writing.none, ids=self.numbers,
            row_ids=writing.numbers, dial=writing.row_dials, lengths=writing.ones, decider_macs=writing.zeros,
        )  # fmt: skip

    def _leave(self, leaving: Tensor, logits: Tensor | None) -> None:
        """The live rows `leaving` ([R'] bool) keep their state, the others continue."""
        state, beams = self.state, self.writing.beams
        stay = (~leaving).nonzero().squeeze(1)
        count = stay.shape[0]
        if count == self.live.n_rows:
            return
        assert state is not None
        if logits is not None:
            gone = leaving.nonzero().squeeze(1)
            self._answer(state.row_ids.index_select(0, gone), logits.index_select(0, gone))
        self.x = fill(self.x.index_select(0, stay), few(count))
        rows = state.row_ids = state.row_ids.index_select(0, stay)
        self.live = Live(count, rows, rows if beams == 1 else rows // beams)
        state.ids = self.numbers = state.ids.index_select(0, stay)
        state.dial = state.dial.index_select(0, stay)
        state.sequence, state.position = state.sequence[:count], state.position[:count]
        state.frozen = state.protected = state.frozen[:count]  # these are the same in all rows
        state.lengths, state.decider_macs = state.lengths[:count], state.decider_macs[:count]
        for notes in state.notes.values():
            notes.sequences, notes.rows = taken(notes.sequences, stay), taken(notes.rows, stay)

    def _answer(self, rows: Tensor, logits: Tensor) -> None:
        """Keep the rows' logits ([…, V]), which their decider has read."""
        if self.logits is None:
            self.logits = logits.new_empty(self.writing.memory.n_rows, logits.shape[1])
            self.answered = torch.zeros_like(self.writing.none)
        assert self.answered is not None
        self.logits.index_copy_(0, rows, logits)
        self.answered.index_fill_(0, rows, True)

    @property
    def exits(self) -> Tensor:
        """[R] the block at which each row left."""
        return self.writing.last_block if self.live.rows is None else self.writing.memory.exits

    def answers(self) -> Tensor:
        """[R, V]: logits of the states the rows left with. One product for all rows without logits."""
        writing = self.writing
        if self.live.rows is None:
            writing.ledger.read(self.numbers)
            return writing.engine.logits(self.x[: self.live.n_rows])
        left = self.keep()
        if self.logits is None or self.answered is None:
            writing.ledger.read(writing.sentences)
            return writing.engine.logits(left)
        rest = (~self.answered).nonzero().squeeze(1)
        if len(rest):
            writing.ledger.read(writing.sentences[rest])
            self.logits.index_copy_(0, rest, writing.engine.logits(left[rest]))
        return self.logits
