"""How texts are to be written, as Hugging Face's `generate` understands it: its own settings and logits processors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

from stretto.errors import StrettoError

#: Modes of `generate` that this engine has.
MODES = ("greedy_search", "beam_search")
#: Settings whose processors read the source of one sentence: a batch would need a processor for each.
UNSUPPORTED = {
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "num_return_sequences": (None, 1),
    "guidance_scale": (None, 1, 1.0),
    "stop_strings": (None,),
    "max_time": (None,),
}


@dataclass(frozen=True)
class Generation:
    """Settings of one call, complete."""

    processors: Sequence[Callable[[Tensor, Tensor], Tensor]]
    """(tokens so far [R, T], scores [R, V]) -> scores, one after another."""
    start: int
    """The token every text starts with."""
    ends: Tensor
    """[E] tokens that end a text; none: only its length does."""
    max_length: int
    """Tokens at most, the first one counted."""
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def processed(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """[R, V]: the scores after all processors; the scores given may be overwritten. transformers' own list is not
        used because it inspects the processors' signatures every time."""
        for process in self.processors:
            scores = process(tokens, scores)
        return scores

    def following(self, tokens: Sequence[int]) -> Generation:
        """Settings that reproduce this one text, token by token."""

        def follow(written: Tensor, scores: Tensor) -> Tensor:
            scores = scores.clone()
            scores[:, tokens[written.shape[1] - 1]] = torch.inf
            return scores

        return dataclasses.replace(self, processors=[follow], max_length=len(tokens) + 1, num_beams=1)

    @classmethod
    def of(cls, model: Any, most_positions: int | None, **settings: Any) -> Generation:
        """What `model.generate(…, **settings)` would do. Fields of the model's generation_config hold by default."""
        own, given = model.generation_config, settings.get("max_length")
        try:
            config, unknown = model._prepare_generation_config(None, **settings)
        except (ValueError, TypeError) as error:
            raise StrettoError(
                f"Expected settings that `generate` takes, got {settings}: {str(error).splitlines()[0]} Change them."
            ) from error
        check(config, unknown)
        model._prepare_special_tokens(config, True, device=model.device)
        by_default = given is None and own.max_length is None
        config = model._prepare_generated_length(config, by_default, own.min_length is None, "input_ids", 1, None)
        if most_positions is not None and config.max_length - 1 > most_positions:
            raise StrettoError(
                f"Expected at most {most_positions} new tokens, all this decoder has positions for, got "
                f"{config.max_length - 1}. Lower --max-new-tokens."
            )
        processors = model._get_logits_processor(config, input_ids_seq_length=1, device=model.device, model_kwargs={})
        ends = config._eos_token_tensor
        return cls(
            processors=[in_place(process) for process in processors],
            start=int(config._decoder_start_token_tensor),
            ends=config._decoder_start_token_tensor.new_zeros(0) if ends is None else ends,
            max_length=int(config.max_length),
            num_beams=int(config.num_beams),
            length_penalty=float(config.length_penalty),
            early_stopping=config.early_stopping,
        )


@dataclass(frozen=True)
class NoEndYet:
    """No text ends before it has `least` tokens, the first one counted."""

    least: int
    ends: Tensor

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill_(1, self.ends, -torch.inf) if tokens.shape[1] < self.least else scores


def in_place(process: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The same as this processor of transformers, without copying all scores twice where that is easy to avoid."""
    if type(process) is MinLengthLogitsProcessor:
        return NoEndYet(process.min_length, process.eos_token_id)
    if type(process) is MinNewTokensLengthLogitsProcessor:
        return NoEndYet(process.prompt_length_to_skip + process.min_new_tokens, process.eos_token_id)
    return process


def check(config: Any, unknown: dict[str, Any]) -> None:
    if unknown:
        raise StrettoError(
            f"Expected settings of transformers.GenerationConfig, got {', '.join(sorted(unknown))}. "
            "See its documentation."
        )
    for name in ("num_beams", "max_new_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise StrettoError(f"Expected {name} of 1 or more, got {value}. Raise it.")
    mode = config.get_generation_mode(None).value
    if mode not in MODES:
        raise StrettoError(
            f"Expected greedy decoding or beam search, got {mode.replace('_', ' ')}. "
            "Leave out do_sample and settings of other modes."
        )
    for name, plain in UNSUPPORTED.items():
        if (value := getattr(config, name, None)) not in plain:
            raise StrettoError(f"Expected {name} to be unset, got {value}. This decoder does not support it.")
