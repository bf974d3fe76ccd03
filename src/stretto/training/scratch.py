"""Encoder–decoders from nothing: a fresh config of a Hugging Face class, and a joint BPE of the user's texts.

Both are Hugging Face's: saved, `AutoModelForSeq2SeqLM` and `AutoTokenizer` load them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, set_seed

from stretto.data import Dataset
from stretto.errors import Registry, StrettoError
from stretto.methods import METHODS
from stretto.methods.settings import Settings, Share, Size
from stretto.model import AdaptiveModel, make_config
from stretto.tasks import Task
from stretto.training import SCRATCH

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SPECIAL = (PAD, END, UNKNOWN)


@dataclass(frozen=True)
class ScratchConfig(Settings):
    """The sizes of a model that starts from nothing (`--model scratch:marian`)."""

    d_model: Size = 256
    """Hidden size."""
    encoder_layers: Size = 6
    """Layers of the encoder."""
    decoder_layers: Size = 6
    """Blocks of the decoder."""
    attention_heads: Size = 4
    """Heads of every attention."""
    ffn_dim: Size = 1024
    """Values inside an FFN."""
    vocabulary: Size = 8000
    """Tokens of the BPE that both languages share."""
    dropout: Share = 0.1
    """Dropout in training, of all but attention weights."""
    max_positions: Size = 512
    """Longest text in tokens."""


def shared(config: ScratchConfig, tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id, "d_model": config.d_model,
    }  # fmt: skip


def marian_like(config: ScratchConfig, tokenizer: Any, model_type: str) -> Any:
    return transformers.AutoConfig.for_model(
        model_type, **shared(config, tokenizer), encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers, encoder_attention_heads=config.attention_heads,
        decoder_attention_heads=config.attention_heads, encoder_ffn_dim=config.ffn_dim,
        decoder_ffn_dim=config.ffn_dim, dropout=config.dropout, attention_dropout=0.0, activation_dropout=0.0,
        activation_function="relu", max_position_embeddings=config.max_positions, scale_embedding=True,
        forced_eos_token_id=None, bos_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def t5(config: ScratchConfig, tokenizer: Any, model_type: str) -> Any:
    return transformers.AutoConfig.for_model(
        model_type, **shared(config, tokenizer), num_layers=config.encoder_layers,
        num_decoder_layers=config.decoder_layers, num_heads=config.attention_heads,
        d_kv=config.d_model // config.attention_heads, d_ff=config.ffn_dim, dropout_rate=config.dropout,
    )  # fmt: skip


CONFIGS: Registry[Any] = Registry("model to start from nothing", {"marian": marian_like, "bart": marian_like, "t5": t5})


def joint_tokenizer(texts: Iterable[str], vocabulary: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: no character is unknown to it. Every text ends with `</s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, SPECIAL.index(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def from_nothing(name: str, config: ScratchConfig, data: Dataset, seed: int) -> tuple[Any, Any]:
    """A random model ('scratch:marian', 'scratch:bart', 'scratch:t5') for the texts of `data`, and its tokenizer.

    The same data, settings and seed give the same of both, so that an interrupted training can be resumed."""
    kind = name.removeprefix(SCRATCH)
    make = CONFIGS[kind]
    if config.d_model % config.attention_heads:
        raise StrettoError(
            f"Expected a multiple of {config.attention_heads} heads as d_model, got {config.d_model}. Choose another."
        )
    texts = [text for parts in data.texts for text in parts]
    tokenizer = joint_tokenizer([*texts, *(data.labels or ())], config.vocabulary, config.max_positions)
    set_seed(seed)
    model = transformers.AutoModelForSeq2SeqLM.from_config(make(config, tokenizer, kind), attn_implementation="sdpa")
    return model, tokenizer


def fresh_model(
    name: str, sizes: Mapping[str, Any], data: Dataset, task: Task, method: str, settings: dict[str, Any], seed: int,
    *, dtype: str = "float32", max_length: int | None = None,
) -> AdaptiveModel:  # fmt: skip
    """A model from nothing (see `from_nothing`) with a fresh method."""
    encoder, tokenizer = from_nothing(name, ScratchConfig(**sizes), data, seed)
    kind = METHODS[method]
    return AdaptiveModel.put_together(encoder, tokenizer, kind, make_config(kind, settings), task, dtype, max_length)
