"""What exits would answer to training texts that they have not seen.

Exits are right more often on the texts they were trained on than on other texts, so depths estimated from those are too
shallow. Here copies of the exits are trained on all folds of the training texts but one, and answer that one. The
backbone is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.engine.reference import ReferenceEngine
from stretto.engine.replay import Above, Recorder, alone
from stretto.methods.base import Batches, Shape
from stretto.methods.exits import ExitConfig, ExitHeads
from stretto.methods.settings import Count
from stretto.tasks import Task

BATCH, EPOCHS = 64, 5


@dataclass(frozen=True)
class FoldConfig(ExitConfig):
    """Settings shared by the exit methods that learn when an answer is right."""

    folds: Count = 5
    """Number of folds of the training texts. Each is answered by exits trained on the other folds, to learn which
    answers are right. 0 or 1: by the exits themselves, which were trained on all texts."""


def fold_of(n: int, folds: int) -> Tensor:
    """[n] the fold of each example, alternating, because neighbours in a file may be similar."""
    return torch.arange(n) % folds


@torch.enable_grad()
def held_out(
    make: Callable[[], nn.Module], read: Tensor, loss: Callable[[Tensor, Tensor], Tensor], folds: int, rate: float
) -> list[nn.Module]:
    """Heads for each fold, fitted to all others. `read` ([n, …]): what heads read of the examples; `loss` maps answers
    and the numbers of their examples ([B]) to a number."""
    found, fold = [], fold_of(len(read), folds)
    for held in range(folds):
        head = make().to(read.device).train()
        optimizer = torch.optim.AdamW(head.parameters(), rate)
        seen = (fold != held).nonzero().squeeze(1)
        for _ in range(EPOCHS):
            for index in seen[torch.randperm(len(seen))].split(BATCH):
                optimizer.zero_grad()
                loss(head(read[index]), index).backward()
                optimizer.step()
        found.append(head.eval())
    return found


class AllExits(nn.Module):
    """[B, E, d] what all exits read -> [B, E, C] their answers."""

    def __init__(self, exits: ExitHeads) -> None:
        super().__init__()
        self.exits = exits

    def forward(self, read: Tensor) -> Tensor:
        return torch.stack([self.exits(layer, each) for layer, each in enumerate(read.unbind(dim=1), 1)], dim=1)


@torch.no_grad()
def held_out_answers(
    engine: ReferenceEngine, batches: Batches, task: Task, shape: Shape, config: FoldConfig, above: Above = alone
) -> tuple[Tensor, Tensor]:
    """[E + 1, n, C] answers of exits that have not seen the example, with those of the final head as the last, and the
    labels of all n examples. In a combination, exits read what the part beneath has shortened (`above`)."""

    def fresh() -> ExitHeads:
        return ExitHeads(shape.d, shape.n_layers - 1, shape.n_labels, config.pool, config.dropout)

    pooled, final, given, reading = [], [], [], fresh()
    for inputs, labels in batches:
        recorder = Recorder(reading)
        final.append(engine.run(inputs, above(recorder, len(labels)), 0.0).logits)
        pooled.append(recorder.pooled(len(labels), shape.n_layers - 1))
        given.append(labels)
    read, labels = torch.cat(pooled), torch.cat(given)

    def loss(answers: Tensor, index: Tensor) -> Tensor:
        return torch.stack([task.loss(each, labels[index]).mean() for each in answers.unbind(dim=1)]).sum()

    heads = held_out(lambda: AllExits(fresh()), read, loss, config.folds, config.exit_learning_rate)
    early, fold = read.new_zeros(*read.shape[:2], shape.n_labels), fold_of(len(read), config.folds)
    for number, exits in enumerate(heads):
        early[fold == number] = exits(read[fold == number])
    return torch.cat([early.transpose(0, 1), torch.cat(final).unsqueeze(0)]), labels
