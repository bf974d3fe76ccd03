"""Agreement with human rationales: are the tokens that a model uses those that people marked?

Per layer, for the words that people marked as the reason for the label:

    average precision     of the words' scores against the marks, averaged over texts (mAP)
    false-positive rate   of the selected words: the part of the unmarked words that is selected

A word's score is the sum of its tokens' scores. Scores of a layer sum to 1 over its n tokens, special ones included; a
token is selected if its score is at least 1/n (the uniform level), a word if one of its tokens is.

Modarressi, Mohebbi, Pilehvar: *AdapLeR*, ACL 2022, section 5 and Figure 5. Sources of scores:

    contribution   what a method that drops before layers ranks tokens by, in its own run
    kept           no scores: the words that a method which drops or freezes tokens still updates in each layer
    saliency       gradient × input of the right answer, at what each layer reads   -> `stretto.methods.saliency`
    attention      attention received in the layer, all heads and tokens together  -> `attention_received`
    rollout        [CLS]'s row of the product of the layers' attention              -> `attention_rollout`

The last three are of the full model. Rollout: Abnar, Zuidema: *Quantifying Attention Flow in Transformers*, ACL 2020.

Differs from the paper: *kept* is our addition (the paper selects by 1/n only). A token that was dropped scores 0. Words
beyond the length limit are not counted; texts without marked or without unmarked words are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm.auto import tqdm

from stretto.data.batches import batches
from stretto.data.columns import whole_text, word_or_number
from stretto.data.records import Record
from stretto.data.sources import open_table
from stretto.data.tokenise import Origin, origins
from stretto.errors import StrettoError
from stretto.methods.saliency import layer_saliency
from stretto.model import AdaptiveModel
from stretto.state import Inputs
from stretto.view.explain import watch

Array = NDArray[Any]
#: Room for rounding: n scores of exactly 1/n are all selected.
SLACK = 1e-6


@dataclass(frozen=True)
class Rationale:
    """A text in words, its label, and which words are the reason for it."""

    words: tuple[str, ...]
    marks: tuple[int, ...]
    """1 where a word is marked, else 0."""
    label: int | float
    where: str


@dataclass(frozen=True)
class Curve:
    """By layer; None where no text has a value."""

    average_precision: list[float | None]
    false_positive_rate: list[float | None]


@dataclass(frozen=True)
class Agreement:
    curves: dict[str, Curve]
    """By source of the scores."""
    texts: int
    left_out: int
    """Texts without marked or without unmarked words."""
    words: int
    unscored: int
    """Words without tokens: beyond the length limit."""
    marked: float
    """Part that is marked of the words scored in texts not left out: the average precision of chance."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# ---- data --------------------------------------------------------------------------------------------------


def load_rationales(source: str, model: AdaptiveModel, split: str | None = None) -> list[Rationale]:
    """Rows with `tokens` (a list of words), `rationale` (0 or 1 for each) and `label`."""
    table = open_table(source, split)
    rows = list(table.rows)
    if not rows:
        raise StrettoError(f"{source}: expected at least one row of data, got none. Check that the file is complete.")
    examples = [(where, *_checked(where, row, table.classes.get("label"))) for where, row in rows]
    labels: Sequence[int | float]
    if model.task.answers != "sequence":
        raise StrettoError(
            f"Expected a model that answers whole texts, got one for the task {model.task.name}. "
            "Use a classification or a regression model."
        )
    if model.task.label_names:
        records = [Record((" ".join(words),), label, where) for where, words, _, label in examples]
        labels, _ = model.task.form.labels.numbered(records, model.task.label_names)
    else:
        labels = [0.0] * len(examples)  # regression has one logit only
    return [
        Rationale(words, marks, number, where)
        for (where, words, marks, _), number in zip(examples, labels, strict=True)
    ]


def _checked(
    where: str, row: dict[str, Any], classes: tuple[str, ...] | None
) -> tuple[tuple[str, ...], tuple[int, ...], Any]:
    words, marks = row.get("tokens"), row.get("rationale")
    label = word_or_number(where, row.get("label"), "label", classes)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words) or not words:
        raise StrettoError(f"{where}: expected a list of words in 'tokens', got {words!r:.60}. Use a .jsonl file.")
    for word in words:
        whole_text(word, f"{where}: expected Unicode words in 'tokens'")
    if not isinstance(marks, list) or len(marks) != len(words) or not all(mark in (0, 1) for mark in marks):
        raise StrettoError(
            f"{where}: expected {len(words)} numbers, 0 or 1, in 'rationale', got {marks!r:.60}. Give one per word."
        )
    if label is None:
        raise StrettoError(f"{where}: expected a label in 'label', got none. Fill it in.")
    return tuple(words), tuple(int(mark) for mark in marks), label


# ---- scores of tokens --------------------------------------------------------------------------------------


def attention_received(attentions: Iterable[Tensor]) -> Tensor:
    """[heads, T, T] per layer -> [L, T]: the columns' part of all attention."""
    columns = torch.stack([layer.sum(dim=(0, 1)) for layer in attentions])
    return columns / columns.sum(dim=-1, keepdim=True)


def attention_rollout(attentions: Iterable[Tensor]) -> Tensor:
    """[heads, T, T] per layer -> [L, T]: how much of [CLS] after each layer comes from each token of the input.

    Â = (mean over heads + I) / 2 with rows summing to 1; rollout_l = Â_l rollout_{l-1}; the first row of it."""
    rolled: Tensor | None = None
    rows = []
    for layer in attentions:
        mixed = 0.5 * layer.mean(dim=0) + 0.5 * torch.eye(layer.shape[-1]).to(layer)
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        rolled = mixed if rolled is None else mixed @ rolled
        rows.append(rolled[0])
    return torch.stack(rows)


def full_model_scores(model: AdaptiveModel, inputs: Inputs, label: int | float) -> dict[str, Tensor]:
    """[L, T] each, for a batch of one sequence."""
    attentions = [layer[0] for layer in model.reference.attentions(inputs)]
    labels = torch.tensor([label], device=inputs.input_ids.device)
    return {
        "saliency": layer_saliency(model.reference, model.task, inputs, labels)[:, 0],
        "attention": attention_received(attentions),
        "rollout": attention_rollout(attentions),
    }


def selected(scores: Array) -> Array:
    """[L, T] scores, NaN where a token is gone -> [L, T] bool: at least the uniform level 1/n."""
    present = (~np.isnan(scores)).sum(axis=1, keepdims=True)
    return np.nan_to_num(scores) * present >= 1 - SLACK


# ---- from tokens to words ----------------------------------------------------------------------------------


def place_tokens(words: Sequence[str], found: Sequence[Origin]) -> Array:
    """[T] the word each token is part of, in the text of the words joined by spaces; -1 for special tokens."""
    starts = list(accumulate((len(word) + 1 for word in words), initial=0))[:-1]
    # by a token's last character: some tokenizers include the space before a word
    return np.array([-1 if place.side is None else bisect_right(starts, place.end - 1) - 1 for place in found])


def gather(values: Array, word_of: Array, n_words: int) -> Array:
    """[L, T] of tokens -> [L, W] sums over the tokens of each word."""
    sums = np.zeros((len(values), n_words + 1))
    np.add.at(sums.T, word_of, values.T)  # special tokens go to the last column
    return sums[:, :-1]


def average_precisions(scores: Array, marks: Array) -> Array:
    """[L, W] scores and [W] marks -> [L]"""
    from sklearn.metrics import average_precision_score

    return np.array([average_precision_score(marks, layer) for layer in scores])


def false_positive_rates(chosen: Array, marks: Array) -> Array:
    """[L, W] bool and [W] marks -> [L] the part of the unmarked words that is chosen."""
    return chosen[:, marks == 0].mean(axis=1)


# ---- agreement ---------------------------------------------------------------------------------------------


def agreement(
    model: AdaptiveModel, examples: Sequence[Rationale], dial: float | None = None, *, progress: bool = True
) -> Agreement:
    """Compare every source of scores that the model has with the marks."""
    per_text: dict[str, list[Array]] = {}  # [2, L] each: average precision, false-positive rate
    words = unscored = compared = marked = left_out = 0
    for example in tqdm(examples, unit=" texts", disable=not progress, leave=False):
        text = (" ".join(example.words),)
        found = origins(model.tokenizer, text, model.max_length)
        if found is None:
            raise StrettoError(
                "Expected a fast tokenizer, which knows where its tokens come from, got one written in Python. "
                "Save the model with its fast tokenizer (tokenizer.json)."
            )
        word_of = place_tokens(example.words, found)
        scored = np.isin(np.arange(len(example.words)), word_of)
        marks = np.array(example.marks)[scored]
        words, unscored = words + len(scored), unscored + int((~scored).sum())
        if len(set(marks.tolist())) < 2:
            left_out += 1
            continue
        compared, marked = compared + len(marks), marked + int(marks.sum())
        for name, (scores, chosen) in _token_scores(model, example, text, dial).items():
            ran = chosen.any(axis=1) if scores is None else ~np.isnan(scores).all(axis=1)  # [CLS] never goes
            chosen_words = gather(chosen, word_of, len(scored))[:, scored] > 0
            values = np.full((2, len(chosen)), np.nan)
            values[1] = np.where(ran, false_positive_rates(chosen_words, marks), np.nan)
            if scores is not None:
                sums = gather(np.nan_to_num(scores), word_of, len(scored))[:, scored]
                values[0] = np.where(ran, average_precisions(sums, marks), np.nan)
            per_text.setdefault(name, []).append(values)
    if left_out == len(examples):
        raise StrettoError(
            f"Expected texts with marked and unmarked words, got none among {len(examples)}. Check 'rationale'."
        )
    curves = {name: Curve(*map(_means, np.stack(values, axis=1))) for name, values in per_text.items()}
    return Agreement(curves, len(examples), left_out, words, unscored, marked / compared)


def _token_scores(
    model: AdaptiveModel, example: Rationale, text: tuple[str, ...], dial: float | None
) -> dict[str, tuple[Array | None, Array]]:
    """By source: [L, T] scores (None if it has none) and [L, T] bool, the tokens it selects."""
    features = model.encode([text]).features
    (inputs,) = batches(features, model.tokenizer.pad_token_id, 1)
    inputs = inputs.to(model.encoder.device)
    sources: dict[str, tuple[Array | None, Array]] = {}
    drops = model.method.points & {"before", "between"}
    if drops:
        watcher = watch(model, inputs, dial)
        own = watcher.scores.numpy()
        own = own / np.maximum(np.nansum(own, axis=1, keepdims=True), np.finfo(float).tiny)
        if "before" in drops and not np.isnan(own).all():
            sources["contribution"] = own, selected(own)
        sources["kept"] = None, (watcher.lives[1:] & ~watcher.frozen).numpy()
    for name, scores in full_model_scores(model, inputs, example.label).items():
        array = scores.double().cpu().numpy()
        sources[name] = array, selected(array)
    return sources


def _means(values: Array) -> list[float | None]:
    """[texts, L] -> [L] over the texts that have a value."""
    return [float(np.nanmean(column)) if not np.isnan(column).all() else None for column in values.T]
