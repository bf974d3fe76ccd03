"""What pretraining hides, in which order, and the tokenizer it may learn."""

from __future__ import annotations

import numpy as np
import pytest
from meals import corpus

from stretto.data.tokenise import IGNORED
from stretto.data.wordpiece import train_tokenizer
from stretto.training.masking import HiddenWords, Order, Vocabulary, Window, cut, hide


def window(words: list[int]) -> Window:
    """[CLS], tokens of these words (ids from 10), [SEP]."""
    return Window(np.array([2, *range(10, 10 + len(words)), 3]), np.array([-1, *words, -1]))


# ---- hiding words ------------------------------------------------------------------------------------------

LETTERS = Vocabulary(mask_token_id=4, ordinary=np.arange(5, 100))


def test_whole_words_are_hidden_and_nothing_else() -> None:
    words = [0, 1, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 13]  # 20 tokens: 3 are to be told
    given, fates, counts = window(words), [], []
    for seed in range(600):
        ids, labels = hide(given, LETTERS, np.random.default_rng(seed))
        told = labels != IGNORED
        assert labels[told].tolist() == given.ids[told].tolist()
        assert ids[~told].tolist() == given.ids[~told].tolist()
        assert not told[0] and not told[-1]
        counts.append(int(told.sum()))
        for word in set(given.words[told].tolist()):
            whole = given.words == word
            assert told[whole].all()
            masked, kept = ids[whole] == 4, ids[whole] == given.ids[whole]
            assert masked.all() or not masked.any()
            fates.append("masked" if masked.all() else "kept" if kept.all() else "replaced")
    assert max(counts) == 3
    assert np.mean(counts) > 2.8  # less only where no word fits into what is left
    shares = {fate: fates.count(fate) / len(fates) for fate in ("masked", "replaced", "kept")}
    assert shares == pytest.approx({"masked": 0.8, "replaced": 0.1, "kept": 0.1}, abs=0.03)


def test_a_word_is_hidden_even_if_it_is_long() -> None:
    _, labels = hide(window([0, 0, 0, 1, 1, 1]), LETTERS, np.random.default_rng(0))
    assert int((labels != IGNORED).sum()) == 3


def test_other_words_are_hidden_in_another_epoch() -> None:
    data = HiddenWords([window(list(range(20)))] * 3, LETTERS, seed=1)
    assert data[0, 1] == data[0, 1]
    assert data[0, 1]["labels"] != data[1, 1]["labels"]
    assert data[0, 1]["labels"] != data[0, 2]["labels"]
    assert data[0] == data[0, 0]
    assert HiddenWords(data.windows, LETTERS, seed=2)[0, 1]["labels"] != data[0, 1]["labels"]


def test_every_window_comes_once_in_an_epoch() -> None:
    windows, epoch = [window(list(range(n % 7 + 2))) for n in range(30)], iter([0, 1, 0])
    order = Order(windows, 4, seed=1, epoch=lambda: next(epoch))
    first, second, again = list(order), list(order), list(order)
    assert sorted(index for _, index in first) == list(range(30))
    assert {epoch for epoch, _ in second} == {1}
    assert [index for _, index in first] != [index for _, index in second]
    assert first == again


def test_long_texts_are_cut_and_short_ones_left_out() -> None:
    tokenizer = train_tokenizer(corpus(), 60)
    long = " ".join(corpus(5))
    whole = tokenizer(long, add_special_tokens=False)["input_ids"]
    pieces = list(cut(tokenizer, ["cat", "", long], 12))
    assert [token for piece in pieces for token in piece.ids[1:-1].tolist()] == whole
    assert max(len(piece.ids) for piece in pieces) == 12
    assert {(piece.ids[0], piece.ids[-1]) for piece in pieces} == {(tokenizer.cls_token_id, tokenizer.sep_token_id)}


# ---- the tokenizer -----------------------------------------------------------------------------------------


def test_a_tokenizer_is_learned() -> None:
    made = train_tokenizer(["Aa aa ab"] * 20, 40)
    assert made.tokenize("AA") == made.tokenize("aa")
    assert made("aa ab").tokens() == ["[CLS]", *made.tokenize("aa ab"), "[SEP]"]
    assert len(made) <= 40
    cased = train_tokenizer(["Aa aa ab"] * 20, 40, cased=True)
    assert cased.tokenize("Aa") != cased.tokenize("aa")
    assert "##b" not in made.all_special_tokens
    assert made.decode(made("aa ab")["input_ids"], skip_special_tokens=True) == "aa ab"


def test_the_same_texts_give_the_same_tokenizer() -> None:
    made = [train_tokenizer(corpus(), 60).get_vocab() for _ in range(4)]
    assert all(vocabulary == made[0] for vocabulary in made)
    assert len(made[0]) == 60
