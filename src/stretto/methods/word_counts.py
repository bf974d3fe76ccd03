"""Words: how often they occur in texts of each class, and the look-up of a batch's words in a table."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.data.words import Tally, Words, WordTable, words_in
from stretto.errors import StrettoError
from stretto.methods.base import Batches
from stretto.state import State


def presence(words: Words) -> Tensor:
    """Indices of the first occurrence of each word in each sequence: each word counts once per text."""
    _, kind = words.keys.unique(return_inverse=True)
    seen, place = (words.sequence * (len(words.keys) + 1) + kind).unique(return_inverse=True)
    numbers = torch.arange(len(place), device=place.device)
    return place.new_full((len(seen),), len(place)).scatter_reduce(0, place, numbers, "amin")


def texts_with_words(batches: Batches, classes_of: Tensor, n_classes: int) -> Tally:
    """Texts of each class that have a word, from texts whose classes ([n], in order) are known."""
    tally, done = Tally(n_classes), 0
    for inputs, _ in batches:
        classes = classes_of[done : (done := done + len(inputs.input_ids))]
        notes = inputs.notes
        words = words_in(inputs.input_ids, inputs.attention_mask, notes["word"], notes["word_key"])
        once = presence(words)
        hits = torch.nn.functional.one_hot(classes[words.sequence[once]], n_classes)
        tally.add(words.keys[once], words.pieces[once], hits)
    tally.settle()
    return tally


def rows_of(table: WordTable, state: State) -> Tensor:
    """[N] the row of the table for the word of each live token; -1 for unseen words and special tokens."""
    if "word_key" not in state.input_notes:
        raise StrettoError(
            "Expected the word of every token in Inputs.notes, got none. Tokenise with AdaptiveModel.encode."
        )
    return table.find(state.input_notes["word_key"])
