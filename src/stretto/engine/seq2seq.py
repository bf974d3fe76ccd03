"""Encoder and decoder as one engine: sentences in, texts out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.backbones.decoder import EncoderDecoder
from stretto.engine.decider import Decider
from stretto.engine.decode import DecoderEngine
from stretto.engine.decode_cache import Source
from stretto.engine.generation import Generation
from stretto.engine.packed import PackedEngine
from stretto.engine.parts import check_batch_size
from stretto.engine.written import DecoderTrace, Text, TextTrace, Written
from stretto.state import Inputs

#: New tokens at most, where neither the caller nor the model's generation_config limits the length.
MAX_NEW_TOKENS = 128


class Seq2SeqEngine:
    """The packed engine runs the encoder, so that a method that drops and restores its tokens can be combined with one
    that lets tokens leave the decoder early."""

    def __init__(self, backbone: EncoderDecoder, dtype: str, settings: Mapping[str, Any]) -> None:
        """`settings` are settings of Hugging Face's `generate`; they are read at every run."""
        self.backbone, self.settings = backbone, settings
        self.encoder, self.decoder = PackedEngine(backbone, dtype), DecoderEngine(backbone, dtype)

    def generation(self) -> Generation:
        """How texts are written now."""
        model, most = self.backbone.model, self.backbone.most_positions
        limits = {"max_length", "max_new_tokens"} & set(self.settings)
        if limits or model.generation_config.max_length is not None:
            return Generation.of(model, most, **self.settings)
        longest = MAX_NEW_TOKENS if most is None else min(MAX_NEW_TOKENS, most)
        return Generation.of(model, most, **self.settings, max_new_tokens=longest)

    def run(
        self, inputs: Inputs, decider: Decider, dial: float | Tensor, *,
        batch_size: int | None = None, context: Any = None, scored: bool = True, generation: Generation | None = None,
    ) -> Written:  # fmt: skip
        """A text for each sentence. `batch_size` of them (default: all), of near-equal length, are written at once.

        `generation`: how to write them; default: as the settings say."""
        check_batch_size(batch_size or 1)
        generation = generation or self.generation()
        dials = torch.as_tensor(dial, dtype=torch.float64).expand(len(inputs.input_ids))
        encoded = self.encoder.run(inputs, decider, dials, batch_size=batch_size, keep_hidden=True, context=context)
        assert encoded.hidden is not None
        lengths = encoded.trace.lengths
        there = torch.arange(encoded.hidden.shape[1], device=lengths.device) < lengths.unsqueeze(1)
        source = Source.padded(encoded.hidden, there)
        texts: dict[int, Text] = {}
        traces: list[DecoderTrace] = []
        order = lengths.argsort(stable=True)
        for part in order.split(batch_size or len(order)):
            written, trace = self.decoder.run(source.take(part), generation, decider, dials[part], scored=scored)
            texts.update(zip(part.tolist(), written, strict=True))
            traces.append(trace)
        decoded = DecoderTrace.concatenate(traces).take(order.argsort())
        return Written([texts[number] for number in range(len(order))], TextTrace(encoded.trace, decoded))
