"""SQuAD's exact match and F1 (Rajpurkar et al. 2016; without an answer as in SQuAD 2.0, 2018)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

PUNCTUATION = frozenset(string.punctuation)


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and surplus spaces."""
    plain = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(answer: str, gold: str) -> float:
    return float(normalised(answer) == normalised(gold))


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words; with no words on either side both must have none."""
    words, right = normalised(answer).split(), normalised(gold).split()
    shared = (Counter(words) & Counter(right)).total()
    if not words or not right:
        return float(words == right)
    return 2 * shared / (len(words) + len(right))  # = 2 P R / (P + R)


def best_matches(answers: Sequence[str], golds: Sequence[Iterable[str]]) -> dict[str, list[float]]:
    """For each question the best match with any gold answer. No gold answer means that "" is right."""
    pairs = [
        (answer, [gold for gold in given if normalised(gold)] or [""])
        for answer, given in zip(answers, golds, strict=True)
    ]
    return {
        name: [max(match(answer, gold) for gold in right) for answer, right in pairs]
        for name, match in (("f1", f1), ("exact_match", exact_match))
    }


def squad_scores(answers: Sequence[str], golds: Sequence[Iterable[str]]) -> dict[str, float]:
    """Means of `best_matches` over all questions."""
    return {name: sum(each) / max(len(each), 1) for name, each in best_matches(answers, golds).items()}
