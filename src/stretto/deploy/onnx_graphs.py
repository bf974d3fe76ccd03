"""The computation of a model in a form that ONNX can express: padded, with no decision inside a graph.

B sequences, T columns, d hidden size, C labels. Sequences are padded on the right. The columns of dropped tokens are no
longer gathered. Sequences of a batch keep different numbers of tokens; the surplus columns of the shorter ones are
masked. How deep a sequence goes differs from text to text: the caller decides that between two stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.backbones.plain import attention_probabilities
from stretto.backbones.spec import LayerSpec
from stretto.engine.reference import attention_bias
from stretto.methods.layer_drop import LayerDrop
from stretto.methods.selection import KeepsTokens
from stretto.model import AdaptiveModel
from stretto.state import Notes, Point, State

#: Fractions of the columns are given to the graph as whole numbers of this unit.
PARTS = 10**6
#: Prefix of a method's notes among the inputs of a stage.
NOTE = "note_"


@dataclass
class Table:
    """The live tokens of a batch in padded form."""

    hidden: Tensor
    """[B, T, d]"""
    live: Tensor
    """[B, T] bool"""
    position: Tensor
    """[B, T] of the token in its text; for relative positions."""
    column: Tensor
    """[B, T] where the token stood before anything was dropped."""

    def bias(self, spec: LayerSpec) -> Tensor:
        """[B, 1 or heads, 1 or T, T] added to attention scores: hides what is not live."""
        return attention_bias(self.position, self.live, self.hidden.new_zeros(self.live.shape))(spec.attention)

    def take(self, order: Tensor, count: Tensor, most: Any) -> None:
        """Keep the first `count` ([B]) columns of `order` ([B, T] columns, best first), in `most` columns for all."""
        place = torch.arange(most, device=order.device)
        # where `most` is more than there are, the last column comes again; it is masked like any surplus one
        chosen = order[:, place.clamp(max=order.shape[1] - 1)]
        self.hidden = self.hidden.gather(1, chosen.unsqueeze(-1).expand(-1, -1, self.hidden.shape[2]))
        self.position, self.column = self.position.gather(1, chosen), self.column.gather(1, chosen)
        self.live = place.unsqueeze(0) < count.unsqueeze(1)


class Graph(nn.Module):
    """What all graphs of a model share."""

    def __init__(self, model: AdaptiveModel) -> None:
        super().__init__()
        self.encoder, self.method = model.encoder, model.method  # their weights are the graph's
        self.backbone = model.backbone

    def start(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None) -> Table:
        position = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        hidden = self.backbone.embed(input_ids, token_type_ids, position)
        return self.table(hidden, attention_mask)

    def table(self, hidden: Tensor, attention_mask: Tensor) -> Table:
        position = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        column = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        return Table(hidden, attention_mask.bool(), position, column)

    def attend(self, layer: int, table: Table) -> Tensor:
        bias = table.bias(self.backbone.specs[layer - 1])
        return self.backbone.attend(layer - 1, table.hidden, bias, table.position)

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        return self.backbone.feed_forward(layer - 1, hidden)

    def head(self, hidden: Tensor, live: Tensor) -> Tensor:
        """The model's own head on the states behind the last layer: [B, T, d], [B, T] bool -> [B, C] or [B, T, C]."""
        head = self.backbone.head
        return head(head.pool_padded(self.backbone.for_head(hidden), live))


class WholeGraph(Graph):
    """One graph for one operating point: the first `depth` layers but those left out, each keeping as many tokens as
    the dial says."""

    def __init__(self, model: AdaptiveModel, dial: float, depth: int) -> None:
        super().__init__(model)
        self.depth = depth
        left_out = model.method.left_out_at(dial) if isinstance(model.method, LayerDrop) else ()
        self.layers = [layer for layer in range(1, depth + 1) if layer not in left_out]
        self.counts: list[Tensor] = []
        """For each layer [longest + 1]: tokens that it keeps of a text of n tokens; empty if none is dropped."""
        if isinstance(model.method, KeepsTokens) and dial != model.method.dial.off:
            n = torch.arange(model.max_length + 1)
            dials = torch.full_like(n, dial, dtype=torch.float64)
            self.counts = [torch.minimum(model.method.kept(n, dials, layer), n) for layer in range(1, depth + 1)]
        self.lines = [line_above(counts) for counts in self.counts]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        table = self.start(input_ids, attention_mask, token_type_ids)
        if self.counts:
            return self.shortened(table, input_ids.shape[1], attention_mask.sum(dim=1))
        for layer in self.layers:
            table.hidden = self.feed_forward(layer, self.attend(layer, table))
        if self.depth == self.backbone.n_layers:
            return self.head(table.hidden, table.live)
        assert self.method.exits is not None
        return self.method.exits(self.depth, self.method.exits.pool_padded(table.hidden, attention_mask))

    def shortened(self, table: Table, columns: Any, n: Tensor) -> Tensor:
        """Each layer keeps the most significant tokens; `n` ([B]) came in, in `columns` columns."""
        of_tokens = self.backbone.head.every_row
        # [B, T0 + 1, d] the last state of each token, and one column more for what is not read
        shelf = nn.functional.pad(table.hidden, (0, 0, 0, 1)) if of_tokens else None
        for layer, (counts, (slope, offset)) in enumerate(zip(self.counts, self.lines, strict=True), start=1):
            if shelf is not None:
                shelf = put(shelf, table, self.backbone.for_head(table.hidden))
            order = self.by_significance(layer, table)
            table.hidden = self.attend(layer, table)
            table.take(order, counts[n], columns * slope // PARTS + offset)
            table.hidden = self.feed_forward(layer, table.hidden)
        if shelf is None:
            return self.head(table.hidden, table.live)
        return self.backbone.head(put(shelf, table, self.backbone.for_head(table.hidden))[:, :-1])

    def by_significance(self, layer: int, table: Table) -> Tensor:
        """[B, T] columns, the most significant first; position 0 before all, what is not live behind."""
        spec = self.backbone.specs[layer - 1]
        # [B, heads, T, T]
        attention = attention_probabilities(spec, table.hidden, table.bias(spec), table.position)
        received = (attention * table.live[:, None, :, None]).sum(dim=(1, 2))
        rows = table.position.flatten()
        state = of_rows(layer, "between", table.hidden.flatten(0, 1), rows, attention_received=received.flatten)
        assert isinstance(self.method, KeepsTokens)
        score = self.method.score(state).view_as(received)
        first = torch.where(table.position == 0, torch.inf, score).masked_fill(~table.live, -torch.inf)
        return first.topk(first.shape[1], dim=1).indices  # in ONNX equal values stand by column, as in `ranks`


def put(shelf: Tensor, table: Table, states: Tensor) -> Tensor:
    """Write the live tokens' states at their columns; those of masked columns go to the last one."""
    where = torch.where(table.live, table.column, shelf.shape[1] - 1)
    return shelf.scatter(1, where.unsqueeze(-1).expand(-1, -1, shelf.shape[2]), states)


def line_above(counts: Tensor) -> tuple[int, int]:
    """(a, b) with counts[n] <= a n // PARTS + b for every n: how many of n columns a layer needs."""
    n = torch.arange(len(counts))
    half = len(counts) // 2
    slope = int(PARTS * (counts[-1] - counts[half]) / (len(counts) - 1 - half))
    return slope, int((counts - n * slope // PARTS).max())


def of_rows(
    layer: int, point: Point, rows: Tensor, position: Tensor, dial: Tensor | None = None,
    **providers: Callable[[], Tensor],
) -> State:  # fmt: skip
    """A state in which each row [N, d] is a sequence of its own: what a method's row-wise functions read."""
    each = torch.arange(rows.shape[0], device=rows.device)
    ones = torch.ones_like(each)
    return State(
        layer=layer, point=point, rows=rows, sequence=each, position=position, frozen=~ones.bool(),
        protected=position == 0, ids=each, row_ids=each, dial=ones.double() if dial is None else dial, lengths=ones,
        decider_macs=torch.zeros_like(each), providers=providers,
    )  # fmt: skip


class StageGraph(Graph):
    """Layers `first`..`last`, the exit behind each, and the method's decision there: who leaves, and with what answer.

    In: what the stage before put out (of the first: the tokens), the dial of each sequence, the method's notes.
    Out: `logits` [B, C], `depth` [B], the layer after which a sequence has left, 0 if it stays; for the next stage
    `hidden` [B, T, d] and the notes. Answers are those of the layer where a sequence leaves, wherever stages end."""

    def __init__(self, model: AdaptiveModel, first: int, last: int, notes: list[str]) -> None:
        super().__init__(model)
        self.first, self.last, self.notes = first, last, notes
        self.notes_out: list[str] = []
        """Known when it has run once."""

    def forward(self, dial: Tensor, attention_mask: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """`rest`: input_ids and perhaps token_type_ids (first stage), or hidden and the notes."""
        if self.first == 1:
            table, notes = self.start(rest[0], attention_mask, rest[1] if len(rest) > 1 else None), Notes()
        else:
            names = (name.removeprefix(NOTE) for name in self.notes)
            table, notes = self.table(rest[0], attention_mask), Notes(dict(zip(names, rest[1:], strict=True)))
        depth = torch.zeros_like(dial, dtype=torch.long)
        logits = table.hidden.new_zeros(dial.shape[0], self.backbone.n_labels)
        for layer in range(self.first, self.last + 1):
            table.hidden = self.feed_forward(layer, self.attend(layer, table))
            answer, leaves = self.answer(layer, table, dial, notes)
            logits = torch.where((depth > 0).unsqueeze(1), logits, answer)
            depth = torch.where((depth == 0) & leaves, layer, depth)
        self.notes_out = [NOTE + name for name in notes.sequences]
        if self.last == self.backbone.n_layers:
            return logits, depth
        return logits, depth, table.hidden, *notes.sequences.values()

    def answer(self, layer: int, table: Table, dial: Tensor, notes: Notes) -> tuple[Tensor, Tensor]:
        """[B, C] what the sequences would answer after `layer`, and [B] bool whether they leave. Writes the notes."""
        if layer == self.backbone.n_layers:
            return self.head(table.hidden, table.live), torch.ones_like(dial, dtype=torch.bool)
        exits = self.method.exits
        assert exits is not None
        pooled = exits.pool_padded(table.hidden, table.live)
        logits = exits(layer, pooled)
        state = of_rows(layer, "after", pooled, torch.zeros_like(dial, dtype=torch.long), dial,
                        exit_logits=lambda: logits, pooled=lambda: pooled)  # fmt: skip
        state.notes[self.method] = notes
        decision = self.method.decide(state)
        if decision is None or decision.exit is None:
            return logits, torch.zeros_like(dial, dtype=torch.bool)
        return logits, decision.exit
