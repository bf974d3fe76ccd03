"""Texts to features, and features to padded batches."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, ByT5Tokenizer, PreTrainedTokenizerFast, RobertaConfig, T5Config

from stretto.data import tokenise as encoding
from stretto.data.batches import batches
from stretto.data.tokenise import EncodedDataset, collate, encode, max_length_of
from stretto.errors import StrettoError

# ---- encoding ----------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]


BERT = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
ROBERTA = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2), add_prefix_space=False)  # two [SEP] in a pair
TEMPLATE = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)


def tiny_tokenizer(side: str = "right", post_processor: Any = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = post_processor
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8, truncation_side=side,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def test_encode_single_texts_and_pairs() -> None:
    tokenizer = tiny_tokenizer()
    encoded = encode(tokenizer, [("a b",), ("",)], 8)
    assert encoded.truncated == 0
    assert encoded.features == [
        {"input_ids": [2, 4, 5, 3], "token_type_ids": [0, 0, 0, 0], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": [2, 3], "token_type_ids": [0, 0], "attention_mask": [1, 1]},
    ]
    [pair] = encode(tokenizer, [("a", "b c")], 8).features
    assert (pair["input_ids"], pair["token_type_ids"]) == ([2, 4, 3, 5, 6, 3], [0, 0, 0, 1, 1, 1])
    assert encode(tokenizer, [], 8).features == []


words = st.lists(st.sampled_from("abcdefgh"), max_size=14).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 2).flatmap(lambda n: st.lists(st.tuples(*[words] * n), max_size=6)), st.integers(5, 12), st.data()
)
def test_encode_cuts_as_the_tokenizer_itself_does(texts: list[tuple[str, ...]], longest: int, data: Any) -> None:
    side, processor = st.sampled_from(["right", "left"]), st.sampled_from([BERT, ROBERTA, TEMPLATE])
    tokenizer = tiny_tokenizer(data.draw(side), data.draw(processor))
    encoded = encode(tokenizer, texts, longest)
    for text, feature in zip(texts, encoded.features, strict=True):
        batch_of_one = [[part] for part in text]
        expected = tokenizer(*batch_of_one, truncation="longest_first", max_length=longest)
        assert feature == {name: values[0] for name, values in expected.items()}
    specials = [tokenizer.num_special_tokens_to_add(pair=len(text) == 2) for text in texts]
    lengths = [sum(len(part.split()) for part in text) for text in texts]
    assert encoded.truncated == sum(a + b > longest for a, b in zip(lengths, specials, strict=True))


def test_encode_works_in_chunks_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [(" ".join("abcdefgh"[: i % 8]),) for i in range(20)]
    whole = encode(tiny_tokenizer(), texts, 6)
    monkeypatch.setattr(encoding, "CHUNK", 3)
    assert encode(tiny_tokenizer(), texts, 6) == whole
    assert whole.truncated == sum(i % 8 > 4 for i in range(20))


def test_encode_does_not_warn_of_long_texts(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    assert encode(tiny_tokenizer(), [("a " * 50,)], 8).truncated == 1
    assert caplog.records == []
    assert capfd.readouterr().err == ""


def test_encode_takes_tokenizers_written_in_python() -> None:
    tokenizer = ByT5Tokenizer()  # one token per byte, each text closed by a 1
    encoded = encode(tokenizer, [("AAAAAAAA", "BC"), ("A", ""), ("AAAAAAAA", "")], 7)
    assert encoded.truncated == 2
    a, b, c = 68, 69, 70
    ids = [feature["input_ids"] for feature in encoded.features]
    assert ids == [[a, a, a, 1, b, c, 1], [a, 1, 1], [a, a, a, a, a, 1, 1]]


def test_encode_refuses_too_short_a_length_and_mixed_inputs() -> None:
    with pytest.raises(StrettoError, match=r"above the 3 special tokens of an input, got 3\. Raise --max-length"):
        encode(tiny_tokenizer(), [("a", "b")], 3)
    with pytest.raises(StrettoError, match=r"Expected 1 text\(s\) per input, got one of 2\."):
        encode(tiny_tokenizer(), [("a",), ("a", "b")], 8)


def test_max_length_is_the_smaller_limit() -> None:
    tokenizer = tiny_tokenizer()
    assert max_length_of(tokenizer, BertConfig(max_position_embeddings=512)) == 8
    tokenizer.model_max_length = int(1e30)  # the word for "none"
    assert max_length_of(tokenizer, BertConfig(max_position_embeddings=512)) == 512
    assert max_length_of(tokenizer, RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512
    with pytest.raises(StrettoError, match=r"got neither \(t5\)\. Pass --max-length"):
        max_length_of(tokenizer, T5Config())


# ---- batches -----------------------------------------------------------------------------------------------


def test_dataset_items_and_padded_batches() -> None:
    features = encode(tiny_tokenizer(), [("a b",), ("",)], 8).features
    items = EncodedDataset(features, [1, 0])
    assert len(items) == 2
    assert items[1] == {**features[1], "labels": 0, "example_id": 1}
    batch = collate(pad_token_id=7)([items[1], items[0]])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[2, 3, 7, 7], [2, 4, 5, 3]],
        "token_type_ids": [[0, 0, 0, 0], [0, 0, 0, 0]],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
        "labels": [0, 1],
        "example_id": [1, 0],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.long}


def test_float_labels_and_no_labels() -> None:
    features = encode(tiny_tokenizer(), [("a",)], 8).features
    pad = pickle.loads(pickle.dumps(collate(0)))  # as a DataLoader's workers get it
    assert pad([EncodedDataset(features, [0.5])[0]])["labels"].dtype == torch.float32
    assert "labels" not in pad([EncodedDataset(features)[0]])
    with pytest.raises(StrettoError, match=re.escape("a label for each of 1 inputs, got 2.")):
        EncodedDataset(features, [0, 1])


def test_what_a_feature_holds_beside_tokens_becomes_a_note() -> None:
    first = {"input_ids": [2, 5, 3], "attention_mask": [1, 1, 1], "saliency": [0.2, 0.5, 0.3]}
    second = {"input_ids": [2, 3], "attention_mask": [1, 1], "saliency": [0.5, 0.5]}
    (inputs,) = batches([first, second], pad_token_id=0, batch_size=2)
    assert list(inputs.notes) == ["saliency"]
    torch.testing.assert_close(inputs.notes["saliency"], torch.tensor([[0.2, 0.5, 0.3], [0.5, 0.5, 0.0]]))
