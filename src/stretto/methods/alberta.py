"""ALBERTa: gates predicted from the lower layers scale each upper layer, and decide where to stop.

The first k layers run unchanged. From their output a structure predictor distributes a probability over the number of
upper (adaptive) layers that are needed. Summed from the top it gives a gate for each layer: a factor on what its
attention and its FFN add. Gates fall from layer to layer. In training, layers run with their gates, and one head
answers after each of them. The loss weights each answer by its probability, which trains the predictor. In inference, a
sequence leaves before the first layer whose gate is too small, and the head answers.

Li, Li, Wang: *From Static to Dynamic: A Deeper, Faster, and Adaptive Language Modeling Approach* (ALBERTa).

    probs = softmax(MLP(mean of h_k, or h_k of the first token))        -> `StructurePredictor`
    RevPC: reverse, cumulate, reverse: p_i = Σ_{j>=i} probs_j, p_1 = 1  -> `revpc`
    H̃ = LN(H + p_i Attn(H)), H' = LN(H̃ + p_i FFN(H̃))                    -> `Decision.gate`, which the engines apply
    run adaptive layer i while p_i >= γ                                 -> `ALBERTa.decide`
    L = Σ_j probs_j L_j + μ Σ_i p_i, which is the expected depth        -> `ALBERTa.exits_loss`, `leaving`
    L = task loss + μ Σ_i p_i, leaving after drawn layers               -> `ALBERTa.drawn_loss`

Differs from the paper:

- Predictor and head read the mean of the tokens (`pool="cls"`: as published). In the lower half of a sentence encoder
  the first token hardly differs between texts, so all texts would get the same gates.
- It works on any encoder, also one pretrained without gates. In post-LN layers the gate is inside the norm, as above.
  The paper's layers are pre-LN: H + p_i Attn(LN(H)). Pre-LN backbones are gated so.
- A pretrained encoder uses all its layers and has no reason to use fewer. So a penalty μ on the sum of gates is added
  (0: as published), and the predictor starts with all gates almost open.
- The head must learn to read the states of lower layers. Either all exits of a pass are in the loss
  (`exit_loss="all"`), or a fraction of the training texts leaves after a random layer (`"drawn"`; `exit_share` 0: as
  published).
- A sequence leaves as a whole, so tasks that answer every token work too. The model's token head reads the states of
  that layer, and layers are drawn in training.
- `stretto.training.pretraining` pretrains an encoder with its gates, as published.

Dial: γ, the gate below which a layer is not run. 0 runs all layers with their gates: the trained model. Off is -1:
gates are ignored, as in plain transformers. After training with gates this is only a comparison. The predictor runs and
is counted there too, so that cost never rises along the dial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn

from stretto.backbones.heads import READINGS, Head
from stretto.engine.decider import OwnHead
from stretto.errors import StrettoError
from stretto.methods.base import ANY_ANSWER, Dial, Method, Shape, Stage, TrainingBatch
from stretto.methods.exits import Pool
from stretto.methods.pooled_head import MeanHead
from stretto.methods.settings import Count, Epochs, FinetuningConfig, LearningRate, Share, Size, TrueShare, Weight
from stretto.state import Compared, Decision, State
from stretto.tasks import Task

IGNORED, GATED = -1.0, 0.0  # dials at which all layers run, without and with their gates


@dataclass(frozen=True)
class ALBERTaConfig(FinetuningConfig):
    num_train_epochs: Epochs = 3
    """Epochs of ordinary fine-tuning (the first stage); 0 skips it, for encoders pretrained with gates."""
    gate_epochs: Epochs = 3
    """Epochs of training with gates (the second stage)."""
    gate_learning_rate: LearningRate = 6e-5
    """Learning rate of the backbone in the second stage."""
    predictor_learning_rate: LearningRate = 1e-3
    """Learning rate of the structure predictor."""
    pool: Pool = "mean"
    """What predictor and head read: the 'mean' of the tokens, or 'cls', the first token, as published (then the model's
    own head answers)."""
    static_layers: Count = 0
    """k: layers that always run, without a gate; 0 means a third of them."""
    depth_penalty: Weight = 0.02
    """μ: penalty of a fully open gate, also for texts that leave before its layer (published: 0)."""
    exit_loss: Literal["all", "drawn"] = "all"
    """Which exits answer in training: 'all' of every text, weighted by their probability, or one 'drawn' at random."""
    exit_share: Share = 0.5
    """With 'all': fraction of the loss in which all exits weigh the same. With 'drawn': fraction of the texts that
    leave after a random layer, drawn in every step. Published: 0."""
    dropout: Share = 0.1
    """Dropout inside the head that reads the mean."""
    predictor_size: Size = 64
    """Hidden size of the structure predictor."""
    initial_gate: TrueShare = 0.95
    """Approximate gate of the last layer when training starts."""
    early_exit: bool = True
    """Whether sequences leave by the dial; if not, all layers run with their gates."""
    revpc: bool = True
    """Whether gates are cumulated, so that they fall from layer to layer; if not, each is a separate sigmoid."""


def revpc(probabilities: Tensor) -> Tensor:
    """[…, A] that sum to 1 -> […, A] gates p_i = Σ_{j>=i} probabilities_j: reverse, cumulate, reverse. p_1 is 1."""
    gates = probabilities.flip(-1).cumsum(dim=-1).flip(-1)
    return torch.cat([torch.ones_like(gates[..., :1]), gates[..., 1:]], dim=-1)  # the sum itself may be 1 - 1e-7


def leaving(gates: Tensor, cumulated: bool) -> tuple[Tensor, Tensor]:
    """[B, A] gates -> [B, A + 1] the probability to leave after 0..A adaptive layers, and [B] how many are expected."""
    reached = gates if cumulated else gates.cumprod(dim=1)  # [B, A] the probability to run adaptive layer i
    ends = torch.ones_like(gates[:, :1]), torch.zeros_like(gates[:, :1])
    return torch.cat([ends[0], reached], dim=1) - torch.cat([reached, ends[1]], dim=1), reached.sum(dim=1)


class StructurePredictor(nn.Module):
    """[B, d] what is read after layer k -> [B, A] gates of the adaptive layers."""

    def __init__(self, d: int, size: int, n_adaptive: int, initial_gate: float, cumulated: bool) -> None:
        super().__init__()
        self.cumulated = cumulated
        self.hidden, self.out = nn.Linear(d, size), nn.Linear(size, n_adaptive)
        self.macs = d * size + size * n_adaptive  # for one sequence
        open_wide = math.log(initial_gate / (1 - initial_gate))
        with torch.no_grad():
            if cumulated:  # the last of A logits gets that share of the softmax when the others are 0
                self.out.bias.zero_()
                self.out.bias[-1] = open_wide + math.log(max(n_adaptive - 1, 1))
            else:
                self.out.bias.fill_(open_wide)

    def forward(self, read: Tensor) -> Tensor:
        logits = self.out(nn.functional.gelu(self.hidden(read))).float()
        return revpc(logits.softmax(dim=-1)) if self.cumulated else logits.sigmoid()


@dataclass(frozen=True)
class Lesson:
    """The context of a training pass: what it does besides running at its dial."""

    last_layer: Tensor | None = None
    """[B] the layer after which each text leaves, regardless of its gates; None: the last layer."""
    read: Callable[[Tensor, State], Tensor] | None = None
    """Pools the rows as the head reads them, if every exit has to answer."""
    gates: list[Tensor] = field(default_factory=list)
    """Collects the gates of the pass, [B, A]."""
    pooled: list[Tensor] = field(default_factory=list)
    """Collects what the head would read after each layer from k on, but the last: [B, d] each."""


class ALBERTa(Method):
    name = "alberta"
    Config = ALBERTaConfig
    verbs = frozenset({"gate", "exit"})
    points = frozenset({"before", "after"})
    needs = ANY_ANSWER
    dial = Dial(
        "gate", "leave before the first layer whose gate is below this; 0 runs all layers gated, -1 all without gates",
        off=IGNORED, sweep=(IGNORED, *(step / 20 for step in range(21))), lower=IGNORED, upper=1.0,
        trained=GATED,
    )  # fmt: skip

    def __init__(self, config: ALBERTaConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task)
        self.static_layers = config.static_layers or max(shape.n_layers // 3, 1)
        if not 1 <= self.static_layers < shape.n_layers:
            raise StrettoError(
                f"Expected static_layers between 1 and {shape.n_layers - 1}, got {config.static_layers} for "
                f"{shape.n_layers} layers. Leave at least one layer to be gated."
            )
        if not config.early_exit:
            self.dial = Dial(
                "gate", "0 runs all layers with their gates, -1 all without",
                off=IGNORED, sweep=(IGNORED, GATED), lower=IGNORED, upper=GATED,
                trained=GATED,
            )  # fmt: skip
        n_adaptive = shape.n_layers - self.static_layers
        self.predictor = StructurePredictor(
            shape.d, config.predictor_size, n_adaptive, config.initial_gate, config.revpc
        )
        if config.pool == "mean" and task.answers == "sequence":
            self.mean_head = MeanHead(shape.d, shape.n_labels, config.dropout, off=IGNORED)

    def own_head(self) -> MeanHead | None:
        return cast(MeanHead | None, self._modules.get("mean_head"))

    def decide(self, state: State) -> Decision | None:
        adaptive = state.layer - self.static_layers  # which of the adaptive layers this is, from 1
        lesson = state.context if isinstance(state.context, Lesson) else None
        notes = state.notes_of(self).sequences
        if state.point == "before":
            if adaptive < 1 or bool((state.dial < 0).all()):
                return None
            return Decision(gate=torch.where(state.dial < 0, 1.0, notes["gates"][:, adaptive - 1]))
        if adaptive < 0:
            return None
        if adaptive == 0:
            notes["gates"] = self.predictor(READINGS[self.config.pool].of_rows(state.rows, state))
            state.add_macs(self.predictor.macs)
            if lesson is not None:
                lesson.gates.append(notes["gates"])
        following = notes["gates"][:, adaptive]  # of the next layer
        exit = following < state.dial.to(following)
        if lesson is not None and lesson.last_layer is not None:
            exit = exit | (lesson.last_layer[state.ids] <= state.layer)
        if lesson is not None and lesson.read is not None:
            read = lesson.read(state.rows, state)
            lesson.pooled.append(torch.zeros_like(read).index_copy(0, state.ids, read))
        return Decision(exit=exit, compared=Compared("next gate", following, state.dial))

    def stages(self) -> list[Stage]:
        config = self.config
        gates = Stage(
            "gates", config.gate_epochs, config.gate_learning_rate, config.predictor_learning_rate,
            decides=True, dials=(GATED,), objective=self.exits_loss if self.answers_all else self.drawn_loss,
        )  # fmt: skip
        return [self.finetuning(), gates] if config.num_train_epochs else [gates]

    @property
    def answers_all(self) -> bool:
        """Whether all exits of a text answer in training. This is not possible in a combination whose other part
        answers with its own head, because that head is not accessible here."""
        config = self.config
        of_sequences = self.task.answers == "sequence" and not self.overruled
        return config.exit_loss == "all" and config.early_exit and of_sequences

    def exits_loss(self, batch: TrainingBatch) -> Tensor:
        config, backbone = self.config, batch.engine.backbone
        head: OwnHead | Head = self.own_head() or backbone.head
        lesson = Lesson(read=lambda rows, state: head.pool_rows(backbone.for_head(rows), state))
        last = batch.run(GATED, context=lesson).logits
        answers = [*map(head, lesson.pooled), last]  # after layers k..L
        losses = torch.stack([self.loss(logits, batch.targets) for logits in answers], dim=1)  # [B, A + 1]
        (gates,) = lesson.gates
        probable, depth = leaving(gates, config.revpc)
        if config.revpc:  # the first gate is always open: no text leaves after layer k
            losses, probable = losses[:, 1:], probable[:, 1:]
        loss = (1 - config.exit_share) * (probable * losses).sum(dim=1) + config.exit_share * losses.mean(dim=1)
        return (loss + config.depth_penalty * depth).mean()

    def drawn_loss(self, batch: TrainingBatch) -> Tensor:
        lesson = Lesson(self.draw_last_layers(len(batch.labels), batch.labels.device))
        logits = batch.run(GATED, context=lesson).logits
        (gates,) = lesson.gates
        return self.loss(logits, batch.targets).mean() + self.config.depth_penalty * gates.sum(dim=1).mean()

    def draw_last_layers(self, texts: int, device: torch.device) -> Tensor:
        """[texts] for a share of them a random layer where a text may leave, for the others the last layer."""
        n_layers = self.shape.n_layers
        share = self.config.exit_share if self.config.early_exit else 0.0
        drawn = torch.randint(self.static_layers, n_layers, (texts,), device=device)
        return torch.where(torch.rand(texts, device=device) < share, drawn, n_layers)
