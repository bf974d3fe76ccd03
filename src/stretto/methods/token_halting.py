"""Token halting: the depth of each token is predicted after the first layer.

The token-level form of `halting`. A head on the output of the first layer predicts the depth that each token needs. The
token is frozen there, and the sequence is answered when its last token is frozen. The depth that a token needs is
measured with the pooled head, which is trained to answer after every layer.

The baseline of Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021 (token level), after
Elbayad, Gu, Grave, Auli: *Depth-Adaptive Transformer*, ICLR 2020 (multinomial, correctness).

    C_t^n = [the pooled head, on token t alone after layer n, is right]     -> `TokenHalting.correct_tokens`
    oracle depth of t = min {n: C_t^m for all m >= n}, else L               -> `stretto.methods.halting.settled_depth`
    as published: argmax_n (C_t^n - λ n)                                    -> `stretto.methods.halting.oracle_depth`
    L_halt = H(oracle, q_t), q_t = softmax(W h_t^1 + b)                     -> `TokenHalting.halting_loss`
    freeze t at the smallest n with Σ_{m<=n} q_t(m) >= dial                 -> `depth_at_quantile`

Differs from the paper:

- The papers take argmax q, which has no dial. Here it is a quantile of q. Training draws the quantile for every text,
  so that one model works at any dial.
- The papers use the correctness of target tokens. Here a text has one label, which every token is checked against.
- The oracle is not smoothed over neighbouring tokens. The predictor passes no gradients to the backbone.
- The oracle is the first layer from which the answer stays right, according to heads trained on other folds of the
  texts, computed once before the stage (`folds`; 0: the head itself, in every step, with dropout).

Dial: the probability with which the predicted depth must be enough. 1 is the full model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stretto.engine.reference import ReferenceEngine
from stretto.methods.base import Batches, Dial, Needs, Notes, Shape, Stage, TrainingBatch, spaced
from stretto.methods.depths import DepthAdaptive, DepthConfig
from stretto.methods.folds import held_out
from stretto.methods.halting import Oracle, depth_at_quantile, oracle_of
from stretto.methods.pooled_head import PooledHead
from stretto.methods.settings import Count, Epochs, Weight
from stretto.state import State
from stretto.tasks import Task


@dataclass(frozen=True)
class TokenHaltingConfig(DepthConfig):
    anytime_epochs: Epochs = 1
    """Epochs of training the pooled head to answer after every layer, together with the backbone."""
    oracle: Oracle = "stays"
    """The target depth: the first layer from which the answer 'stays' right (never right: all layers), or the
    'first' that is right, where a layer costs λ, as published."""
    penalty: Weight = 0.05
    """λ: what one more layer must be worth in correctness (0 to 1), with the oracle 'first'."""
    folds: Count = 5
    """Number of folds of the training texts. Each is answered by heads trained on the other folds, to learn which
    answers are right. 0 or 1: by the head itself, which was trained on all texts."""


class TokenHalting(DepthAdaptive):
    name = "token_halting"
    Config = TokenHaltingConfig
    needs = Needs(right_or_wrong=True)
    known_after = 1
    monotone = False  # the predictor is counted for all sequences it runs on, also where it freezes nothing
    dial = Dial(
        "quantile", "each token runs to the depth that suffices with this probability; 1 runs to the end",
        off=1.0, sweep=spaced(1.0, 0.0, steps=20), upper=1.0,
    )  # fmt: skip

    def __init__(self, config: TokenHaltingConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.predictor = nn.Linear(shape.d, shape.n_layers)

    def depths(self, state: State) -> Tensor:
        on = state.dial != self.dial.off
        asked = on[state.sequence]  # sequences that run in full do not use the predictor
        state.add_macs(state.lengths * on * self.shape.d * self.shape.n_layers)
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
            prepare=self.note_oracle if config.folds > 1 else None,
        )  # fmt: skip
        return [self.finetuning(), anytime, halting]

    def halting_loss(self, batch: TrainingBatch) -> Tensor:
        mask = batch.inputs.attention_mask.bool()
        with torch.no_grad():
            states = batch.engine.hidden_states(batch.inputs)
            if (oracle := batch.inputs.notes.get("oracle")) is None:  # [B, T]
                right = self.correct_tokens(self.pooled_head, batch.engine.as_heads_read(states), batch.labels)
                oracle = oracle_of(right, self.config)
        halting = cross_entropy(self.predictor(states[1][mask]), oracle[mask].long() - 1)
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

    def correct_tokens(self, head: PooledHead, states: list[Tensor], labels: Tensor) -> Tensor:
        """L states [B, T, d], [B] -> [L, B, T] bool: is the answer of this token alone right after this layer?"""
        every = labels.unsqueeze(1)  # every token of a text has its label
        return torch.stack([self.task.correct(head.of_token(state), every) for state in states])

    @torch.no_grad()
    def note_oracle(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        """The oracle depth of every training token, from heads that have not seen its text."""
        pool, folds = self.pooled_head.pool_padded, self.config.folds
        pooled, given = [], []
        for inputs, labels in batches:
            states = engine.as_heads_read(engine.hidden_states(inputs))
            pooled.append(torch.stack([pool(state, inputs.attention_mask) for state in states], dim=1))  # [B, L, 2 d]
            given.append(labels)
        all_labels, read = torch.cat(given), torch.cat(pooled)

        def fresh() -> PooledHead:
            return PooledHead(self.shape.d, self.shape.n_labels, self.config.dropout, self.dial.off)

        def loss(answers: Tensor, index: Tensor) -> Tensor:
            return torch.stack([self.task.loss(z, all_labels[index]).mean() for z in answers.unbind(dim=1)]).mean()

        heads = held_out(fresh, read, loss, folds, self.config.head_learning_rate)
        oracle: list[Tensor] = []
        for inputs, labels in batches:
            states = engine.as_heads_read(engine.hidden_states(inputs))
            for row, label in enumerate(labels):
                alone = [state[row : row + 1, inputs.attention_mask[row].bool()] for state in states]
                head = cast(PooledHead, heads[len(oracle) % folds])
                oracle.append(oracle_of(self.correct_tokens(head, alone, label.unsqueeze(0)), self.config)[0])
        return {"oracle": oracle}
