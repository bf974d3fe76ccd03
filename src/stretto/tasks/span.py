"""Extractive question answering: a span of a context, or no answer.

Each window of a context (see `windows.py`) has a logit for every token to be the answer's first and one to be its
last; a candidate's score is the sum of the two. Position 0 means "no answer here". The best candidate of all windows
wins. The score of "no answer" is the lowest of all windows (as in SQuAD 2.0).

Only position 0 is protected from being dropped. Other tokens need no protection: dropped tokens are restored before
they are read. Question and context tokens are ranked together, as in the Length-Adaptive paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from stretto.data.columns import Gold, Questions
from stretto.data.dataset import Form
from stretto.data.labels import Given
from stretto.data.tokenise import IGNORED, Encoded, check_fast
from stretto.errors import StrettoError
from stretto.tasks.base import Logits, Prediction, Task, check_finite, kl
from stretto.tasks.squad import best_matches, squad_scores
from stretto.tasks.windows import END, START, Place, cut_windows, label_window

if TYPE_CHECKING:
    from stretto.data import Dataset

#: Tokens an answer may have.
LONGEST_ANSWER = 30
#: Candidates of each window that compete for the answer.
CANDIDATES = 20
#: Far below any logit, but finite: 0 · (x - x) must be 0, not NaN.
NEVER = -1e4


@dataclass(frozen=True)
class Candidate:
    """A possible answer."""

    text: str
    """A span of the context; "" means no answer."""
    score: float
    """Its probability among the candidates."""
    start: int | None
    """Its first character in the context; None for no answer."""
    end: int | None
    """The character behind its last."""


@dataclass(frozen=True)
class SpanPrediction(Prediction):
    """The answer to one question."""

    answer: str
    """A span of the context; "" if there is none."""
    score: float
    start: int | None
    end: int | None
    best: list[Candidate]
    """The most likely candidates, the answer among them."""

    @property
    def summary(self) -> str:
        return f"{self.answer or 'no answer'} ({self.score:.3f})"


class Span(Task):
    """Logits are [B, T, 2] (first, last); labels are [B, T]: bits START and END, IGNORED where nothing is read."""

    name: ClassVar[str] = "span"
    judged: ClassVar[bool] = True
    form: ClassVar[Form] = Form(Questions, Given)
    answers: ClassVar[Literal["sequence", "token", "text"]] = "token"
    main_metric = "f1"
    architecture: ClassVar[str] = "ForQuestionAnswering"
    auto_class: ClassVar[str] = "AutoModelForQuestionAnswering"
    pipeline_tag: ClassVar[str] = "question-answering"
    example: ClassVar[str] = '("a question", "its context")'
    flat: ClassVar[bool] = False

    def __init__(
        self, *, no_answer: bool = False, null_threshold: float = 0.0, stride: int = 128, n_best: int = 5
    ) -> None:
        """`no_answer`: some questions have none. "No answer" then wins if its score is more than `null_threshold` above
        the score of the best candidate. `stride`: tokens that neighbouring windows share. `n_best`: candidates to
        return."""
        if stride < 0 or n_best < 1:
            raise StrettoError(
                f"Expected a stride from 0 and n_best from 1, got {stride} and {n_best}. Choose larger ones."
            )
        super().__init__(["start", "end"])
        self.no_answer, self.null_threshold, self.stride, self.n_best = no_answer, null_threshold, stride, n_best

    @classmethod
    def posed_by(cls, data: Dataset, **settings: Any) -> Span:
        """`no_answer` is set if the data have a question without an answer."""
        return cls(**{"no_answer": not all(data.labels or [()]), **settings})

    @classmethod
    def make(cls, label_names: Sequence[str], **settings: Any) -> Span:
        return cls(**settings)

    def learn_from(self, data: Dataset) -> None:
        """A model that learns from a question without an answer may answer "none"."""
        self.no_answer = self.no_answer or not all(data.labels or [()])

    @property
    def outputs(self) -> str:
        return "parts of the context" + (", or no answer" if self.no_answer else "")

    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("no_answer", "null_threshold", "stride", "n_best")}

    # ---- from questions to features and back

    def parts_of(self, text: Any) -> tuple[str, ...]:
        parts = tuple(text) if isinstance(text, (tuple, list)) else ()
        if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise StrettoError(f"Expected a pair (question, context), got {text!r:.80}. Pass both.")
        return parts

    def encode(
        self, tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int, labels: Sequence[Any] | None = None,
        *, words: bool = False,
    ) -> Encoded:  # fmt: skip
        """`places` are the windows' `Place`s. Nothing is truncated."""
        check_fast(tokenizer)
        windows = list(cut_windows(tokenizer, texts, max_length, self.stride, words=words))
        marks = None
        if labels is not None:
            firsts = [golds[0] if golds else None for golds in labels]  # the first gold answer is the training target
            marks = [label_window(len(w.feature["input_ids"]), w.place, firsts[w.example]) for w in windows]
        features, places = [w.feature for w in windows], [w.place for w in windows]
        return Encoded(texts, features, 0, [w.example for w in windows], marks, places)

    def decode(self, logits: Logits, encoded: Encoded) -> list[SpanPrediction]:
        found: list[dict[tuple[int, int], float]] = [{} for _ in encoded.texts]
        null = [float("inf")] * len(encoded.texts)
        for row, place, example in zip(logits, encoded.places, encoded.example_of, strict=True):  # row: [T, 2]
            check_finite(row, example)
            null[example] = min(null[example], float(row[0].sum()))
            for span, score in candidates(row, place):
                found[example][span] = max(score, found[example].get(span, score))  # windows overlap
        return [self.choose(*one) for one in zip(encoded.texts, found, null, strict=True)]

    def choose(self, texts: tuple[str, ...], found: dict[tuple[int, int], float], null: float) -> SpanPrediction:
        """The best of all candidates of one question."""
        context = texts[1]
        ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:CANDIDATES]
        logits = [score for _, score in ranked] + ([null] if self.no_answer or not ranked else [])
        shares = torch.tensor(logits).softmax(dim=0).tolist()
        best = [candidate(context, *span, share) for (span, _), share in zip(ranked, shares, strict=False)]
        if not ranked:  # an empty context
            best = [Candidate("", shares[-1], None, None)]
        elif self.no_answer:
            none = Candidate("", shares[-1], None, None)
            silent = null - ranked[0][1] > self.null_threshold
            behind = sum(share > none.score for share in shares[:-1])
            best.insert(0 if silent else max(behind, 1), none)
        top = best[0]
        return SpanPrediction(top.text, top.score, top.start, top.end, best[: self.n_best])

    def scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Sequence[Gold]]) -> dict[str, float]:
        return squad_scores(*self.answers_and_golds(logits, encoded, labels))

    def example_scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Sequence[Gold]]) -> Tensor:
        f1s = best_matches(*self.answers_and_golds(logits, encoded, labels))["f1"]
        return torch.tensor(f1s, dtype=torch.float64)

    def answers_and_golds(
        self, logits: Logits, encoded: Encoded, labels: Sequence[Sequence[Gold]]
    ) -> tuple[list[str], list[list[str]]]:
        answers = [prediction.answer for prediction in self.decode(logits, encoded)]
        return answers, [[gold.text for gold in golds] for golds in labels]

    def quality(self, answers: Sequence[Any], labels: Sequence[Any], worst: float | None = None) -> list[float]:
        """SQuAD's F1 of each answer."""
        golds = [[gold.text for gold in given] for given in labels]
        return best_matches([answer.answer for answer in answers], golds)["f1"]

    def as_labels(self, answers: Sequence[Any]) -> list[Any]:
        return [[Gold(answer.answer, answer.start)] if answer.answer else [] for answer in answers]

    # ---- in training

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean of both cross-entropies, over the tokens that may be read."""
        likely = readable(logits, labels).log_softmax(dim=-1)
        return -likely.gather(-1, right_positions(labels)).mean(dim=(1, 2))

    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return kl(readable(teacher, labels), readable(student, labels)).mean(dim=1)  # [B, 2] -> [B]

    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.transpose(1, 2).gather(-1, right_positions(labels)).sum(dim=(1, 2))


def candidate(context: str, start: int, end: int, score: float) -> Candidate:
    """A part of the context, without the spaces that some tokenizers count among a token's characters."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    return Candidate(text.strip(), score, start, start + len(text.strip()))


def readable(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, T, 2] -> [B, 2, T], with NEVER at the tokens that are not read."""
    return logits.masked_fill((labels == IGNORED).unsqueeze(-1), NEVER).transpose(1, 2)


def right_positions(labels: Tensor) -> Tensor:
    """[B, T] -> [B, 2, 1]: where the answer starts and ends."""
    marks = labels.clamp(min=0)
    return torch.stack([(marks & bit > 0).int().argmax(dim=1) for bit in (START, END)], dim=1).unsqueeze(-1)


def candidates(logits: Tensor, place: Place) -> list[tuple[tuple[int, int], float]]:
    """[T, 2] -> the best candidates of a window: their characters in the context, and the sum of both logits."""
    n = len(place.offsets)
    if n == 0:
        return []
    start, end = logits[place.first : place.first + n].double().T  # [n] each
    beyond = end.new_full((LONGEST_ANSWER - 1,), -torch.inf)
    scores = start.unsqueeze(1) + torch.cat([end, beyond]).unfold(0, LONGEST_ANSWER, 1)  # [n, longest]
    best = scores.flatten().topk(min(CANDIDATES, scores.numel()))
    chosen = []
    for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        first, length = divmod(index, LONGEST_ANSWER)
        if score > -torch.inf:
            chosen.append(((place.offsets[first][0], place.offsets[first + length][1]), score))
    return chosen
