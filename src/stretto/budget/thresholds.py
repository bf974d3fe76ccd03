"""Thresholds of confident exits by random search: T_1..T_{N-1} of a Depth-Adaptive model whose mechanism is
`confidence`.

    draw:       thresholds uniformly in [0, 1], `draws` times
    screen:     what each block says of the right dev texts gives accuracy and average exit of all draws at once
    translate:  with the best of them (the frontier of accuracy over exit, thinned to `keep`)
    keep:       those that no other beats in both BLEU and cost

Elbayad, Gu, Grave, Auli: Depth-Adaptive Transformer, ICLR 2020, translate with all of 10,000 draws; screening is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stretto.backbones.decoder import EncoderDecoder
from stretto.budget.choose import default_point
from stretto.budget.sweep import sweep
from stretto.data import Dataset
from stretto.data.tokenise import EncodedDataset, as_inputs, collate
from stretto.engine.decode_reference import DecoderReference, Given
from stretto.errors import StrettoError
from stretto.methods.depth_adaptive import DepthAdaptive
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint

#: Draws that are screened at once: more would take more memory.
AT_ONCE = 64
#: Draws that are translated with.
KEEP = 12


@dataclass(frozen=True)
class Screened:
    """What each block says at each token of the right texts (n tokens, N blocks)."""

    confidence: Tensor
    """[N, n] the greatest probability."""
    right: Tensor
    """[N, n] whether it is that of the right token."""

    def of(self, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Accuracy and average exit ([D] each) of thresholds [D, N - 1]."""
        sure = self.confidence[:-1].unsqueeze(0) > thresholds.unsqueeze(2)  # [D, N - 1, n]
        last = torch.ones_like(sure[:, :1])
        exits = torch.cat([sure, last], dim=1).int().argmax(dim=1)  # [D, n], from 0
        right = self.right.gather(0, exits)  # [D, n]: each column is a token
        return right.float().mean(dim=1), exits.float().mean(dim=1) + 1


@torch.no_grad()
def screened(model: AdaptiveModel, data: Dataset, batch_size: int = 32) -> Screened:
    backbone = model.backbone
    assert isinstance(backbone, EncoderDecoder)
    decoder, pad = DecoderReference(backbone), collate(model.tokenizer.pad_token_id)
    encoded = model.encode(data.texts, data.labels)
    examples = EncodedDataset(encoded.features, encoded.labels)
    found = []
    for start in range(0, len(examples), batch_size):
        batch = pad([examples[index] for index in range(start, min(start + batch_size, len(examples)))])
        labels = batch.pop("labels")
        del batch["example_id"]
        inputs = as_inputs(batch)
        source = model.reference.hidden_states(inputs)[-1]
        states = decoder.states(Given.taught(source, inputs.attention_mask, labels, backbone.config))
        there = labels >= 0
        best = [decoder.logits(hidden[there]).softmax(dim=-1).max(dim=-1) for hidden in states]
        right = torch.stack([each.indices == labels[there] for each in best])
        found.append((torch.stack([each.values for each in best]), right))
    confidence, right = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return Screened(confidence, right)


def promising(screen: Screened, draws: int, keep: int, seed: int) -> list[tuple[float, ...]]:
    """At most `keep` drawn thresholds that no other draw beats in accuracy and exit, from deep to shallow."""
    generator = torch.Generator().manual_seed(seed)
    thresholds = torch.rand(draws, len(screen.confidence) - 1, generator=generator)
    parts = [screen.of(part) for part in thresholds.split(AT_ONCE)]
    accuracy, exit = (torch.cat(values) for values in zip(*parts, strict=True))
    order = sorted(range(draws), key=lambda draw: (float(exit[draw]), -float(accuracy[draw])))
    frontier: list[int] = []
    for draw in order:  # from shallow to deep: a deeper one must be more accurate
        if not frontier or float(accuracy[draw]) > float(accuracy[frontier[-1]]):
            frontier.append(draw)
    step = max(1.0, len(frontier) / keep)
    thinned = [frontier[int(place * step)] for place in range(min(keep, len(frontier)))]
    return [tuple(round(value, 4) for value in thresholds[draw].tolist()) for draw in reversed(thinned)]


def search_thresholds(
    model: AdaptiveModel, data: Dataset, *, draws: int = 10_000, keep: int = KEEP, seed: int = 42, batch_size: int = 32,
    progress: bool = False,
) -> list[OperatingPoint]:  # fmt: skip
    """Give the model the thresholds found, one step of its dial each, and return what they were measured to give."""
    method = model.method
    if not isinstance(method, DepthAdaptive) or method.config.mechanism != "confidence":
        raise StrettoError(
            f"Expected a depth_adaptive model with the mechanism confidence, got {method.name}. "
            "Train with --mechanism confidence."
        )
    candidates = promising(screened(model, data, batch_size), draws, keep, seed)
    encoded = model.encode(data.texts)
    measured: list[tuple[tuple[float, ...], OperatingPoint]] = []
    for thresholds in tqdm(candidates, desc="translating", disable=not progress, leave=False):
        method.set_thresholds((thresholds,))
        (point,) = sweep(model, data, [1.0], batch_size=batch_size, progress=False, encoded=encoded)
        measured.append((thresholds, point))
    measured.sort(key=lambda pair: (pair[1].cost, -pair[1].score))
    kept: list[tuple[float, ...]] = []
    best = -1.0
    for thresholds, point in measured:  # from cheap to expensive: a more expensive one must score more
        if point.score > best:
            kept.append(thresholds)
            best = point.score
    method.set_thresholds(tuple(reversed(kept)))
    points = sweep(model, data, batch_size=batch_size, progress=progress, encoded=encoded)
    model.operating_points = points
    model.dial = default_point(points, method.dial).dial
    return points
