"""Depth by reconstruction: words that can be guessed from their context get few layers.

A masked language model that answers after every layer shows from which layer on a masked word can be guessed. A word
that can be guessed early gets few layers. This needs no labels. The losses are averaged by word and stored in a table.
In inference nothing is masked or predicted.

Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021 (reconstruction loss based estimation).

    masked LM with one head for all layers, Σ_n loss_n           -> `stretto.methods.reconstruction.AnytimeLM`
    loss_n of each word, masked in turn                          -> `stretto.methods.reconstruction.occurrence_losses`
    d(x) = argmin_n (loss_n + λ n)                               -> `reconstruction_depth`, Eq. 4
    freeze after d(x) layers; the pooled head at n_max           -> `stretto.methods.depths`

Differs from the paper: the sign before λ n is plus, as its own Table 4 shows. The table has the mean losses of
each word, over texts in which a fraction of all words is masked at a time. Masking every word in turn takes as many
passes as there are words; it is available for analysis (`occurrence_depths`, with `keep_estimator`). The masked LM is a
copy of the fine-tuned encoder with a new head, tied to the embeddings. Whole words are masked, and always replaced by
the mask token. A word of several pieces has their mean loss. Words that did not occur, and special tokens, go through
all layers. Two heads answer, as in `depth_mi`; `special="deepest"` and the control `table="random"` are the same too.

Dial: λ, what one more layer must gain in loss. 0 is the full model. The paper's λ = 0 (the best layer at any cost)
is the limit of small values. Training uses the published setting, 0.1.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.backbones import Backbone
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.methods.base import Batches, Dial, Notes, Shape, Stage, TrainingBatch
from stretto.methods.depths import WordDepthConfig, WordDepths
from stretto.methods.reconstruction import (
    AnytimeLM,
    choose_words,
    first_texts,
    masked,
    occurrence_losses,
    tally_losses,
    word_numbers,
)
from stretto.methods.settings import Count, Epochs, LearningRate, Positive, SomeShare
from stretto.state import Inputs
from stretto.tasks import Task


@dataclass(frozen=True)
class DepthReconstructionConfig(WordDepthConfig):
    penalty: Positive = 0.1
    """λ that the model is trained with (published: 0.1)."""
    reconstruction_epochs: Epochs = 2
    """Epochs of training the masked language model."""
    reconstruction_learning_rate: LearningRate = 5e-5
    """Learning rate of its encoder."""
    reconstruction_head_learning_rate: LearningRate = 1e-3
    """Learning rate of its head."""
    mask_share: SomeShare = 0.15
    """Fraction of the words that is masked at a time."""
    table_texts: Count = 2000
    """How many of the texts fill the table; 0 means all. Each takes 1 / mask-share passes."""
    keep_estimator: bool = False
    """Save the masked language model too, for depths of single occurrences. Doubles the size of the model."""


def reconstruction_depth(losses: Tensor, penalty: Tensor | float) -> Tensor:
    """[…, L] loss of each layer, […] λ -> […] depth 1..L = argmin_n (loss_n + λ n); ties go to the shallower."""
    n = torch.arange(1, losses.shape[-1] + 1, device=losses.device)
    weight = torch.as_tensor(penalty, dtype=torch.float64, device=losses.device).unsqueeze(-1)
    return (losses.double() + weight * n).argmin(dim=-1) + 1


class DepthReconstruction(WordDepths):
    name = "depth_reconstruction"
    Config = DepthReconstructionConfig
    measure = "loss at the last layer"
    dial = Dial(
        "penalty", "λ: what one more layer must gain in reconstruction loss; 0 runs all layers",
        off=0.0, sweep=(0.0, 0.001, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 1.0),
    )  # fmt: skip

    def __init__(self, config: DepthReconstructionConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task, width=shape.n_layers)
        self.estimator: AnytimeLM | None = None

    def attach(self, backbone: Backbone) -> None:
        if self.config.keep_estimator:
            self.estimator = self.new_estimator(backbone)

    def new_estimator(self, backbone: Backbone) -> AnytimeLM:
        if self.shape.mask_id is None:
            raise StrettoError("Expected a tokenizer with a mask token, got one without. Choose another encoder.")
        return AnytimeLM(copy.deepcopy(backbone.model), self.shape.mask_id).to(backbone.model.device)

    def word_measure(self) -> Tensor:
        return self.table.values[:, -1]

    def hardness(self, measure: Tensor) -> Tensor:
        return measure

    def word_depths(self, rows: Tensor, dial: Tensor) -> Tensor:
        return reconstruction_depth(self.table.values[rows], dial)

    def occurrence_depths(self, inputs: Inputs, penalty: float) -> Tensor:
        """[B, T] depth of each token, from its word in this very place; all layers for tokens of no word."""
        if self.estimator is None:
            raise StrettoError(
                "Expected a model that kept its masked language model, got one without. Train with --keep-estimator."
            )
        inputs = inputs.to(self.estimator.encoder.device)
        depth = reconstruction_depth(occurrence_losses(self.estimator, inputs), penalty)
        return torch.where(word_numbers(inputs) < 0, self.shape.n_layers, depth)

    # ---- training

    def stages(self) -> list[Stage]:
        config = self.config
        reconstruction = Stage(
            "reconstruction", config.reconstruction_epochs, 0.0, config.reconstruction_learning_rate,
            trains_backbone=False, decides=True, best_by="last", needs_labels=False,
            rates=(("estimator.head", config.reconstruction_head_learning_rate),),
            objective=self.reconstruction_loss, prepare=self.start_estimator, finish=self.fill_table,
        )  # fmt: skip
        return [self.finetuning(), reconstruction, self.depth_stage(dial=config.penalty)]

    def start_estimator(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        self.estimator = self.new_estimator(engine.backbone)
        return {}

    def reconstruction_loss(self, batch: TrainingBatch) -> Tensor:
        assert self.estimator is not None
        hidden = choose_words(word_numbers(batch.inputs), self.config.mask_share)
        return self.estimator(masked(batch.inputs, hidden, self.estimator.mask_id))

    def fill_table(self, engine: ReferenceEngine, batches: Batches) -> None:
        """The table, from the trained masked LM."""
        assert self.estimator is not None
        tally = tally_losses(self.estimator, first_texts(batches, self.config.table_texts), self.config.mask_share)
        self.check_words(tally)
        counts = tally.sums[:, -1]
        self.table.fill(tally.keys, tally.pieces, counts, tally.sums[:, :-1] / counts.unsqueeze(1))
        if not self.config.keep_estimator:
            self.estimator = None
