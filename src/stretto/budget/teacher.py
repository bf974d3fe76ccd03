"""The full model's answers, which a search compares others with: it needs no labels for that.

The divergence of an answer from the full model's is the KL divergence of the two distributions; for regression the
squared difference. Its mean is smoother than accuracy: every text counts, also those whose label does not change. So a
few hundred texts are enough to compare configurations, where the accuracy of the best of many would be luck.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stretto.data import Dataset
from stretto.data.tokenise import Encoded, collate
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.saving.points import OperatingPoint
from stretto.tasks import Logits

#: What a search looks for at each cost: the least mean divergence from the full model, or the best score.
Objective = Literal["divergence", "score"]
DIVERGENCE, AGREEMENT = "divergence", "agreement"  # names of metrics


class Teacher:
    """What the full model answers to some inputs."""

    def __init__(self, model: AdaptiveModel, encoded: Encoded, batch_size: int = 32) -> None:
        check_comparable(model)
        self.task, self.encoded = model.task, encoded
        logits, _ = model.run_features(encoded.features, model.method.dial.off, batch_size)
        self.logits = padded(logits)
        self.answers = self.task.as_labels(self.task.decode(logits, encoded))
        answered = model.encode(encoded.texts, self.answers)  # of labels, only what is read matters here
        self.labels = collate(model.tokenizer.pad_token_id)(
            [
                {"input_ids": feature["input_ids"], "labels": label}
                for feature, label in zip(answered.features, answered.labels or [], strict=True)
            ]
        )["labels"]

    def divergence(self, logits: Logits) -> Tensor:
        """[n] how far the answer to each feature is from the full model's."""
        return self.task.distillation(padded(logits), self.logits, self.labels)

    def metrics(self, logits: Logits) -> dict[str, float]:
        """The mean divergence; of answers that are right or wrong also how many are the full model's."""
        found = {DIVERGENCE: float(self.divergence(logits).mean())}
        if self.task.right_or_wrong:
            same = self.task.quality(self.task.decode(logits, self.encoded), self.answers)
            found[AGREEMENT] = sum(same) / len(same)
        return found


def check_comparable(model: AdaptiveModel) -> None:
    """Refuse a model whose answers have no distance from the full model's."""
    if model.task.answers == "text":
        raise StrettoError(
            "Expected answers with probabilities, to measure their divergence from the full model's, got a model that "
            "writes texts. Search by score on labelled data, without a choice per input."
        )


def objective_for(model: AdaptiveModel, named: Objective | None) -> Objective:
    """What lengths or pairs of dials are searched by; default: divergence, for texts that are written the score."""
    if named == "divergence":
        check_comparable(model)
    return named or ("score" if model.task.answers == "text" else "divergence")


def check_labels(data: Dataset, objective: Objective) -> None:
    if objective == "score" and data.labels is None:
        raise StrettoError("Expected labelled data for the objective 'score', got none. Name the column of the labels.")


def padded(logits: Logits) -> Tensor:
    """[n, C], or [n, T, C] where every token is answered."""
    return logits if isinstance(logits, Tensor) else torch.nn.utils.rnn.pad_sequence(list(logits), batch_first=True)


def sought(point: OperatingPoint, objective: Objective) -> float:
    """What a search maximises: the score, or minus the mean divergence from the full model."""
    return point.score if objective == "score" else -point.metrics[DIVERGENCE]
