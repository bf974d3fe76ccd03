"""CTranslate2 as a contender: a Marian with random weights, converted by its own loader."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stretto.bench.timing import Step
from stretto.state import Inputs

#: What the benchmark says in the place of its rows.
MISSING = "CTranslate2 is not installed: its rows are left out. pip install 'stretto[bench]' adds them."


def is_installed() -> bool:
    return find_spec("ctranslate2") is not None


class CTranslate2:
    """Tokens are named by their numbers: nothing is tokenised here."""

    def __init__(self, model: Any, folder: Path, threads: int) -> None:
        from ctranslate2 import Translator
        from ctranslate2.converters.transformers import MarianMTLoader

        assert model.config.pad_token_id == model.config.vocab_size - 1  # as in every opus-mt model; it is taken away
        self.names = [f"t{number}" for number in range(model.config.vocab_size - 1)]
        self.names[model.config.eos_token_id], self.names[1] = "</s>", "<unk>"
        loader = MarianMTLoader()
        self.translators = {}
        for dtype, quantization in (("float32", None), ("int8", "int8")):
            spec = loader.get_model_spec(model)
            spec.register_source_vocabulary(self.names)
            spec.register_target_vocabulary(self.names)
            spec.config.eos_token = spec.config.decoder_start_token = "</s>"  # it starts from a zero embedding
            spec.config.unk_token = "<unk>"
            spec.validate()
            spec.optimize(quantization=quantization)
            place = folder / dtype
            place.mkdir()
            spec.save(str(place))
            self.translators[dtype] = Translator(
                str(place), device="cpu", compute_type=dtype, intra_threads=threads, inter_threads=1
            )

    def steps(self, pool: Sequence[Inputs], dtype: str, new_tokens: int) -> list[Step]:
        """Greedy, exactly `new_tokens` for each sentence."""
        translate = self.translators[dtype].translate_batch
        return [
            partial(
                translate, self.named(inputs), beam_size=1, max_decoding_length=new_tokens,
                min_decoding_length=new_tokens,
            )
            for inputs in pool
        ]  # fmt: skip

    def named(self, inputs: Inputs) -> list[list[str]]:
        rows = zip(inputs.input_ids.tolist(), inputs.attention_mask.sum(dim=1).tolist(), strict=True)
        return [[self.names[token] for token in row[:length]] for row, length in rows]
