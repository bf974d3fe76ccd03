"""Token halting: one look at the bottom layer decides how deep each token goes.

The token-level form of `halting`: a head on the first layer's output predicts for each token the depth at which it
will have said what it can; there it is frozen, and the sequence is answered when its last token is. What a token has to
say is asked of the pooled head, which is trained to answer after every layer.

The baseline of Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021 (token level), after
Elbayad, Gu, Grave, Auli: *Depth-Adaptive Transformer*, ICLR 2020 (multinomial, correctness).

    C_t^n = [the pooled head, on token t alone after layer n, is right]     -> `TokenHalting.correct_tokens`
    oracle depth of t = argmax_n (C_t^n - λ n)                              -> `stretto.methods.halting.oracle_depth`
    L_halt = H(oracle, q_t), q_t = softmax(W h_t^1 + b)                     -> `TokenHalting.halting_loss`
    freeze t at the smallest n with Σ_{m<=n} q_t(m) >= dial                 -> `depth_at_quantile`

Differs from the paper: the papers take argmax q, which leaves nothing to turn; here a quantile of q is taken, and
training draws it anew for every text, so that one model serves any dial. The papers ask the correctness of target
tokens; a text has one label, which every token is asked for. The oracle is not smoothed over neighbouring tokens. The
predictor does not push gradients into the backbone. The oracle is asked with dropout, as everything else that learns.

Dial: the probability with which the predicted depth must suffice. 1 is the full model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stretto.methods.base import Dial, Needs, Shape, Stage, TrainingBatch, spaced
from stretto.methods.depths import DepthAdaptive, DepthConfig
from stretto.methods.halting import depth_at_quantile, oracle_depth
from stretto.methods.settings import Epochs, Weight
from stretto.state import State
from stretto.tasks import Task


@dataclass(frozen=True)
class TokenHaltingConfig(DepthConfig):
    anytime_epochs: Epochs = 1
    """Epochs of training the pooled head to answer after every layer, together with the backbone."""
    penalty: Weight = 0.05
    """λ: what one more layer must be worth in correctness (0 to 1)."""


class TokenHalting(DepthAdaptive):
    name = "token_halting"
    Config = TokenHaltingConfig
    needs = Needs(right_or_wrong=True)
    known_after = 1
    monotone = False  # who is asked pays the predictor, also where it freezes nothing
    dial = Dial(
        "quantile", "each token runs to the depth that suffices with this probability; 1 runs to the end",
        off=1.0, sweep=spaced(1.0, 0.0, steps=20), upper=1.0,
    )  # fmt: skip

    def __init__(self, config: TokenHaltingConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.predictor = nn.Linear(shape.d, shape.n_layers)

    def depths(self, state: State) -> Tensor:
        on = state.dial != self.dial.off
        asked = on[state.sequence]  # who runs in full is not asked, and pays nothing
        state.spend(state.lengths * on * self.shape.d * self.shape.n_layers)
        depth = torch.full_like(state.position, self.shape.n_layers)
        quantile = state.dial[state.sequence[asked]]
        depth[asked] = depth_at_quantile(self.predictor(state.rows[asked]), quantile)
        return depth

    # ---- training

    def stages(self) -> list[Stage]:
        config = self.config
        anytime = Stage(
            "anytime", config.anytime_epochs, config.depth_learning_rate, config.head_learning_rate,
            decides=True, best_by="last", objective=self.anytime_loss,
        )  # fmt: skip
        halting = Stage(
            "halting", config.depth_epochs, config.depth_learning_rate, config.head_learning_rate,
            decides=True, dials=(self.dial.off, 0.5), objective=self.halting_loss,
        )  # fmt: skip
        return [self.finetuning(), anytime, halting]

    def halting_loss(self, batch: TrainingBatch) -> Tensor:
        mask = batch.inputs.attention_mask.bool()
        with torch.no_grad():
            states = batch.engine.hidden_states(batch.inputs)
            right = self.correct_tokens(batch.engine.as_heads_read(states), batch.labels)[:, mask]  # [L, tokens]
            oracle = oracle_depth(right, self.config.penalty)
        halting = cross_entropy(self.predictor(states[1][mask]), oracle - 1)
        quantile = torch.rand(len(batch.labels), device=batch.labels.device)
        full = torch.rand_like(quantile) < self.config.full_share
        logits = batch.run(torch.where(full, self.dial.off, quantile)).logits
        return self.loss(logits, batch.targets).mean() + halting

    def anytime_loss(self, batch: TrainingBatch) -> Tensor:
        """The mean loss of the pooled head over all layers, and that of the model's own head."""
        inputs, head = batch.inputs, batch.engine.backbone.head
        states = batch.engine.as_heads_read(batch.engine.hidden_states(inputs))
        answers = [self.pooled_head(self.pooled_head.pool_padded(state, inputs.attention_mask)) for state in states]
        early = torch.stack([self.loss(logits, batch.targets).mean() for logits in answers]).mean()
        final = head(head.pool_padded(states[-1], inputs.attention_mask))
        return early + self.loss(final, batch.targets).mean()

    def correct_tokens(self, states: list[Tensor], labels: Tensor) -> Tensor:
        """L states [B, T, d], [B] -> [L, B, T] bool: is the answer of this token alone right after this layer?"""
        every = labels.unsqueeze(1)  # every token of a text has its label
        return torch.stack([self.task.correct(self.pooled_head.of_token(state), every) for state in states])
