"""Small random encoder–decoders whose texts differ from sentence to sentence, and random sources for them."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from stretto.data import Dataset
from stretto.engine.decode_cache import Source
from stretto.methods import METHODS
from stretto.model import AdaptiveModel, make_config
from stretto.tasks import Seq2Seq
from stretto.training.scratch import ScratchConfig, from_nothing

VOCABULARY, BLOCKS = 61, 4
PAD, END, START = 0, 1, 2
#: Every family, and the form of T5 whose FFN is gated; with a seed, and how much the end token stands out, such that
#: texts differ and end at different lengths.
RANDOM = {"marian": (1, 1.5), "bart": (2, 2.5), "t5": (3, 2.5), "t5-gated": (1, 1.5)}
FAMILIES = tuple(RANDOM)
NUMBERS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five", "sechs": "six"}
SMALL = ScratchConfig(
    d_model=32, encoder_layers=2, decoder_layers=3, attention_heads=4, ffn_dim=64, vocabulary=300, dropout=0.0
)


@functools.cache
def tiny_seq2seq(family: str) -> Any:
    """Embeddings are large beside the blocks, and the output head is free of them, so that texts do not repeat
    themselves."""
    special: dict[str, Any] = {"pad_token_id": PAD, "eos_token_id": END, "vocab_size": VOCABULARY, "d_model": 32}
    sizes: dict[str, Any] = {
        "encoder_layers": 3, "decoder_layers": BLOCKS, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "bos_token_id": START,
        "decoder_start_token_id": START, "forced_eos_token_id": None,
    }  # fmt: skip
    if family == "marian":
        model: Any = MarianMTModel(MarianConfig(**special, **sizes, scale_embedding=True))
    elif family == "bart":
        model = BartForConditionalGeneration(BartConfig(**special, **sizes))
    else:
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if family == "t5-gated" else {}
        model = T5ForConditionalGeneration(
            T5Config(**special, d_kv=12, num_layers=BLOCKS, num_heads=4, d_ff=64, decoder_start_token_id=PAD, **gated)
        )
    seed, ending = RANDOM[family]
    torch.manual_seed(seed)
    model.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, 32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 if "embed" in name or "shared" in name else 0.1)
        head = torch.empty(VOCABULARY, 32).normal_(std=0.5)
        head[END] *= ending
        model.lm_head.weight.copy_(head)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
    return model.eval()


def random_source(lengths: tuple[int, ...], seed: int = 3) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask. A sentence's tokens depend on `seed` and its index, not on the padding."""
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        ids[index, :length] = torch.randint(3, VOCABULARY, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@torch.no_grad()
def encoded(model: Any, batch: dict[str, torch.Tensor]) -> Source:
    """The sources by Hugging Face's own encoder."""
    return Source.padded(model.get_encoder()(**batch).last_hidden_state, batch["attention_mask"])


def number_pairs(count: int, seed: int) -> Dataset:
    """German numbers and the same in English, in order."""
    words = random.Random(seed)
    rows = [words.choices(list(NUMBERS), k=words.randint(1, 3)) for _ in range(count)]
    texts = [(" ".join(row),) for row in rows]
    return Dataset(
        texts, [" ".join(NUMBERS[word] for word in row) for row in rows], None, ["here"] * count, Seq2Seq.form
    )


def fresh(
    method: str = "depth_adaptive", kind: str = "marian", sizes: ScratchConfig = SMALL, **settings: Any
) -> AdaptiveModel:
    encoder, tokenizer = from_nothing(kind, sizes, number_pairs(60, 0), seed=1)
    method_class = METHODS[method]
    return AdaptiveModel.put_together(
        encoder, tokenizer, method_class, make_config(method_class, settings), Seq2Seq(label_smoothing=0.0)
    )
