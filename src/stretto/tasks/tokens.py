"""A tag for every word: named entities (IOB2 tags such as B-person, I-person, O) or plain tags such as parts of speech.

Words are split into pieces; the first piece of a word carries its tag. Words beyond the maximum length get no piece:
they are answered "O", and scored as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from stretto.data.columns import Words
from stretto.data.dataset import Form
from stretto.data.labels import WordClasses
from stretto.data.tokenise import CHUNK, IGNORED, Encoded, check_fast, words_of
from stretto.errors import StrettoError
from stretto.tasks import metrics
from stretto.tasks.base import Logits, Prediction, Task, check_finite, kl

OUTSIDE = "O"
PREFIXES = ("B-", "I-", "E-", "S-")


@dataclass(frozen=True)
class Entity:
    """Words that belong together."""

    type: str
    text: str
    """The words, joined by spaces."""
    start: int
    """Its first word."""
    end: int
    """The word behind its last."""
    score: float
    """Mean probability of its words' tags."""


@dataclass(frozen=True)
class TagPrediction(Prediction):
    """The answer to one sentence; the lists have an entry for each word."""

    words: list[str]
    tags: list[str]
    scores: list[float]
    """Probability of each tag; 0 for a word beyond the longest input."""
    entities: list[Entity]
    """Empty for plain tags."""

    @property
    def summary(self) -> str:
        if self.entities:
            return ", ".join(f"{entity.text} ({entity.type})" for entity in self.entities)
        return " ".join(self.tags)


class Tokens(Task):
    """Logits are [B, T, C]; labels are [B, T], with `IGNORED` wherever there is no tag to learn."""

    name: ClassVar[str] = "tokens"
    judged: ClassVar[bool] = True
    form: ClassVar[Form] = Form(Words, WordClasses)
    answers: ClassVar[Literal["sequence", "token", "text"]] = "token"
    given_words: ClassVar[bool] = True
    main_metric = "f1"
    architecture: ClassVar[str] = "ForTokenClassification"
    auto_class: ClassVar[str] = "AutoModelForTokenClassification"
    pipeline_tag: ClassVar[str] = "token-classification"
    example: ClassVar[str] = '"some words"'
    flat: ClassVar[bool] = False

    def __init__(self, label_names: Sequence[str]) -> None:
        if len(label_names) < 2 or len(set(label_names)) < len(label_names):
            raise StrettoError(
                f"Expected two or more different tags, got {list(label_names)}. Name each once, such as O, B-person."
            )
        super().__init__(label_names)
        self.has_entities = all(name == OUTSIDE or name.startswith(PREFIXES) for name in label_names)
        if not self.has_entities:
            self.main_metric = "accuracy"

    # ---- from words to features and back

    def parts_of(self, text: Any) -> tuple[str, ...]:
        words = (
            tuple(text.split()) if isinstance(text, str) else tuple(text) if isinstance(text, (tuple, list)) else None
        )
        if words is None or not all(isinstance(word, str) for word in words):
            raise StrettoError(f"Expected a text or a list of words, got {text!r:.80}. Pass strings.")
        return words

    def encode(
        self, tokenizer: Any, texts: Sequence[tuple[str, ...]], max_length: int, labels: Sequence[Any] | None = None,
        *, words: bool = False,
    ) -> Encoded:  # fmt: skip
        """`places` are, for each sentence, the position of each word's first piece; IGNORED for a word without one."""
        check_fast(tokenizer)
        room = max_length - tokenizer.num_special_tokens_to_add(pair=False)
        if room < 1:
            raise StrettoError(
                f"Expected a max_length that leaves room for words, got {max_length}. Raise --max-length."
            )
        features, places, truncated = [], [], 0
        for start in range(0, len(texts), CHUNK):
            sentences = [list(sentence) for sentence in texts[start : start + CHUNK]]
            batch = tokenizer(sentences, is_split_into_words=True, verbose=False)
            for i, sentence in enumerate(sentences):
                columns = {name: batch[name][i] for name in batch}
                if words:
                    columns["word"] = words_of(batch.encodings[i], tokenizer.unk_token_id)
                kept = within(batch.encodings[i].special_tokens_mask, room)
                truncated += len(kept) < len(columns["input_ids"])
                features.append({name: [column[k] for k in kept] for name, column in columns.items()})
                places.append(first_pieces([batch.word_ids(i)[k] for k in kept], len(sentence)))
        tagged = None
        if labels is not None:
            tagged = [
                tags_of_pieces(len(feature["input_ids"]), where, tags)
                for feature, where, tags in zip(features, places, labels, strict=True)
            ]
        return Encoded(texts, features, truncated, list(range(len(texts))), tagged, places)

    def decode(self, logits: Logits, encoded: Encoded) -> list[TagPrediction]:
        answers = []
        for words, numbers, scores in zip(encoded.texts, *self.tag(logits, encoded), strict=True):
            tags = self.named(numbers)
            answers.append(TagPrediction(list(words), tags, scores, self.entities(list(words), tags, scores)))
        return answers

    def scores(self, logits: Logits, encoded: Encoded, labels: Sequence[Any]) -> dict[str, float]:
        """Entity F1, precision and recall (seqeval, as conlleval counts) and the accuracy of single tags."""
        predicted = [self.named(numbers) for numbers in self.tag(logits, encoded)[0]]
        truth = [[self.label_names[number] for number in numbers] for numbers in labels]
        if self.has_entities:
            return {**metrics.entities(truth, predicted), "accuracy": metrics.tag_accuracy(truth, predicted)}
        return {"accuracy": metrics.tag_accuracy(truth, predicted), "macro_f1": metrics.tag_macro_f1(truth, predicted)}

    def tag(self, logits: Logits, encoded: Encoded) -> tuple[list[list[int]], list[list[float]]]:
        """The best tag's number and its probability for each word; IGNORED and 0 for a word without a piece."""
        numbers, scores = [], []
        for index, (row, where) in enumerate(zip(logits, encoded.places, strict=True)):  # row: [T, C]
            check_finite(row, index)
            best = row.float().softmax(dim=-1).max(dim=-1)
            tags, sure = best.indices.tolist(), best.values.tolist()
            numbers.append([IGNORED if p == IGNORED else tags[p] for p in where])
            scores.append([0.0 if p == IGNORED else sure[p] for p in where])
        return numbers, scores

    def named(self, numbers: Sequence[int]) -> list[str]:
        return [OUTSIDE if number == IGNORED else self.label_names[number] for number in numbers]

    def entities(self, words: list[str], tags: list[str], scores: list[float]) -> list[Entity]:
        if not self.has_entities:
            return []
        from seqeval.metrics.sequence_labeling import get_entities

        found = []
        for kind, first, last in get_entities(tags):
            here = slice(first, last + 1)
            found.append(Entity(kind, " ".join(words[here]), first, last + 1, sum(scores[here]) / (last + 1 - first)))
        return found

    def quality(self, answers: Sequence[Any], labels: Sequence[Any], worst: float | None = None) -> list[float]:
        """F1 of the entities of each sentence (1 if there are none and none were found); for plain tags accuracy."""
        truth = [self.named(numbers) for numbers in labels]
        judge = metrics.sentence_f1 if self.has_entities else metrics.sentence_accuracy
        return [judge(right, answer.tags) for right, answer in zip(truth, answers, strict=True)]

    def as_labels(self, answers: Sequence[Any]) -> list[Any]:
        number = {name: i for i, name in enumerate(self.label_names)}
        return [[number.get(tag, IGNORED) for tag in answer.tags] for answer in answers]  # O need not be a label

    # ---- in training

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")  # [B, T]
        return mean_where(each, labels != IGNORED)

    def distillation(self, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return mean_where(kl(teacher, student), labels != IGNORED)

    def right_logit(self, logits: Tensor, labels: Tensor) -> Tensor:
        tagged = labels != IGNORED
        right = logits.gather(-1, labels.where(tagged, 0).unsqueeze(-1)).squeeze(-1)  # [B, T]
        return (right * tagged).sum(dim=1)


def mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """[B, T] and bool [B, T] -> [B] mean over the chosen entries; 0 where none is."""
    return torch.where(chosen, values, 0).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)


def within(special: Sequence[int], room: int) -> list[int]:
    """Indices of the tokens that stay: all special ones (1 in `special`) and the first `room` others."""
    kept, others = [], 0
    for index, is_special in enumerate(special):
        others += not is_special
        if is_special or others <= room:
            kept.append(index)
    return kept


def first_pieces(word_ids: Sequence[int | None], n_words: int) -> list[int]:
    """For each word the position of its first piece, from the word of each position; IGNORED for one without."""
    places = [IGNORED] * n_words
    for position, word in enumerate(word_ids):
        if word is not None and places[word] == IGNORED:
            places[word] = position
    return places


def tags_of_pieces(length: int, places: Sequence[int], tags: Sequence[int]) -> list[int]:
    """The tag numbers of the words, each at its first piece, and IGNORED everywhere else."""
    labels = [IGNORED] * length
    for position, tag in zip(places, tags, strict=True):
        if position != IGNORED:
            labels[position] = tag
    return labels
