"""Depth-Adaptive Transformer: every token of a translation decides how many decoder blocks it needs.

The output head reads the decoder after every block. Training makes all of these answers useful: *aligned* training sums
the losses of all blocks, every token at the same depth; *mixed* training samples depths per token, and a token that has
left hands its state up unchanged. Then a mechanism learns when to leave, from an oracle that knows the right text: the
block with the highest likelihood of it, minus a price for depth. A token that has left is not computed above; deeper
tokens see its last state as keys and values there.

Reference: Elbayad, Gu, Grave, Auli: Depth-Adaptive Transformer, ICLR 2020.

    aligned loss        `block_weights`:  L_dec = - Σ_n ω_n LL^n / Σ_n ω_n
    mixed loss          M random sequences of exits, mean of their LL
    joint loss          L_dec + α L_exit, L_exit = cross-entropy of the exit distribution and the oracle
    oracles             `oracles.token_oracle`, `oracles.sequence_oracle` with σ and λ
    sequence            q(n | x) = softmax(W · mean encoder state + b)
    multinomial         q_t(n) = softmax(W h_t¹ + b)
                        `lead`, `shift`: leave at argmax_n log q(n) + shift · n
    geometric           χ_t^n = σ(w · h_t^n + b), q_t(n) = χ^n Π_{n'<n} (1 - χ^n')
    confidence          leave where the greatest probability exceeds T_n

Differs from the paper: All blocks share the model's output head. The dial shifts the mechanism after training
(`shift`): 0.5 is the paper's decision (multinomial: argmax; geometric: the first χ > 0.5), 0 the full decoder, 1 the
first block. The paper tunes thresholds by 10,000 translations of the dev data; `stretto search` draws as many, screens
them, and translates with the best. It screens by the divergence of each block from the last one, on the texts that the
full model writes (with the objective `score`: by how many tokens of the right dev texts each block has right). Keys and
values of tokens that left are computed only when needed; the texts are the same. Losses are means over tokens.

Dial: `eagerness`, how readily tokens leave. When to use it: where a decoder writes texts. Start with `geometric`.
`confidence` needs no training, but computes the output head after every block. With a large vocabulary this costs more
than the blocks it saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stretto.backbones import Backbone
from stretto.backbones.decoder import EncoderDecoder
from stretto.engine.decode_reference import DecoderReference, Given
from stretto.errors import StrettoError
from stretto.methods.base import Dial, Method, Needs, Shape, Stage, TrainingBatch
from stretto.methods.oracles import (
    geometric_loss,
    multinomial_loss,
    sequence_oracle,
    token_oracle,
    token_values,
)
from stretto.methods.settings import Epochs, LearningRate, Settings, Size, Weight
from stretto.state import Compared, Decision, State
from stretto.tasks import Task

#: ω_n by name, as the paper compares them.
WEIGHTS = {"uniform": 0.0, "linear": 1.0, "root": 0.5, "inverse_root": -0.5, "inverse": -1.0}


@dataclass(frozen=True)
class DepthAdaptiveConfig(Settings):
    training: Literal["aligned", "mixed", "last"] = "aligned"
    """What the blocks learn from: `aligned` (all blocks' losses), `mixed` (sampled exits), or `last`: only the last
    block's loss, an ordinary model to compare with."""
    block_weights: Literal["uniform", "linear", "root", "inverse_root", "inverse"] = "uniform"
    """ω_n of aligned training: 1, n, √n, 1/√n or 1/n."""
    samples: Size = 3
    """M, sequences of exits per text in mixed training."""
    mechanism: Literal["geometric", "multinomial", "sequence", "confidence"] = "geometric"
    """What decides when a token leaves."""
    oracle: Literal["correctness", "likelihood"] = "correctness"
    """What the mechanism learns from."""
    oracle_sigma: Weight = 0.0
    """σ: how far around a token the oracle looks; 0 is the token alone."""
    oracle_penalty: Weight = 0.05
    """λ: the oracle's price of each block."""
    exit_weight: Weight = 0.1
    """α: the weight of the exit loss beside the decoder's."""
    num_train_epochs: Epochs = 20
    """Epochs of the first stage, in which the blocks learn."""
    learning_rate: LearningRate = 1e-3
    """Learning rate of the first stage."""
    exit_epochs: Epochs = 2
    """Epochs of the second stage, in which the mechanism is trained too."""
    exit_learning_rate: LearningRate = 1e-3
    """Learning rate of the mechanism."""
    joint_learning_rate: LearningRate = 2e-4
    """Learning rate of the model in the second stage; 0 freezes it."""
    thresholds: tuple[tuple[float, ...], ...] = ()
    """For `confidence`: T_1..T_{N-1} for each step of the dial, from expensive to cheap. Empty: equal thresholds."""


def block_weights(name: str, count: int) -> Tensor:
    """[N] ω_n, summing to 1."""
    weights = torch.arange(1, count + 1, dtype=torch.float32) ** WEIGHTS[name]
    return weights / weights.sum()


def shift(dial: Tensor) -> Tensor:
    """The logit of 1 - dial: what is added to the score of depth. +∞ at 0 (never leave), 0 at 0.5, -∞ at 1."""
    return torch.logit(1 - dial)


def lead(logits: Tensor) -> Tensor:
    """[R, N] -> [R, N - 1]: how far block n leads the deeper ones, min_{m > n} (log q(n) - log q(m)) / (m - n).

    The first block whose lead is at least `shift` is argmax_n log q(n) + shift · n."""
    depth = torch.arange(logits.shape[1], device=logits.device)
    further = depth - depth.unsqueeze(1)  # [N, N]: m - n
    gaps = (logits.unsqueeze(2) - logits.unsqueeze(1)).double() / further
    return gaps.masked_fill(further <= 0, torch.inf).amin(dim=2)[:, :-1]


class DepthAdaptive(Method):
    name = "depth_adaptive"
    Config = DepthAdaptiveConfig
    points = frozenset({"before"})
    stacks = frozenset({"decoder"})
    verbs = frozenset({"exit"})
    needs = Needs(answers=("text",))
    monotone = False
    dial = Dial(
        "eagerness", "how readily tokens leave the decoder: 0 never, 0.5 as trained, 1 after the first block",
        off=0.0, sweep=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), upper=1.0,
    )  # fmt: skip

    def __init__(self, config: DepthAdaptiveConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        if config.mechanism == "confidence":
            self.set_thresholds(config.thresholds)

    def set_thresholds(self, thresholds: tuple[tuple[float, ...], ...]) -> None:
        """One step of the dial for each, from expensive to cheap; none: equal thresholds."""
        self.config = dataclasses.replace(self.config, thresholds=thresholds)
        steps = len(thresholds) or 20
        self.dial = dataclasses.replace(
            type(self).dial,
            meaning="how readily tokens leave the decoder: 0 never, 1 with the lowest thresholds",
            sweep=tuple(round(step / steps, 6) for step in range(steps + 1)),
        )  # fmt: skip

    def attach(self, backbone: Backbone) -> None:
        assert isinstance(backbone, EncoderDecoder)
        self.n_blocks = backbone.n_blocks
        outputs = {"geometric": 1, "multinomial": self.n_blocks, "sequence": self.n_blocks}
        if self.config.mechanism in outputs:
            gate = nn.Linear(backbone.d, outputs[self.config.mechanism])
            nn.init.zeros_(gate.weight)
            nn.init.zeros_(gate.bias)
            self.add_module(self.config.mechanism, gate)
        thresholds = self.config.thresholds
        if any(len(each) != self.n_blocks - 1 for each in thresholds):
            raise StrettoError(
                f"Expected {self.n_blocks - 1} thresholds for each step of the dial, one per block but the last, got "
                f"{len(thresholds[0])}. Let `stretto search` write them."
            )

    @property
    def gate(self) -> nn.Linear:
        """What the mechanism has learned; its name is the mechanism's."""
        return getattr(self, self.config.mechanism)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """A model that was trained for one mechanism may be opened with another, which is then untrained."""
        own = {name: value for name, value in state_dict.items() if name.startswith(f"{self.config.mechanism}.")}
        return super().load_state_dict(own or self.state_dict(), strict, assign)

    # ---- deciding

    def decide(self, state: State) -> Decision:
        """Before block n + 1: which tokens leave with what block n wrote."""
        n = state.layer - 1
        if not bool((state.dial > self.dial.off).any()):
            return Decision()
        if self.config.mechanism == "confidence":
            return self.sure(state, n)
        if self.config.mechanism == "geometric":
            state.add_macs(self.gate.weight.numel())
            value, bound = self.gate(state.rows).squeeze(1).double(), shift(state.dial)
            return Decision(freeze=value > bound, compared=Compared("gate", value, bound, logits=True))
        notes = state.notes_of(self).sequences
        if "lead" not in notes:  # once for each token, after its first block
            read = state.providers["source"]() if self.config.mechanism == "sequence" else state.rows
            state.add_macs(self.gate.weight.numel())
            notes["lead"] = lead(self.gate(read))
        value, bound = notes["lead"][:, n - 1], shift(state.dial)
        return Decision(freeze=value >= bound, compared=Compared("lead", value, bound, logits=True))

    def sure(self, state: State, n: int) -> Decision:
        """Greatest probability above T_n. The output head is computed only where some dial lets tokens leave."""
        thresholds = self.thresholds_at(state.dial)[:, n - 1]
        if bool((thresholds >= 1).all()):
            return Decision()
        logits = state.exit_logits
        greatest = torch.exp(logits.amax(dim=-1) - logits.logsumexp(dim=-1))
        return Decision(freeze=greatest > thresholds, compared=Compared("confidence", greatest, thresholds))

    def thresholds_at(self, dial: Tensor) -> Tensor:
        """[R] dials -> [R, N - 1]"""
        table = self.config.thresholds
        if not table:
            return (1 - dial).unsqueeze(1).expand(-1, self.n_blocks - 1)
        rows = torch.tensor([(1.0,) * (self.n_blocks - 1), *table], device=dial.device)
        return rows[(dial * len(table)).round(decimals=6).ceil().long()]

    # ---- learning

    def stages(self) -> list[Stage]:
        config, blocks = self.config, self.finetuning()
        if config.mechanism == "confidence":
            return [blocks]
        exits = Stage(
            "exits", config.exit_epochs, config.joint_learning_rate, config.exit_learning_rate, decides=True,
            trains_backbone=config.joint_learning_rate > 0, dials=(0.5,), best_by="last", objective=self.joint_loss,
        )  # fmt: skip
        return [blocks, exits]

    def finetuning(self) -> Stage:
        """All blocks learn to answer."""
        return Stage(
            "backbone", self.config.num_train_epochs, self.config.learning_rate, decides=True, dials=(self.dial.off,),
            objective=self.decoder_loss,
        )  # fmt: skip

    def decoder_loss(self, batch: TrainingBatch) -> Tensor:
        decoder, given = self.teach(batch)
        return self.loss_of(decoder, given, decoder.states(given), batch.labels)

    def loss_of(self, decoder: DecoderReference, given: Given, states: list[Tensor], labels: Tensor) -> Tensor:
        """L_dec. `states`: after each block, with every token at that depth."""
        if self.config.training == "mixed":
            times = self.config.samples
            exits = torch.randint(1, self.n_blocks + 1, (times * len(labels), labels.shape[1]), device=labels.device)
            return self.loss_at_block(decoder, decoder.states_at(given.repeated(times), exits), labels.repeat(times, 1))
        if self.config.training == "last":
            return self.loss_at_block(decoder, states[-1], labels)
        weights = block_weights(self.config.block_weights, self.n_blocks).tolist()
        losses = [self.loss_at_block(decoder, hidden, labels) for hidden in states]
        return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()

    def loss_at_block(self, decoder: DecoderReference, hidden: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of all tokens, read from [B, T, d]. The output head costs most: it reads no padding."""
        there = labels >= 0
        return self.task.loss(decoder.logits(hidden[there]).unsqueeze(0), labels[there].unsqueeze(0)).mean()

    def joint_loss(self, batch: TrainingBatch) -> Tensor:
        """L_dec + α L_exit."""
        decoder, given = self.teach(batch)
        states = decoder.states(given)
        exit_loss = self.exit_loss(given, states, self.oracle(decoder, states, batch.labels), batch.labels)
        if self.config.joint_learning_rate == 0:
            return self.config.exit_weight * exit_loss
        return self.loss_of(decoder, given, states, batch.labels) + self.config.exit_weight * exit_loss

    @torch.no_grad()
    def oracle(self, decoder: DecoderReference, states: list[Tensor], labels: Tensor) -> Tensor:
        """[B, T] the block at which each token should leave."""
        config = self.config
        values = torch.stack([token_values(decoder.logits(hidden), labels, config.oracle) for hidden in states])
        if config.mechanism == "sequence":
            return sequence_oracle(values, config.oracle_penalty)
        return token_oracle(values, config.oracle_penalty, config.oracle_sigma)

    def exit_loss(self, given: Given, states: list[Tensor], oracle: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy between the exit distribution and the oracle, a mean over tokens."""
        if self.config.mechanism == "geometric":
            gates = torch.stack([self.gate(hidden).squeeze(2) for hidden in states[:-1]])
            losses = geometric_loss(gates, oracle)
        elif self.config.mechanism == "multinomial":
            losses = multinomial_loss(self.gate(states[0]), oracle)
        else:
            mask = given.source_mask.unsqueeze(2)
            mean = (given.source * mask).sum(dim=1) / mask.sum(dim=1)
            losses = multinomial_loss(self.gate(mean).unsqueeze(1).expand(-1, oracle.shape[1], -1), oracle)
        there = labels >= 0
        return (losses * there).sum() / there.sum()

    def teach(self, batch: TrainingBatch) -> tuple[DecoderReference, Given]:
        """The encoder's output for the source, and the right texts as input of the decoder."""
        backbone = batch.engine.backbone
        assert isinstance(backbone, EncoderDecoder) and batch.last_states is not None
        source = batch.last_states()
        given = Given.from_labels(source, batch.inputs.attention_mask, batch.labels, backbone.config)
        return DecoderReference(backbone), given
