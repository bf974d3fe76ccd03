"""The reference engine: padded, masked, differentiable, and short enough to be believed.

It runs the Hugging Face modules on whole [B, T, d] tensors and expresses every verb as a mask. It is used
for training and as the oracle that the packed engine must equal; it saves no time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.run import Run
from stretto.state import Inputs, Output

if TYPE_CHECKING:
    from stretto.methods.base import Method


class ReferenceEngine:
    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    def hidden_states(self, inputs: Inputs, depth: int | None = None) -> list[Tensor]:
        """Nothing decided: [B, T, d] after the embeddings and after each of the first `depth` layers (default: all)."""
        hidden = self._embed(inputs)
        bias = self._bias(inputs, inputs.attention_mask.bool())
        states = [hidden]
        for layer in range(self.backbone.n_layers if depth is None else depth):
            hidden = self.backbone.feed_forward(layer, self.backbone.attend(layer, hidden, bias))
            states.append(hidden)
        return states

    def run(self, inputs: Inputs, method: Method, dial: float | Tensor, *, keep_hidden: bool = False) -> Output:
        run = Run(self.backbone, method, inputs, dial, keep_hidden=keep_hidden)
        state = run.state
        batch, columns = inputs.input_ids.shape
        # column in the padded tensors of each position: left padding shifts a sequence to the right
        first_column = inputs.attention_mask.argmax(dim=1)
        hidden = self._embed(inputs)

        def cells() -> tuple[Tensor, Tensor]:
            """Where the live rows stand in [B, T]."""
            sequence = state.ids[state.sequence]
            return sequence, first_column[sequence] + state.position

        def mark(which: Tensor) -> Tensor:
            """[N] bool over live rows -> [B, T] bool."""
            marked = torch.zeros(batch, columns, dtype=torch.bool, device=hidden.device)
            sequence, column = cells()
            marked[sequence[which], column[which]] = True
            return marked

        for layer in range(1, self.backbone.n_layers + 1):
            rows = hidden[cells()]
            decision = run.ask("before", layer, rows)
            keep = run.drop(decision, rows)
            run.freeze(decision)
            if keep is not None:
                state.select_rows(keep)
            if (done := run.all_frozen()) is not None:
                rows = hidden[cells()]
                run.leave(done, rows, run.final_logits(done, rows))
            if run.finished:
                break

            live = torch.ones_like(state.frozen)
            bias = self._bias(inputs, mark(live))
            updated = ~state.frozen
            n_query = torch.bincount(state.sequence[updated], minlength=state.n_sequences)

            rows = hidden[cells()]
            received = partial(self._attention_received, layer, hidden, bias, mark(updated), cells())
            keep = run.drop(run.ask("between", layer, rows, attention_received=received), rows)
            kept = updated if keep is None else updated & keep
            run.count(layer, n_query, torch.bincount(state.sequence[kept], minlength=state.n_sequences))
            new = self.backbone.feed_forward(layer - 1, self.backbone.attend(layer - 1, hidden, bias))
            hidden = torch.where(mark(kept).unsqueeze(-1), new, hidden)  # frozen rows keep their copied state
            if keep is not None:
                state.select_rows(keep)

            run.after(layer, hidden[cells()])
            if run.finished:
                break
        return run.output()

    def _embed(self, inputs: Inputs) -> Tensor:
        return self.backbone.embed(inputs.input_ids, inputs.token_type_ids, inputs.positions)

    def _bias(self, inputs: Inputs, visible: Tensor) -> Tensor:
        """Additive attention bias that hides all columns but `visible` ([B, T] bool): [B, 1 or heads, 1 or T, T]."""
        weight = self.backbone.modules(0).query.weight
        bias = torch.zeros(visible.shape, dtype=weight.dtype, device=weight.device)
        bias = bias.masked_fill(~visible, torch.finfo(weight.dtype).min)[:, None, None, :]
        table = self.backbone.position_bias(visible.shape[1])
        if table is None:
            return bias
        positions = inputs.positions
        relative = table[:, positions[:, :, None], positions[:, None, :]]  # [heads, B, T, T]
        return bias + relative.transpose(0, 1)

    def _attention_received(
        self, layer: int, hidden: Tensor, bias: Tensor, queries: Tensor, cells: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[N]: attention paid to the rows in `cells` by the rows in `queries` ([B, T] bool), summed over heads."""
        modules, heads = self.backbone.modules(layer - 1), self.backbone.n_heads
        query, key = (
            linear(hidden).unflatten(-1, (heads, -1)).transpose(1, 2) for linear in (modules.query, modules.key)
        )
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + bias  # [B, heads, T, T]
        return (scores.softmax(dim=-1) * queries[:, None, :, None]).sum(dim=(1, 2))[cells]
