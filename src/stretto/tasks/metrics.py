"""The scores, each a function of arrays [N].

scikit-learn and scipy are imported where they are used, because they are slow to load. An undefined score (a
correlation with a constant) is 0.0, without a warning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def accuracy(truth: Array, predicted: Array) -> float:
    return float(np.mean(truth == predicted))


def macro_f1(truth: Array, predicted: Array) -> float:
    """The mean of the F1 of every class that occurs in the truth or among the predictions."""
    from sklearn.metrics import f1_score

    return float(f1_score(truth, predicted, average="macro", zero_division=0.0))


def mcc(truth: Array, predicted: Array) -> float:
    """Matthews' correlation of the true and the predicted classes."""
    from sklearn.metrics import matthews_corrcoef

    if len(np.union1d(truth, predicted)) < 2:  # scikit-learn warns of a single class
        return 0.0
    return float(matthews_corrcoef(truth, predicted))


def ece(logits: Array, truth: Array, bins: int = 15) -> float:
    """Expected calibration error (Guo et al. 2017): |accuracy - confidence|, averaged over equal-width bins.

    Confidence is the largest softmax probability; bin k holds the confidences in (k / bins, (k + 1) / bins].
    """
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))  # [N, C]
    confidence = 1 / exponents.sum(axis=1)  # the largest exponent is exp(0)
    hits = logits.argmax(axis=1) == truth
    bin_of = np.ceil(confidence * bins).astype(int) - 1  # never below 0, as confidence >= 1 / C
    # per bin: count / N * |accuracy - confidence| = |sum(hit - confidence)| / N
    gaps = np.bincount(bin_of, weights=hits - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(truth))


def pearson(truth: Array, predicted: Array) -> float:
    from scipy.stats import pearsonr

    return float(pearsonr(truth, predicted).statistic) if _vary(truth, predicted) else 0.0


def spearman(truth: Array, predicted: Array) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(truth, predicted).statistic) if _vary(truth, predicted) else 0.0


def mse(truth: Array, predicted: Array) -> float:
    """Mean squared error."""
    from sklearn.metrics import mean_squared_error

    return float(mean_squared_error(truth, predicted))


Tags = list[list[str]]  # for each sentence the tag of each word


def entities(truth: Tags, predicted: Tags) -> dict[str, float]:
    """F1, precision and recall of whole entities of the right type, over all sentences together, as conlleval counts.

    Without any entity in the truth and the prediction all are 0."""
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    precision, recall, f1, _ = precision_recall_fscore_support(truth, predicted, average="micro", zero_division=0)
    return {"f1": float(f1), "precision": float(precision), "recall": float(recall)}


def sentence_f1(truth: list[str], predicted: list[str]) -> float:
    """F1 of the entities of one sentence; 1 if there are none and none were found."""
    from seqeval.metrics.sequence_labeling import get_entities

    right, found = set(get_entities(truth)), set(get_entities(predicted))
    return 2 * len(right & found) / (len(right) + len(found)) if right or found else 1.0


def sentence_accuracy(truth: list[str], predicted: list[str]) -> float:
    """The part of the words of one sentence with the right tag; 1 without words."""
    return sum(true == made for true, made in zip(truth, predicted, strict=True)) / len(truth) if truth else 1.0


def tag_accuracy(truth: Tags, predicted: Tags) -> float:
    """The part of the words with the right tag; 0 without words."""
    pairs = [pair for true, made in zip(truth, predicted, strict=True) for pair in zip(true, made, strict=True)]
    return sum(true == made for true, made in pairs) / max(len(pairs), 1)


def tag_macro_f1(truth: Tags, predicted: Tags) -> float:
    flat = [np.array([tag for tags in sentences for tag in tags]) for sentences in (truth, predicted)]
    return macro_f1(*flat) if len(flat[0]) else 0.0


def _vary(*arrays: Array) -> bool:
    """Does every array vary by more than rounding? (scipy warns from a spread of 1e-13 of the mean.)"""
    return all(np.std(array) > 1e-12 * np.abs(np.mean(array)) for array in arrays)


def translation(written: list[str], right: list[str]) -> dict[str, float]:
    """Corpus BLEU and chrF in [0, 1], by sacreBLEU with its defaults (see `translation_signatures`)."""
    scores = {name: metric.corpus_score(written, [right]).score / 100 for name, metric in translation_metrics().items()}
    return {name: min(1.0, score) for name, score in scores.items()}  # rounding may give a little more


def translation_signatures() -> dict[str, str]:
    """What to report with a BLEU score so that others can reproduce it: version, case, tokenisation."""
    found = {}
    for name, metric in translation_metrics().items():
        metric.corpus_score(["a"], [["a"]])  # the number of references is part of it
        found[name] = str(metric.get_signature())
    return found


def translation_metrics() -> dict[str, Any]:
    from sacrebleu.metrics import BLEU, CHRF

    return {"bleu": BLEU(force=True), "chrf": CHRF()}  # force: no warning of texts that look tokenised
