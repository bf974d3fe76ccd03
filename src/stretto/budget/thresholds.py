"""Thresholds of confident exits by random search: T_1..T_{N-1} of a Depth-Adaptive model whose mechanism is
`confidence`.

    draw:       thresholds uniformly in [0, 1], `draws` times
    screen:     what each block says at the tokens of known texts gives quality and average exit of all draws at once
    translate:  with the best of them (the frontier of quality over exit, thinned to `keep`)
    keep:       those that no other beats in both quality and cost

Quality is, by the objective, minus the mean divergence (KL) from the last block, on the texts that the full model
writes, so that no right texts are needed; or accuracy on the right texts, and BLEU of what is translated.

Elbayad, Gu, Grave, Auli: Depth-Adaptive Transformer, ICLR 2020, translate with all of 10,000 draws, by BLEU; screening
and divergence are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stretto.backbones.decoder import EncoderDecoder
from stretto.budget.choose import default_point
from stretto.budget.evolution import pareto_frontier
from stretto.budget.sweep import point_of, sweep
from stretto.budget.teacher import Objective, check_labels
from stretto.data import Dataset
from stretto.data.tokenise import Encoded, EncodedDataset, as_inputs, collate
from stretto.engine.cost import Cost
from stretto.engine.decode_reference import DecoderReference, Given
from stretto.errors import StrettoError
from stretto.methods.depth_adaptive import DepthAdaptive
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint
from stretto.tasks.base import kl
from stretto.tasks.seq2seq import texts_in

#: Draws that are screened at once: more would take more memory.
AT_ONCE = 64
#: Draws that are translated with.
KEEP = 12


@dataclass(frozen=True)
class Screened:
    """What each block says at each token of known texts (n tokens, N blocks)."""

    confidence: Tensor
    """[N, n] the greatest probability."""
    quality: Tensor
    """[N, n] whether it is that of the right token; or minus the divergence from the last block."""

    def of(self, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Mean quality and average exit ([D] each) of thresholds [D, N - 1]."""
        sure = self.confidence[:-1].unsqueeze(0) > thresholds.unsqueeze(2)  # [D, N - 1, n]
        last = torch.ones_like(sure[:, :1])
        exits = torch.cat([sure, last], dim=1).int().argmax(dim=1)  # [D, n], from 0
        quality = self.quality.gather(0, exits)  # [D, n]: each column is a token
        return quality.float().mean(dim=1), exits.float().mean(dim=1) + 1


@torch.no_grad()
def screened(model: AdaptiveModel, data: Dataset, objective: Objective, batch_size: int = 32) -> Screened:
    """The right texts are read for the objective 'score', for 'divergence' those that the full model writes."""
    backbone = model.backbone
    assert isinstance(backbone, EncoderDecoder)
    decoder, pad = DecoderReference(backbone), collate(model.tokenizer.pad_token_id)
    labels_of = data.labels
    if objective == "divergence":
        written, _ = model.run_features(model.encode(data.texts).features, model.method.dial.off, batch_size)
        labels_of = [text.text for text in texts_in(written)]
    encoded = model.encode(data.texts, labels_of)
    examples = EncodedDataset(encoded.features, encoded.labels)
    found = []
    for start in range(0, len(examples), batch_size):
        batch = pad([examples[index] for index in range(start, min(start + batch_size, len(examples)))])
        labels = batch.pop("labels")
        del batch["example_id"]
        inputs = as_inputs(batch)
        source = model.reference.hidden_states(inputs)[-1]
        states = decoder.states(Given.from_labels(source, inputs.attention_mask, labels, backbone.config))
        there = labels >= 0
        logits = [decoder.logits(hidden[there]) for hidden in states]
        best = [each.softmax(dim=-1).max(dim=-1) for each in logits]
        if objective == "divergence":
            quality = torch.stack([-kl(logits[-1], each) for each in logits])
        else:
            quality = torch.stack([each.indices == labels[there] for each in best])
        found.append((torch.stack([each.values for each in best]), quality))
    confidence, quality = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return Screened(confidence, quality)


def promising(screen: Screened, draws: int, keep: int, seed: int) -> list[tuple[float, ...]]:
    """At most `keep` drawn thresholds that no other draw beats in quality and exit, from deep to shallow."""
    generator = torch.Generator().manual_seed(seed)
    thresholds = torch.rand(draws, len(screen.confidence) - 1, generator=generator)
    parts = [screen.of(part) for part in thresholds.split(AT_ONCE)]
    quality, exit = (torch.cat(values) for values in zip(*parts, strict=True))
    order = sorted(range(draws), key=lambda draw: (float(exit[draw]), -float(quality[draw])))
    frontier: list[int] = []
    for draw in order:  # from shallow to deep: a deeper one must be better
        if not frontier or float(quality[draw]) > float(quality[frontier[-1]]):
            frontier.append(draw)
    step = max(1.0, len(frontier) / keep)
    thinned = [frontier[int(place * step)] for place in range(min(keep, len(frontier)))]
    return [tuple(round(value, 4) for value in thresholds[draw].tolist()) for draw in reversed(thinned)]


def search_thresholds(
    model: AdaptiveModel, data: Dataset, *, objective: Objective = "divergence", draws: int = 10_000, keep: int = KEEP,
    seed: int = 42, batch_size: int = 32, progress: bool = False,
) -> list[OperatingPoint]:  # fmt: skip
    """Give the model the thresholds found, one step of its dial each, and return what they were measured to give.

    Right texts are only needed for the objective 'score'; without them no score is measured."""
    method = model.method
    if not isinstance(method, DepthAdaptive) or method.config.mechanism != "confidence":
        raise StrettoError(
            f"Expected a depth_adaptive model with the mechanism confidence, got {method.name}. "
            "Train with --mechanism confidence."
        )
    check_labels(data, objective)
    screen = screened(model, data, objective, batch_size)
    candidates = promising(screen, draws, keep, seed)
    encoded = model.encode(data.texts)
    measured: list[Kept] = []
    for thresholds in tqdm(candidates, desc="translating", disable=not progress, leave=False):
        method.set_thresholds((thresholds,))
        point = measured_at(model, data, 1.0, encoded, batch_size)
        quality = float(screen.of(torch.tensor([thresholds]))[0]) if objective == "divergence" else point.score
        measured.append(Kept(thresholds, quality, point.cost))
    method.set_thresholds(tuple(each.thresholds for each in pareto_frontier(measured)))
    points = [measured_at(model, data, dial, encoded, batch_size) for dial in method.dial.sweep]
    model.operating_points = points
    model.dial = default_point(points, method.dial).dial
    return points


@dataclass(frozen=True)
class Kept:
    """Thresholds that texts were translated with."""

    thresholds: tuple[float, ...]
    score: float
    """What is sought: minus the mean divergence, or BLEU."""
    cost: float


def measured_at(model: AdaptiveModel, data: Dataset, dial: float, encoded: Encoded, batch_size: int) -> OperatingPoint:
    """What the model costs at a dial, and its score if there are right texts."""
    if data.labels is not None:
        return sweep(model, data, [dial], batch_size=batch_size, progress=False, encoded=encoded)[0]
    _, trace = model.run_features(encoded.features, dial, batch_size)
    return point_of(model, dial, {}, Cost.of(trace, model.backbone), len(data))
