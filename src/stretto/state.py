"""What a decider sees (`State`), what it returns (`Decision`) and what was computed (`Trace`).

Both engines describe a batch to a decider in the same ragged form: the live tokens of all live sequences
are rows of one matrix. A decider therefore never meets padding, masks or offsets. N is the number of
live rows, B the number of live sequences, d the hidden size, C the number of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from stretto.errors import StrettoError

Point = Literal["before", "between", "after"]
Stack = Literal["encoder", "decoder"]

#: Which verbs are allowed at which point of a layer. The soft ones are for training: only the reference engine,
#: which computes everything anyway, accepts them.
VERBS: dict[Point, frozenset[str]] = {
    "before": frozenset({"drop", "freeze", "gate", "skip", "attention_bias"}),
    "between": frozenset({"drop", "output_factor"}),
    "after": frozenset({"exit"}),
}
ALL_VERBS = frozenset(verb for verbs in VERBS.values() for verb in verbs)
SOFT = frozenset({"attention_bias", "output_factor"})
REAL = SOFT | {"gate"}  # verbs that are numbers; the others are yes or no
PER_SEQUENCE = frozenset({"exit", "gate", "skip"})  # one entry per live sequence; the others have one per live row

#: The fields of `State` with an entry per row (but `sequence`, which counts within the state) and per sequence.
OF_ROWS = ("position", "frozen", "protected", "row_ids")
OF_SEQUENCES = ("ids", "dial", "lengths", "decider_macs")


@dataclass(frozen=True)
class Inputs:
    """A tokenised batch, padded on either side. All tensors are [batch, columns]."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None = None
    protected: Tensor | None = None
    """[batch, columns] bool: tokens that may never be dropped, besides position 0, which never may."""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """Known facts about each token before the first layer, [batch, columns] each; becomes `State.input_notes`."""

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.input_ids.shape != self.attention_mask.shape:
            raise StrettoError(
                "Expected input_ids and attention_mask of one shape [batch, columns], got "
                f"{tuple(self.input_ids.shape)} and {tuple(self.attention_mask.shape)}. Pad the batch first."
            )
        mask = (self.attention_mask != 0).long()
        object.__setattr__(self, "attention_mask", mask)
        stretches = mask[:, 0] + (mask[:, 1:] > mask[:, :-1]).sum(dim=1)  # [batch] runs of valid tokens
        if bool((stretches == 0).any()):
            raise StrettoError(
                "Expected at least one valid token in every sequence, got a sequence that is all padding. "
                "Tokenise with special tokens, so that even an empty text has some."
            )
        if bool((stretches > 1).any()):
            raise StrettoError(
                "Expected padding at the ends of sequences, got an attention_mask with a hole. "
                "Remove the tokens that must not be seen."
            )

    def to(self, device: torch.device) -> Inputs:
        if self.input_ids.device == device:
            return self

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device)

        return Inputs(
            self.input_ids.to(device), self.attention_mask.to(device), move(self.token_type_ids), move(self.protected),
            {name: note.to(device) for name, note in self.notes.items()},
        )  # fmt: skip

    @property
    def positions(self) -> Tensor:
        """[batch, columns]: index of each token among the valid ones of its sequence, for either padding side."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)


class Compared(NamedTuple):
    """What led to a decision. After a layer there is one number per sequence ([B]), elsewhere one per row ([N])."""

    what: str
    value: Tensor
    bound: Tensor
    """What the value is compared with: the dial, or a number computed from it."""
    logits: bool = False
    """Both are logits. `stretto explain` shows them as probabilities."""


@dataclass(frozen=True)
class Decision:
    """What a decider wants done now, and the scores behind it; None means nothing."""

    drop: Tensor | None = None
    """[N] bool: rows that leave."""
    freeze: Tensor | None = None
    """[N] bool: rows that are no longer updated."""
    exit: Tensor | None = None
    """[B] bool: sequences that are answered now."""
    gate: Tensor | None = None
    """[B] factor on what both residual branches of this layer (attention, FFN) add to a sequence; 1 is no gate."""
    skip: Tensor | None = None
    """[B] bool: sequences that skip this layer. Their rows pass unchanged, and nothing is computed for them."""
    attention_bias: Tensor | None = None
    """[N] soft drop: added to every attention score on this row, in this layer and all later ones."""
    output_factor: Tensor | None = None
    """[N] soft drop: a factor on the output of the row's attention block, before the FFN."""
    score: Tensor | None = None
    """[N] what the rows were ranked by. Not a verb: the engines do nothing with it, `stretto explain` shows it."""
    depth: Tensor | None = None
    """[N] the depth given to each row. Not a verb either."""
    compared: Compared | None = None
    """The number that decided and its bound. Not a verb either."""

    @property
    def verbs(self) -> dict[str, Tensor]:
        """The verbs with their tensors."""
        return {verb: value for verb, value in vars(self).items() if value is not None and verb in ALL_VERBS}

    def check(self, state: State, *, soft: bool) -> None:
        """Refuse a verb that does not belong to this point or engine, or a tensor of the wrong shape."""
        for verb, value in self.verbs.items():
            if verb not in VERBS[state.point] or (verb in SOFT and not soft):
                able = sorted(VERBS[state.point] if soft else VERBS[state.point] - SOFT)
                raise StrettoError(
                    f"Expected one of {able} {state.point} a layer{'' if soft else ' of the packed engine'}, got "
                    f"'{verb}'. Return it from decide() at another point, and soft verbs only while training."
                )
            count = state.n_sequences if verb in PER_SEQUENCE else state.n_rows
            fits = value.is_floating_point() if verb in REAL else value.dtype == torch.bool
            if not fits or value.shape != (count,):
                raise StrettoError(
                    f"Expected '{verb}' to be a {'float' if verb in REAL else 'bool'} tensor of shape [{count}], "
                    f"got {value.dtype} {tuple(value.shape)}. Return one entry per live "
                    f"{'sequence' if verb in PER_SEQUENCE else 'row'}."
                )


@dataclass
class Notes:
    """What one decider notes about the live sequences and rows from layer to layer. An entry may be missing in some
    states (a decider may handle some sequences only, for example by their dial): such states are never joined."""

    sequences: dict[str, Tensor] = field(default_factory=dict)
    """[B, …] each; they follow the sequences that stay."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """[N, …] each; they follow the rows that stay."""

    @staticmethod
    def join(parts: Sequence[Notes]) -> Notes:
        """Notes with the same names on several states, one after another."""
        return Notes(joined([part.sequences for part in parts]), joined([part.rows for part in parts]))


def joined(notes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in notes]) for name in notes[0]}


def taken(notes: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {name: note.index_select(0, index) for name, note in notes.items()}


@dataclass
class State:
    """The live rows of a batch at one point of one layer, and the deciders' notes about them."""

    layer: int
    """The layer this point belongs to, counted from 1."""
    point: Point
    rows: Tensor
    """[N, d]. Before and between: what the layer reads. After: what it wrote."""
    sequence: Tensor
    """[N] which live sequence a row belongs to; ascending."""
    position: Tensor
    """[N] position of the token in its input; ascending within a sequence."""
    frozen: Tensor
    """[N] True where the token is no longer updated."""
    protected: Tensor
    """[N] True where the token may not be dropped."""
    ids: Tensor
    """[B] index of each live sequence in the input batch."""
    row_ids: Tensor
    """[N] index of each live row among all rows of the input batch."""
    dial: Tensor
    """[B] the dial, per sequence."""
    lengths: Tensor
    """[B] live rows per sequence."""
    decider_macs: Tensor
    """[B] multiply-adds of the deciders so far; the engine adds them to the trace when a sequence leaves."""
    stack: Stack = "encoder"
    """Which stack of layers is running: in a decoder `layer` counts its blocks, and each row is the newest token of a
    text that is being written."""
    step: int = 0
    """How many tokens of those texts were written before: the position of the rows. An encoder has one step."""
    gate: Tensor | None = None
    """[B] the factor on this layer's residual branches, if a decider returned one before it."""
    skip: Tensor | None = None
    """[B] True where the sequence skips this layer; None: none does."""
    any_frozen: bool = False
    """Whether some row may be frozen: most deciders never freeze, and then no check is needed."""
    input_notes: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """`Inputs.notes` of the live rows, [N, …] each; all deciders read them, none writes."""
    notes: dict[Hashable, Notes] = field(default_factory=dict)
    """What each decider has noted (see `notes_of`)."""
    context: Any = None
    """What this pass is for, if it is not plain inference (a training pass, a configuration under search): the object
    that the method gave to the engine's `run`."""
    providers: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    """What an engine computes only if a decider reads it: see `exit_logits`, `pooled`, `attention_received`."""

    @property
    def n_rows(self) -> int:
        return self.sequence.shape[0]

    @property
    def n_sequences(self) -> int:
        return self.ids.shape[0]

    @property
    def starts(self) -> Tensor:
        """[B] row index of the first live row of each sequence (position 0 is never dropped)."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def first_rows(self) -> Tensor:
        """[B, d] the state of position 0 ([CLS], <s>) of each sequence."""
        return self.rows[self.starts]

    def notes_of(self, decider: Hashable) -> Notes:
        """The notes of this decider about the live sequences and rows; it may add to them."""
        return self.notes.setdefault(decider, Notes())

    @property
    def note_names(self) -> frozenset[tuple[object, ...]]:
        """The names of all notes and their deciders: only states with the same ones can be joined."""
        own = [
            (decider, kind, name)
            for decider, notes in self.notes.items()
            for kind, named in vars(notes).items()
            for name in named
        ]
        return frozenset([*own, *((name,) for name in self.input_notes)])

    @property
    def exit_logits(self) -> Tensor:
        """[B, C] answers of the exit at this layer. Reading them has a cost: the exit is run and counted."""
        return self._provided("exit_logits")

    @property
    def pooled(self) -> Tensor:
        """[B, d] what the exit at this layer reads: the first or the mean row, before the exit's own layers."""
        return self._provided("pooled")

    @property
    def attention_received(self) -> Tensor:
        """[N] attention paid to each row in this layer, summed over heads and updated rows (point 'between')."""
        return self._provided("attention_received")

    def add_macs(self, macs: int | Tensor, who: Tensor | None = None) -> None:
        """Count the deciders' work: multiply-adds of the sequences `who` (indices; None: all live ones), one number
        for each of them or a tensor with one entry per sequence."""
        if who is None:
            self.decider_macs = self.decider_macs + macs
        else:
            each = torch.as_tensor(macs, dtype=self.decider_macs.dtype, device=who.device).expand(len(who))
            self.decider_macs = self.decider_macs.index_add(0, who, each)

    def _provided(self, what: str) -> Tensor:
        if what not in self.providers:
            raise StrettoError(
                f"Expected a value that is available {self.point} layer {self.layer}, got '{what}'. "
                "Exit logits exist after layers 1..L-1 of a decider with exits; attention exists between."
            )
        return self.providers[what]()

    @staticmethod
    def join(parts: Sequence[State]) -> State:
        """Several states before the same layer as one, their sequences one after another.

        Their `note_names` must be the same. `rows` belongs to the engine, which joins it in its own way."""
        before = [0, *accumulate(part.n_sequences for part in parts)]
        whole = replace(
            parts[0],
            sequence=torch.cat([part.sequence + start for part, start in zip(parts, before, strict=False)]),
            gate=None,
            skip=None,
            any_frozen=any(part.any_frozen for part in parts),
            input_notes=MappingProxyType(joined([part.input_notes for part in parts])),
            notes={who: Notes.join([part.notes_of(who) for part in parts]) for who in parts[0].notes},
        )
        for name in (*OF_ROWS, *OF_SEQUENCES):
            setattr(whole, name, torch.cat([getattr(part, name) for part in parts]))
        return whole

    def select_rows(self, keep: Tensor) -> Tensor:
        """Forget the rows where `keep` ([N] bool) is False; return the indices of those that stay.

        `rows` itself belongs to the engine, which compacts it in its own way."""
        index = keep.nonzero().squeeze(1)
        self._take_rows(index)
        self.lengths = torch.bincount(self.sequence, minlength=self.n_sequences)
        return index

    def sort_by_length(self) -> Tensor:
        """Sort sequences by length; return the indices of their rows in that order."""
        order = self.lengths.argsort(stable=True)
        starts = self.starts[order]
        self._take_sequences(order)
        sequence = torch.arange(len(order), device=order.device).repeat_interleave(self.lengths)
        index = torch.arange(self.n_rows, device=order.device) + (starts - self.starts)[sequence]
        self._take_rows(index)
        self.sequence = sequence
        return index

    def forget_sequences(self, leaving: Tensor) -> Tensor:
        """Forget these sequences (indices); return the indices of the rows that stay."""
        keep = torch.ones_like(self.ids, dtype=torch.bool).index_fill_(0, leaving, False)
        index = keep.index_select(0, self.sequence).nonzero().squeeze(1)
        self._take_rows(index)
        self.sequence = (keep.cumsum(0) - 1).index_select(0, self.sequence)
        self._take_sequences(keep.nonzero().squeeze(1))
        return index

    def _take_rows(self, index: Tensor) -> None:
        """Keep the rows `index` ([M] indices), in this order."""
        for name in ("sequence", *OF_ROWS):
            setattr(self, name, getattr(self, name).index_select(0, index))
        if self.input_notes:
            self.input_notes = MappingProxyType(taken(self.input_notes, index))
        for notes in self.notes.values():
            notes.rows = taken(notes.rows, index)

    def _take_sequences(self, which: Tensor) -> None:
        """Keep the sequences `which` (indices), in this order."""
        for name in OF_SEQUENCES:
            setattr(self, name, getattr(self, name).index_select(0, which))
        self.gate, self.skip = (None if value is None else value[which] for value in (self.gate, self.skip))
        for notes in self.notes.values():
            notes.sequences = taken(notes.sequences, which)


@dataclass
class Trace:
    """What was executed, per sequence of the batch (B) and layer (L). `stretto.engine.cost` turns it into FLOPs."""

    stack: ClassVar[Stack] = "encoder"
    """The stack of these layers. The blocks of a decoder are counted by `engine.written.DecoderTrace`."""
    lengths: Tensor
    """[B] tokens of the input."""
    n_query: Tensor
    """[B, L] rows whose attention scores were computed."""
    n_key: Tensor
    """[B, L] rows seen as key and value."""
    n_ffn: Tensor
    """[B, L] rows that got an attention output and went through the FFN."""
    decider_macs: Tensor
    """[B] multiply-adds of everything that is not a layer: exits, predictors, the final head."""
    skipped: Tensor
    """[B, L] pairs of a query and a key that were not computed because a local window hides them. Without a window
    there are n_key · n_query pairs for the scores and n_key · n_ffn for the weighted sums."""

    @property
    def depth(self) -> Tensor:
        """[B] layers each sequence went through."""
        return (self.n_query > 0).sum(dim=1)

    def one(self, index: int) -> Trace:
        """The trace of one sequence."""
        return Trace(**{name: value[index : index + 1] for name, value in vars(self).items()})

    @staticmethod
    def concatenate(traces: list[Trace]) -> Trace:
        return Trace(**{name: torch.cat([getattr(trace, name) for trace in traces]) for name in vars(traces[0])})


@dataclass
class Output:
    """What an engine returns for a batch."""

    logits: Tensor
    """[B, C]; for tasks that answer every token [B, T, C], column = position."""
    trace: Trace
    hidden: Tensor | None = None
    """[B, T, d] last state of each token as the head reads it, column = position; zeros where a token was dropped and
    not restored. None unless `keep_hidden` was set."""
    read: Tensor | None = None
    """[B, d] what the model's head read of each sequence when it left, or would have read. None if `hidden` is None or
    every token is answered."""
