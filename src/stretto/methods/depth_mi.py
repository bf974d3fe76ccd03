"""Depth by mutual information: a word's number of layers follows from how informative it is about the label.

Before training, the mutual information of each word with the labels is counted on the training texts. As published,
more informative words get fewer layers; by default here they get more, and the others few (`direction`). A word is
frozen at its depth, while others go deeper. Depths come from a table: nothing is predicted in inference.

Liu, Meng, Zhou, Chen, Xu: *Faster Depth-Adaptive Transformers*, AAAI 2021 (MI based estimation).

    MI(x) = Σ_y Σ_{i_x, i_y} P(i_x, i_y) log(P(i_x, i_y) / (P(i_x) P(i_y)))   -> `mutual_information`, Eq. 2
    MI_log(x) = -log max(MI(x), ε); d(x) = its bin among N of equal width     -> `equal_width_depths`, Eq. 3
    informative words deep: N + 1 - d(x)                                      -> `reversed_depths`
    freeze after d(x) layers; the pooled head at n_max                        -> `stretto.methods.depths`

Differs from the paper:

- Informative words go deep (`direction="shallow"`: as published).
- The tokenizer defines the words, and all pieces of a word have its depth. Words that are not in the (truncated)
  training texts, and special tokens, go through all layers (`special="deepest"`: special tokens as deep as the deepest
  word of their text). For regression, labels are first sorted into bins of equal size.
- The paper does not define the depth of words without information (equally frequent with each label), whose logarithm
  is infinite. Here they have the information ε. They are at one end of the scale, so ε decides the depths of all
  other words, and with them the cost. In the direction 'shallow' it is very small, so that words with any information
  are shallow. In the direction 'deep' it is about what a word has by chance, 1 / n of n training texts, so that only
  words with more go deep.
- Training starts from a fine-tuned model, and some texts run in full, so that the model's own head keeps its quality.
  It answers with the dial off; the pooled head answers with the dial on.
- The optimizer is the same as for all methods here.
- `table="random"` is a control: the same depths, shuffled over the words.

Dial: 0 is the full model (all layers), 1 the estimated depths (the default of training), above 1 fewer layers:
d = ceil(L - dial (L - d(x))), at least 1. Words in the deepest bin keep all layers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from stretto.engine.reference import ReferenceEngine
from stretto.methods.base import Batches, Dial, Notes, Shape, Stage
from stretto.methods.depths import WordDepthConfig, WordDepths
from stretto.methods.settings import Positive, Range
from stretto.methods.word_counts import texts_with_words
from stretto.tasks import Task


@dataclass(frozen=True)
class DepthMIConfig(WordDepthConfig):
    direction: Literal["deep", "shallow"] = "deep"
    """Depth of words that are informative about the label: 'deep' (many layers), or 'shallow' (few), as published."""
    smoothing: Positive = 0.1
    """Added to each of the four counts behind a word and a label, so that none is 0."""
    least_information: Annotated[float, Range(0, 1, without=(1,))] = 0.0
    """ε: words with less information than this count as words with just this. It decides the cost: they set the last
    bin, so a smaller ε makes all bins wider and moves all other words away from it: shallower in the direction
    'shallow', else deeper. 0: by the direction, 1e-12 or 1 / n of n texts (see above)."""
    training_strength: Positive = 1.0
    """The dial of the training. To use dials far beyond the depths of the table, train there."""
    label_bins: Annotated[int, Range(2)] = 5
    """For regression: bins of equal size that replace labels."""


def mutual_information(texts_with: Tensor, texts: Tensor, smoothing: float) -> Tensor:
    """[V, C] texts of each label with the word, [C] texts of each label -> [V] mutual information, in nats."""
    texts_with, texts = texts_with.double(), texts.double()
    both = texts_with + smoothing  # the word and the label
    word_only = texts_with.sum(dim=1, keepdim=True) - texts_with + smoothing
    label_only = texts - texts_with + smoothing
    neither = texts.sum() - texts - word_only + 2 * smoothing
    total = texts.sum() + 4 * smoothing
    found = torch.zeros_like(both)
    for cell, same_word, same_label in (
        (both, word_only, label_only),
        (word_only, both, neither),
        (label_only, neither, both),
        (neither, label_only, word_only),
    ):
        found += cell / total * (cell * total / ((cell + same_word) * (cell + same_label))).log()
    return found.sum(dim=1).clamp(min=0)  # of words without information it may be -1e-16


def equal_width_depths(information: Tensor, n_depths: int, least: float) -> Tensor:
    """[V] MI -> [V] depth 1..n_depths: bins of equal width of -log max(MI, least), the highest MI in the first."""
    scaled = -information.double().clamp(min=least).log()
    width = (scaled.max() - scaled.min()) / n_depths
    if float(width) == 0:  # all words have the same information
        return torch.full_like(scaled, n_depths, dtype=torch.long)
    return ((scaled - scaled.min()) / width).floor().long().clamp(max=n_depths - 1) + 1


def chance_or_less(direction: str, texts: int) -> float:
    """ε by the direction: close to 0, or what a word has by chance in so many texts."""
    return 1e-12 if direction == "shallow" else 1 / max(texts, 2)


def reversed_depths(depths: Tensor, n_depths: int) -> Tensor:
    """[V] depths 1..N -> [V] N + 1 - d; if all words have the same depth, they keep it."""
    return depths if bool((depths == depths[:1]).all()) else n_depths + 1 - depths


def towards(depth: Tensor, dial: Tensor, n_layers: int) -> Tensor:
    """[n], [n] -> [n]: ceil(L - dial (L - d)), from all layers (dial 0) to the depth itself (1) and below."""
    # rounded first: 12 - 0.1 * 10 must not be a little more than 11
    return (n_layers - dial * (n_layers - depth)).round(decimals=9).ceil().clamp(min=1).long()


class DepthMI(WordDepths):
    name = "depth_mi"
    Config = DepthMIConfig
    measure = "mutual information"
    dial = Dial(
        "strength", "how far words go down from all layers (0) to the depths of the table (1), and beyond",
        off=0.0, sweep=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0),
    )  # fmt: skip

    def __init__(self, config: DepthMIConfig, shape: Shape, task: Task) -> None:
        super().__init__(config, shape, task, width=2)  # MI(x) and d(x)

    def stages(self) -> list[Stage]:
        depths = self.depth_stage(dial=self.config.training_strength)
        return [self.finetuning(), dataclasses.replace(depths, prepare=self.count_words)]

    def word_measure(self) -> Tensor:
        return self.table.values[:, 0]

    def hardness(self, measure: Tensor) -> Tensor:
        return -measure if self.config.direction == "shallow" else measure

    def word_depths(self, rows: Tensor, dial: Tensor) -> Tensor:
        depths = self.table.values[:, 1]
        if self.config.direction == "deep":
            depths = reversed_depths(depths, self.shape.n_layers)
        return towards(depths[rows], dial, self.shape.n_layers)

    def count_words(self, engine: ReferenceEngine, batches: Batches) -> Notes:
        """The table, counted on the training texts."""
        labels = torch.cat([labels for _, labels in batches])
        self.count(batches, *self.task.classes(labels, self.config.label_bins))
        return {}

    def count(self, batches: Batches, classes_of: Tensor, n_classes: int) -> None:
        """Fill the table from texts whose classes ([n], in order) are known."""
        tally, texts = texts_with_words(batches, classes_of, n_classes), torch.bincount(classes_of, minlength=n_classes)
        self.check_words(tally)
        information = mutual_information(tally.sums, texts, self.config.smoothing)
        least = self.config.least_information or chance_or_less(self.config.direction, int(texts.sum()))
        depths = equal_width_depths(information, self.shape.n_layers, least)
        values = torch.stack([information, depths], dim=1)
        self.table.fill(tally.keys, tally.pieces, tally.sums.sum(dim=1), values)
