"""What is run: model shapes with random weights, and pools of random tokens with the lengths of known datasets.

A length mix is a log-normal distribution of token counts, cut at both ends:

| mix     | like                           | median | mean | standard deviation | range  |
|---------|--------------------------------|--------|------|--------------------|--------|
| sst     | SST-2, single sentences        | 22.7   | 25   | 11                 | 4–60   |
| ag_news | AG News, title and description | 50     | 53   | 18                 | 15–200 |
| imdb    | IMDB reviews, cut at 512       | 230    | 265  | 145                | 30–512 |

A pool is stratified (one length from each of n equally likely intervals), so that a small one is like the mix too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification

from stretto.errors import Registry
from stretto.state import Inputs

SHAPES: Registry[dict[str, int]] = Registry(
    "model shape",
    {
        "bert-base": {
            "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
        },
        "minilm-l6": {
            "num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536,
        },
        "tiny": {
            "num_hidden_layers": 6, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64,
            "vocab_size": 200,
        },
    },
)  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """A distribution of token counts; see above."""

    median: float
    sigma: float
    shortest: int
    longest: int

    @property
    def mean(self) -> float:
        """Before the ends are cut."""
        return self.median * math.exp(self.sigma**2 / 2)

    def sample(self, count: int, rng: random.Random) -> list[int]:
        """`count` lengths in random order, one from each of `count` equally likely intervals."""
        places = [(index + rng.uniform(0.001, 0.999)) / count for index in range(count)]
        lengths = [round(self.median * math.exp(self.sigma * NormalDist().inv_cdf(place))) for place in places]
        rng.shuffle(lengths)
        return [min(max(length, self.shortest), self.longest) for length in lengths]


MIXES: Registry[Mix] = Registry(
    "length mix",
    {"sst": Mix(22.7, 0.44, 4, 60), "ag_news": Mix(50, 0.33, 15, 200), "imdb": Mix(230, 0.7, 30, 512)},
)

# About how many tokens a pool may have, which bounds the time (BERT-base in fp32: 0.85 ms per token and full run).
POOL_TOKENS = 3500
SINGLE_TOKENS = 1200  # at batch 1 every sequence is a measurement of its own: fewer do


def pool_batches(mix: Mix, batch: int) -> int:
    """Batches in a pool: 12 of a single sequence, else 4; fewer where they would be too many tokens, but two.

    (Of a single batch there is nothing to sort.)"""
    most, tokens = (12, SINGLE_TOKENS) if batch == 1 else (4, POOL_TOKENS)
    return max(2, min(most, int(tokens / (batch * mix.mean))))


@dataclass(frozen=True)
class Pool:
    """The same sequences cut into batches in two ways."""

    mixed: list[Inputs]
    """As they came."""
    sorted: list[Inputs]
    """By length, the shortest first: what a careful user of padded batches does."""

    @classmethod
    def of(cls, mix: str, batch: int, vocabulary: int, seed: int) -> Pool:
        """The pool depends on these arguments only."""
        rng = random.Random(f"{seed}/{mix}/{batch}")
        lengths = MIXES[mix].sample(pool_batches(MIXES[mix], batch) * batch, rng)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        texts = [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]
        return cls(padded_batches(texts, batch), padded_batches(sorted(texts, key=len), batch))

    @property
    def lengths(self) -> Tensor:
        """[sequences] in the order of the mixed batches."""
        return torch.cat([inputs.attention_mask.sum(dim=1) for inputs in self.mixed])


def padded_batches(texts: list[Tensor], batch: int) -> list[Inputs]:
    """Neighbours in one batch, padded on the right (token 0) to the longest of them."""
    batches = []
    for first in range(0, len(texts), batch):
        ids = pad_sequence(texts[first : first + batch], batch_first=True)
        batches.append(Inputs(ids, (ids > 0).long(), torch.zeros_like(ids)))
    return batches


def random_model(shape: str, seed: int) -> Any:
    """A BERT classifier of this shape with two labels and random weights, ready for inference."""
    config = AutoConfig.for_model("bert", **SHAPES[shape], num_labels=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa").eval()
