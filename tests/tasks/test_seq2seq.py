"""The task of answering by texts: columns, features, loss, scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from stretto.data import Columns, load
from stretto.data.tokenise import EncodedDataset, collate
from stretto.engine.written import Text
from stretto.errors import StrettoError
from stretto.tasks import Seq2Seq
from stretto.tasks.metrics import translation, translation_signatures
from stretto.training.scratch import joint_tokenizer


def test_the_loss_is_a_mean_over_tokens() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3], [4, -100, -100]])
    loss = Seq2Seq(label_smoothing=0.1).loss(logits, labels)
    assert loss.shape == (2,)
    there = labels >= 0
    torch.testing.assert_close(loss.mean(), cross_entropy(logits[there], labels[there], label_smoothing=0.1))


def test_distillation_reads_tokens_only() -> None:
    task, labels = Seq2Seq(), torch.tensor([[1, -100]])
    teacher, student = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    student[0, 1] = torch.tensor([9.0, 0.0, 0.0])  # padding
    assert task.distillation(student, teacher, labels).tolist() == [0.0]
    student[0, 0] = torch.tensor([1.0, 0.0, 0.0])
    assert task.distillation(student, teacher, labels).item() > 0.01


def test_bleu_and_chrf_are_sacrebleus() -> None:
    right = ["A man is riding a brown horse.", "Two dogs play in the snow."]
    assert translation(right, right) == {"bleu": 1.0, "chrf": 1.0}
    worse = translation(["A man rides a brown horse.", "Two dogs play in snow."], right)
    assert 0.1 < worse["bleu"] < 0.9 and worse["bleu"] < worse["chrf"]
    assert "tok:13a" in translation_signatures()["bleu"] and "case:mixed" in translation_signatures()["bleu"]


def test_scores_average_exits_over_tokens() -> None:
    texts = [Text([4, 5, 1], -1.0, [1, 1, 4], "a b"), Text([1], -1.0, [6], "")]
    scores = Seq2Seq().scores(texts, None, ["a b", "c"])  # type: ignore[arg-type]
    assert scores["average_exit"] == 3.0
    assert texts[0].average_exit == 2.0


def test_columns_and_features(tmp_path: Path) -> None:
    rows = [{"src": "ein Haus", "tgt": "a house, a house, a house"}, {"src": "Haus", "tgt": "house"}]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = load(file, task=Seq2Seq)
    assert data.texts == [("ein Haus",), ("Haus",)] and data.labels == [row["tgt"] for row in rows]
    tokenizer = joint_tokenizer(["ein Haus", "a house"], 300, 64)
    encoded = Seq2Seq().encode(tokenizer, data.texts, 64, data.labels)
    examples = EncodedDataset(encoded.features, encoded.labels)
    batch = collate(tokenizer.pad_token_id)([examples[0], examples[1]])
    assert batch["labels"].shape[1] > batch["input_ids"].shape[1]  # each padded to its own longest
    assert batch["labels"][0, -1] == tokenizer.eos_token_id and batch["labels"][1, -1] == -100
    assert len(Seq2Seq().encode(tokenizer, data.texts, 4, data.labels).labels[0]) == 4  # type: ignore[index]
    with pytest.raises(StrettoError, match="expected a column 'x'"):
        load(file, task=Seq2Seq, columns=Columns(text="x"))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"german": "Haus", "english": "house"}))
    with pytest.raises(StrettoError, match="known to hold the texts to read"):
        load(other, task=Seq2Seq)
    assert load(other, task=Seq2Seq, columns=Columns(text="german", label="english")).labels == ["house"]
