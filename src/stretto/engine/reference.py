"""The reference engine: padded, masked, differentiable, and simple.

It runs the Hugging Face modules on whole [B, T, d] tensors and expresses every verb as a mask. It is used
for training and as the oracle that the packed engine must equal. To keep
training fast, it skips columns that are empty in all sequences, and the FFN of frozen tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.backbones import AttentionSpec, Backbone, BiasTable, LayerSpec
from stretto.backbones.plain import attention_probabilities
from stretto.backbones.positions import within
from stretto.engine.decider import Decider
from stretto.engine.run import Run, first_state
from stretto.engine.windows import stretches
from stretto.state import Inputs, Output, State


class PaddedTable:
    """The live rows of a batch in padded form: where each stands, and its state."""

    def __init__(self, hidden: Tensor, inputs: Inputs, state: State) -> None:
        self.state, self.hidden = state, hidden  # [B, T, d]
        self.position = inputs.positions  # [B, T]
        self.bias = hidden.new_zeros(hidden.shape[:2])  # [B, T] soft attention bias
        # [N] column of each live row: left padding shifts a sequence to the right
        self.column = inputs.attention_mask.argmax(dim=1)[state.ids[state.sequence]] + state.position

    @property
    def cells(self) -> tuple[Tensor, Tensor]:
        """Where the live rows stand in [B, T]."""
        return self.state.ids[self.state.sequence], self.column

    @property
    def rows(self) -> Tensor:
        """[N, d]"""
        return self.hidden[self.cells]

    @property
    def live(self) -> Tensor:
        """[B, T] bool"""
        return self.spread(torch.ones_like(self.column, dtype=torch.bool))

    @property
    def gate(self) -> Tensor | None:
        """[B, 1, 1] factor on this layer's residual branches; None if it has no gate."""
        if self.state.gate is None:
            return None
        everyone = self.hidden.new_ones(len(self.hidden))
        return everyone.index_put((self.state.ids,), self.state.gate.to(everyone)).view(-1, 1, 1)

    def spread(self, values: Tensor) -> Tensor:
        """[N] over live rows -> [B, T], zero elsewhere."""
        table = values.new_zeros(self.hidden.shape[:2])
        return table.index_put(self.cells, values)

    def keep(self, index: Tensor | None) -> None:
        """Only the rows at `index` stay (None: all). Columns that no sequence needs any more are given up."""
        if index is None:
            return
        state, self.column = self.state, self.column[index]
        width = int(state.lengths.max()) if state.n_sequences else 0
        if width == self.hidden.shape[1] or width == 0:
            return
        old = self.cells
        self.column = torch.arange(state.n_rows, device=self.column.device) - state.starts[state.sequence]
        for name in ("hidden", "position", "bias"):
            values = getattr(self, name)
            narrow = values.new_zeros(len(values), width, *values.shape[2:])
            setattr(self, name, narrow.index_put(self.cells, values[old]))


@contextmanager
def scaled(linear: nn.Linear, factor: Tensor | None) -> Iterator[None]:
    """Inside the `with` block the output of `linear` is multiplied by `factor` (None: 1).

    With the last Linear of a residual branch this scales the branch: only dropout follows, which a factor commutes
    with."""
    if factor is None:
        yield
        return
    hook = linear.register_forward_hook(lambda module, inputs, output: output * factor)
    try:
        yield
    finally:
        hook.remove()


def attention_bias(position: Tensor, visible: Tensor, soft: Tensor) -> Callable[[AttentionSpec], Tensor]:
    """What is added to the scaled scores of a layer's attention, [B, 1 or heads, 1 or T, T]: it hides all columns but
    `visible` ([B, T] bool) and adds `soft` ([B, T]) and what the layer's spec says of positions ([B, T]) alone."""
    hidden = torch.finfo(soft.dtype).min
    everywhere = soft.masked_fill(~visible, hidden)[:, None, None, :]

    @cache
    def with_positions(window: int | None, table: BiasTable | None) -> Tensor:
        bias = everywhere
        if window is not None:
            bias = bias.masked_fill(~within(window, position, position).unsqueeze(1), hidden)
        return bias if table is None else bias + table.scores(position, position)

    return lambda spec: with_positions(spec.window, spec.bias)


def undisturbed_bias(inputs: Inputs, hidden: Tensor) -> Callable[[AttentionSpec], Tensor]:
    """`attention_bias` where nothing is decided; `hidden` ([B, T, d]) gives the type."""
    visible = inputs.attention_mask.bool()
    return attention_bias(inputs.positions, visible, hidden.new_zeros(visible.shape))


class ReferenceEngine:
    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def hidden_states(
        self, inputs: Inputs, depth: int | None = None, embedded: Tensor | None = None, cut: Collection[int] = ()
    ) -> list[Tensor]:
        """Nothing decided: [B, T, d] after the embeddings and after each of the first `depth` layers (default: all).

        After the last layer it is what the head reads, as in Hugging Face's `hidden_states`. No gradient comes back
        from above the layers in `cut` (from 1). `embedded` ([B, T, d]), if given, replaces the embeddings' output."""
        hidden = self.embed(inputs) if embedded is None else embedded
        bias_of = undisturbed_bias(inputs, hidden)
        states = [hidden]
        for layer, spec in enumerate(self.backbone.specs[:depth]):
            hidden = hidden.detach() if layer in cut else hidden
            attended = self.backbone.attend(layer, hidden, bias_of(spec.attention), inputs.positions)
            hidden = self.backbone.feed_forward(layer, attended)
            states.append(hidden)
        if len(states) > self.backbone.n_layers:
            states[-1] = self.backbone.for_head(hidden)
        return states

    def as_heads_read(self, states: list[Tensor]) -> list[Tensor]:
        """What `hidden_states` gave of all layers -> [B, T, d] after each layer, as a head there would read it."""
        return [*map(self.backbone.for_head, states[1:-1]), states[-1]]

    def run(
        self, inputs: Inputs, decider: Decider, dial: float | Tensor, *,
        keep_hidden: bool = False, skip: Collection[int] = (), cut: Collection[int] = (), context: Any = None,
    ) -> Output:  # fmt: skip
        """What the packed engine computes, differentiably. Layers in `skip` (from 1) are skipped for all sequences; no
        gradient comes back from above the layers in `cut`.

        `context` reaches the decider as `State.context`."""
        run = Run(self.backbone, decider, keep_hidden=keep_hidden, soft=True)
        run.enter(inputs.attention_mask.sum(dim=1), inputs.input_ids.shape[1])
        state = first_state(inputs, dial, context=context)
        table = PaddedTable(self.embed(inputs), inputs, state)
        for layer in range(1, self.backbone.n_layers + 1):
            if layer not in skip:
                self._layer(run, layer, table)
            if state.n_sequences:
                table.keep(run.after(state, layer, table.rows))
            if not state.n_sequences:
                break
            if layer in cut:
                table.hidden = table.hidden.detach()
        return run.output(*inputs.input_ids.shape)

    def _layer(self, run: Run, layer: int, table: PaddedTable) -> None:
        state = table.state
        decision = run.ask(state, "before", layer, table.rows)
        keep = run.drop(state, decision, table.rows)
        run.freeze(state, decision)
        run.freeze_unread(state, layer)
        run.gate(state, decision)
        if decision.attention_bias is not None:
            table.bias = table.bias + table.spread(decision.attention_bias)
        if keep is not None:
            table.keep(state.select_rows(keep))
        if (done := run.all_frozen(state)) is not None:
            table.keep(run.leave(state, done, table.rows))
        if not state.n_sequences or (state.skip is not None and bool(state.skip.all())):
            return

        spec = self.backbone.specs[layer - 1]
        bias = attention_bias(table.position, table.live, table.bias)(spec.attention)
        updated = ~state.frozen if state.skip is None else ~(state.frozen | state.skip[state.sequence])
        n_query = torch.bincount(state.sequence[updated], minlength=state.n_sequences)
        received = partial(self._attention_received, spec, table, bias, table.spread(updated))
        before = state.decider_macs
        decision = run.ask(state, "between", layer, table.rows, attention_received=received)
        if state.skip is not None:  # in the packed engine the decider is not called for these sequences
            state.decider_macs = torch.where(state.skip, before, state.decider_macs)
            if decision.drop is not None:
                decision = replace(decision, drop=decision.drop & ~state.skip[state.sequence])
        keep = run.drop(state, decision, table.rows)
        renewed = updated if keep is None else updated & keep
        n_ffn = torch.bincount(state.sequence[renewed], minlength=state.n_sequences)
        run.count(state, layer, n_query, n_ffn, self._skipped(spec.attention, state, updated, n_query, renewed))

        gate, old = table.gate, table.hidden
        with scaled(spec.attention.output, gate):
            table.hidden = self.backbone.attend(layer - 1, table.hidden, bias, table.position)
        if decision.output_factor is not None:
            table.hidden = table.hidden * table.spread(decision.output_factor - 1).add(1).unsqueeze(-1)
        if state.any_frozen or state.skip is not None:  # the rows that are not renewed keep the state they have
            cells = table.cells[0][renewed], table.cells[1][renewed]
            with scaled(spec.ffn.out, None if gate is None else gate[cells[0], 0]):
                new = self.backbone.feed_forward(layer - 1, table.hidden[cells])
            table.hidden = old.index_put(cells, new.to(old.dtype))
            table.keep(None if keep is None else state.select_rows(keep))
        else:  # attention at the old length, the FFN at the new one
            table.keep(None if keep is None else state.select_rows(keep))
            with scaled(spec.ffn.out, gate):
                table.hidden = self.backbone.feed_forward(layer - 1, table.hidden)

    def embed(self, inputs: Inputs) -> Tensor:
        """[B, T, d]"""
        return self.backbone.embed(inputs.input_ids, inputs.token_type_ids, inputs.positions)

    def _skipped(
        self, spec: AttentionSpec, state: State, updated: Tensor, n_query: Tensor, renewed: Tensor
    ) -> Tensor | None:
        """[B] the pairs that the packed engine skips where a window hides them; here they are computed and masked.

        Rows that are `updated` are queries, and those `renewed` get weighted sums (both [N] bool)."""
        found = stretches(spec, n_query, state.lengths, state.position[updated], state.position)
        return None if found is None else found.skipped(spec, state.lengths, renewed[updated].nonzero().squeeze(1))

    @torch.no_grad()
    def attentions(self, inputs: Inputs) -> Iterator[Tensor]:
        """Nothing decided: the probabilities of every layer in turn, [B, heads, T, T] each."""
        states = self.hidden_states(inputs)
        bias_of = undisturbed_bias(inputs, states[0])
        for spec, hidden in zip(self.backbone.specs, states, strict=False):
            yield attention_probabilities(spec, hidden, bias_of(spec.attention), inputs.positions)

    @torch.no_grad()  # scores only rank
    def _attention_received(self, spec: LayerSpec, table: PaddedTable, bias: Tensor, queries: Tensor) -> Tensor:
        """[N]: attention paid to the live rows by the rows in `queries` ([B, T] bool), summed over heads."""
        paid = attention_probabilities(spec, table.hidden, bias, table.position)
        return (paid * queries[:, None, :, None]).sum(dim=(1, 2))[table.cells]
