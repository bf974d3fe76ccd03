"""What stages learn from: labels where they are known, else what the full model answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from tiny import TAGS, tiny_model, tiny_questions, tiny_reviews, tiny_tagging

from stretto import AdaptiveModel, StrettoError, sweep, train
from stretto.data import Dataset
from stretto.methods import METHODS, Targets
from stretto.tasks import Classification, Regression, Span, Tokens
from stretto.training.material import ANSWERS, Material

QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 16}


def unlabelled(data: Any) -> Dataset:
    return Dataset(data.texts, None, None, data.where, data.form)


def test_texts_without_labels_learn_the_distance_to_the_full_model() -> None:
    method = METHODS["full"](METHODS["full"].Config(), tiny_model("full").method.shape, Classification(["no", "yes"]))
    logits, teacher = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log(), torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    targets = Targets(torch.tensor([1, 0]), teacher, torch.tensor([True, False]))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert method.loss(logits, targets).tolist() == pytest.approx([math.log(2), kl])
    assert method.loss(logits, Targets(torch.tensor([1, 0]), teacher)).tolist() == pytest.approx(
        [math.log(2), math.log(4)]  # all labels are known: the teacher alone changes nothing
    )


CASES = {
    "classification": (Classification(["bad", "good"]), tiny_reviews),
    "regression": (Regression(), tiny_reviews),
    "tokens": (Tokens(TAGS), tiny_tagging),
    "span": (Span(no_answer=True, stride=2), lambda n, seed: tiny_questions(n, seed, no_answer=True, longest=30)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_full_models_answers_are_labels_and_logits_of_every_feature(name: str, tmp_path: Path) -> None:
    task, make = CASES[name]
    model = tiny_model("full", task=task)
    model.max_length = 24  # questions have several windows
    few, more = make(6, seed=0), make(5, seed=1)
    labels = [float(label) for label in few.labels] if name == "regression" else few.labels
    material = Material(model, model.encode(few.texts, labels), unlabelled(more), tmp_path, progress=False)
    *_, stage = tiny_model("length_adaptive", task=task).method.stages()
    found = material.examples(stage)

    encoded = model.encode(more.texts)
    logits, _ = model.run_features(encoded.features, 0.0, 4)
    n = len(found) - len(encoded.features)
    assert found.n_labelled == n == len(material.train.features)
    assert [found[i]["known"] for i in range(len(found))] == [1] * n + [0] * len(encoded.features)
    for ours, full in zip(found.teacher[n:], logits, strict=True):
        torch.testing.assert_close(ours, full)
    as_labels = task.as_labels(task.decode(logits, encoded))
    assert list(found.labels[n:]) == list(model.encode(more.texts, as_labels).labels)
    scores = task.scores(logits, encoded, as_labels)  # the model agrees with itself
    assert scores[task.main_metric] == pytest.approx(1.0) or name == "tokens"  # of which there may be no entity
    assert scores.get("accuracy", 1.0) == 1.0

    (tmp_path / ANSWERS).rename(tmp_path / "kept")  # a later stage, or a resumed run, asks nobody again
    (tmp_path / "kept").rename(tmp_path / ANSWERS)
    model.encoder = None
    again = Material.__new__(Material)
    again.__dict__ = {**material.__dict__, "ask": None}
    assert torch.equal(torch.cat(again.answers(material.train)), torch.cat(found.teacher[:n]))


def test_stages_before_the_full_model_and_those_without_labels_ask_nobody(tmp_path: Path) -> None:
    model = tiny_model("depth_reconstruction")
    few, more = tiny_reviews(6), tiny_reviews(5, seed=1)
    material = Material(model, model.encode(few.texts, few.labels), unlabelled(more), tmp_path, progress=False)
    backbone, reconstruction, depths = model.method.stages()
    assert len(material.examples(backbone)) == 6
    assert len(material.examples(reconstruction)) == 11
    assert not (tmp_path / ANSWERS).exists()
    assert len(material.examples(depths)) == 11
    assert (tmp_path / ANSWERS).exists()


def test_exits_learn_from_texts_without_labels(tmp_path: Path) -> None:
    settings = {"exit_epochs": 4, "exit_learning_rate": 5e-3}
    start = tiny_model("full", num_train_epochs=6, learning_rate=2e-3)
    full = train(start, tiny_reviews(128), tiny_reviews(32, seed=1), tmp_path / "full", **QUICK)
    assert full.operating_points[0].score > 0.9
    few, more, test = tiny_reviews(6, seed=5), unlabelled(tiny_reviews(160, seed=3)), tiny_reviews(64, seed=4)
    few.labels = [1 - label for label in few.labels]  # and these labels are all wrong
    scores = []
    for texts in (None, more):
        model = AdaptiveModel.from_pretrained(tmp_path / "full", "deebert", **settings)
        train(model, few, few, tmp_path / f"exits-{texts is None}", skip="backbone", unlabelled=texts, **QUICK)
        scores.append(sweep(model, test, [1.0], progress=False)[0].score)  # all leave at the first exit
        assert not (tmp_path / f"exits-{texts is None}.work").exists()
    assert scores[0] < 0.5 and scores[1] > 0.8
    assert model.provenance["texts without labels"] == 160


def test_unlabelled_texts_from_the_command_line(tmp_path: Path) -> None:
    model = tiny_model("full", task=Classification(["bad", "good"]))
    model.save_pretrained(tmp_path / "full")
    rows = [{"text": text, "label": ["bad", "good"][label]} for (text,), label in zip(
        tiny_reviews(24).texts, tiny_reviews(24).labels, strict=True)]  # fmt: skip
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "more.txt").write_text("a good film\na bad film\n")
    result = run("train", tmp_path / "few.jsonl", "--model", tmp_path / "full", "--skip", "backbone", "--output",
                 tmp_path / "out", "--exit-epochs", "1", "--unlabelled", tmp_path / "more.txt")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert AdaptiveModel.from_pretrained(tmp_path / "out").provenance["texts without labels"] == 2
    missing = run("train", tmp_path / "few.jsonl", "--model", tmp_path / "full", "--skip", "backbone", "--output",
                  tmp_path / "out2", "--unlabelled", tmp_path / "nowhere.txt")  # fmt: skip
    assert missing.exit_code == 1 and "nowhere.txt" in missing.stderr
    assert not list(tmp_path.glob("out2*"))


def test_texts_without_labels_need_a_stage_that_can_use_them(tmp_path: Path) -> None:
    few, more = tiny_reviews(4), unlabelled(tiny_reviews(4, seed=1))
    with pytest.raises(StrettoError, match=r"got pabee.*--joint-start finetuned"):
        train(tiny_model("pabee"), few, few, tmp_path / "out", unlabelled=more, **QUICK)
    assert not any(tmp_path.iterdir())
