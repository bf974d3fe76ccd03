"""`stretto bench model`: how much faster a trained model is, on real texts.

At every batch size one sample of texts goes through all contenders in interleaved rounds: Hugging Face on padded
batches (as the texts come, and sorted by length), the packed engine with every layer for every token and no exits, and
the packed engine with the method at each dial. All contenders get tokenised tensors.

Default: each batch is timed by itself, like a request. In a stream the packed engine takes several batches at a time,
as `stretto predict` does with a file, and joins them as they shrink.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from stretto.bench.baselines import hugging_face, padded_flops
from stretto.bench.timing import Contender, Step, interleaved, ratio
from stretto.data.batches import batches, windows
from stretto.data.tokenise import Feature
from stretto.engine.cost import Cost
from stretto.errors import StrettoError
from stretto.methods import METHODS, Method, Shape
from stretto.model import AdaptiveModel
from stretto.state import Inputs

BATCH_SIZES = (1, 8, 32)
SEQUENCES = 96


def bench_model(
    model: AdaptiveModel,
    texts: Sequence[tuple[str, ...]],
    dials: Sequence[float],
    batch_sizes: Sequence[int] = BATCH_SIZES,
    rounds: int = 5,
    seed: int = 0,
    *,
    sequences: int = SEQUENCES,
    stream: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """One row per batch size and dial, and one with the dial None for the full model, packed.

    Gains say how many times faster (or fewer FLOPs) than the full packed model, or than Hugging Face; `tracking` is
    the part of the FLOPs gain that became a gain in time."""
    if not texts or rounds < 1 or min(batch_sizes) < 1:
        raise StrettoError(
            f"Expected texts, and rounds and batch sizes of at least 1, got {len(texts)} texts, {rounds} rounds and "
            f"batch sizes {list(batch_sizes)}. Choose larger ones."
        )
    for dial in dials:
        model.method.dial.check(dial)
    dials = list(dict.fromkeys(dials))
    sample = random.Random(seed).sample(list(texts), min(sequences, len(texts)))
    features = model.encode(sample).features
    rows = []
    with tqdm(total=rounds * len(batch_sizes), unit="round", disable=not progress, leave=False) as bar:
        for size in batch_sizes:
            bar.set_description(f"batch {size}")
            contenders = _contenders(model, features, dials, size, stream)
            timed = interleaved(contenders, rounds, random.Random(f"{seed}/{size}"), bar.update)
            results = {result.contender.name: result for result in timed}
            work = {contender.name: contender.flops for contender in contenders}
            choices: list[float | None] = [None, *dials]
            for choice in choices:
                name = "full" if choice is None else f"dial {choice}"
                flops_gain = work["full"] / work[name]
                faster = {other: ratio(results[other], results[name]) for other in ("full", "huggingface", "sorted")}
                rows.append(
                    {
                        "batch_size": size,
                        "stream": stream,
                        "dial": choice,
                        "sequences": len(sample),
                        "cost": work[name] / work["full"],
                        "ms_per_text": 1000 * results[name].median / len(sample),
                        "flops_gain": flops_gain,
                        "time_gain": faster["full"],
                        "time_gain_vs_huggingface": faster["huggingface"],
                        "time_gain_vs_huggingface_sorted": faster["sorted"],
                        "tracking": None if choice is None else faster["full"] / flops_gain,
                    }
                )
    return rows


def _contenders(
    model: AdaptiveModel, features: list[Feature], dials: Sequence[float], size: int, stream: bool
) -> list[Contender]:
    pad = model.tokenizer.pad_token_id
    mixed = list(batches(features, pad, size))
    by_length = list(batches(sorted(features, key=lambda feature: len(feature["input_ids"])), pad, size))
    if model.task.answers == "text":
        run, work = partial(generated, model), 0.0  # the FLOPs of `generate` are not read
    else:
        run, work = partial(hugging_face, model.encoder), padded_flops(mixed, model.backbone)
    contenders = [
        Contender(name, "float32", run(pool), work) for name, pool in (("huggingface", mixed), ("sorted", by_length))
    ]
    taken = list(windows(features, pad, size)) if stream else mixed
    contenders.append(packed_contender("full", model, full_method(model), 0.0, taken, size))
    contenders += [packed_contender(f"dial {dial}", model, model.method, dial, taken, size) for dial in dials]
    return contenders


def packed_contender(
    name: str, model: AdaptiveModel, method: Method, dial: float, pool: Sequence[Inputs], batch_size: int
) -> Contender:
    """One step for each of `pool`, a batch or several. Counting the FLOPs runs, and so warms up, every step."""
    steps = [partial(model.packed.run, inputs, method, dial, batch_size=batch_size) for inputs in pool]
    traces = [step().trace for step in steps]
    trace = type(traces[0]).concatenate(traces)
    return Contender(name, model.dtype, steps, float(Cost.of(trace, model.backbone).flops.sum()))


def generated(model: AdaptiveModel, pool: Sequence[Inputs]) -> list[Step]:
    """Hugging Face's `generate`, as the model writes texts."""
    generate = torch.inference_mode()(model.encoder.generate)
    limit = {"max_length": model.packed.generation().max_length}
    settings = {**{k: v for k, v in model.generation.items() if k != "max_new_tokens"}, **limit}
    return [
        partial(generate, input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, **settings)
        for inputs in pool
    ]


def full_method(model: AdaptiveModel) -> Method:
    """The method 'full' for this model: every layer, and no exit is asked (the dial 'off' still asks them)."""
    full = METHODS["full"]
    backbone = model.backbone
    return full(full.Config(), Shape(backbone.d, backbone.n_layers, backbone.n_labels), model.task).eval()
