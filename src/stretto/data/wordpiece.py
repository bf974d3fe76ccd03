"""A WordPiece tokenizer like BERT's, trained on texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stretto.errors import StrettoError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

#: Only so many of the most frequent characters are known.
ALPHABET = 1000


def train_tokenizer(texts: Sequence[str], vocab_size: int, *, cased: bool = False) -> PreTrainedTokenizerFast:
    """About `vocab_size` entries; the same texts always give the same ones."""
    if vocab_size <= len(SPECIAL):
        raise StrettoError(
            f"Expected a --vocab-size above {len(SPECIAL)}, got {vocab_size}. 8000 is a usual small one."
        )
    learner = blank(models.WordPiece(unk_token="[UNK]"), cased)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        limit_alphabet=ALPHABET,
        # The library numbers the characters inside words in the order of a hash table, which differs between runs. Ties
        # between pieces are decided by number. As special tokens they are numbered in the order given.
        special_tokens=[*SPECIAL, *(f"##{character}" for character in inner_characters(learner, texts))],
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learned = blank(models.WordPiece(learner.get_vocab(), unk_token="[UNK]"), cased)  # where they are not special
    learned.decoder = decoders.WordPiece()
    learned.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=learned,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


def blank(model: models.WordPiece, cased: bool) -> Tokenizer:
    """A tokenizer that splits as BERT's does."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def inner_characters(tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """The most frequent characters after the first of a word, in alphabetical order."""
    normalize, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    counts = Counter(letter for text in texts for word, _ in split(normalize(text)) for letter in word[1:])
    frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[:ALPHABET]
    return sorted(frequent)
