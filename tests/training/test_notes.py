"""A method's notes on its training tokens: made once, found by example, read back after a kill."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny import tiny_encoder, tiny_model, tiny_reviews, tiny_tokenizer
from torch import Tensor

from stretto import AdaptiveModel, StrettoError, train
from stretto.backbones import backbone_for
from stretto.data.tokenise import EncodedDataset, collate
from stretto.methods import Dial, Method, Shape, Stage, TrainingBatch
from stretto.methods.full import FullConfig
from stretto.state import Inputs
from stretto.tasks import Classification
from stretto.training.notes import with_notes

QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 8}


class Killed(Exception):
    pass


class Noting(Method):
    """Notes the number of each example on each of its tokens, and remembers what came back."""

    name = "noting"
    Config = FullConfig
    dial = Dial("none", "nothing is decided", off=0.0, sweep=(0.0,), upper=0.0)
    prepared: ClassVar[list[str]] = []
    seen: ClassVar[list[tuple[tuple[int, ...], int]]] = []
    die_at: ClassVar[int | None] = None
    surplus: ClassVar[int] = 0

    def stages(self) -> list[Stage]:
        return [Stage("noted", 2, 1e-3, decides=True, dials=(0.0,), objective=self.learn, prepare=self.note)]

    def note(self, engine: Any, batches: Iterator[tuple[Inputs, Tensor]]) -> dict[str, list[Tensor]]:
        self.prepared.append("noted")
        assert not self.training
        lengths = [int(n) for inputs, labels in batches for n in inputs.attention_mask.sum(dim=1)]
        number = [torch.full((n + self.surplus,), float(i)) for i, n in enumerate(lengths, start=1)]
        place = [torch.arange(n) for n in lengths]
        return {"number": number, "place": place}

    def learn(self, batch: TrainingBatch) -> Tensor:
        inputs = batch.inputs
        assert set(inputs.notes) == {"number", "place"}
        assert torch.equal(inputs.notes["place"] * inputs.attention_mask, inputs.positions * inputs.attention_mask)
        for ids, mask, number in zip(
            inputs.input_ids, inputs.attention_mask.bool(), inputs.notes["number"], strict=True
        ):
            assert not bool(number[~mask].any())
            (example,) = set(number[mask].tolist())
            self.seen.append((tuple(ids[mask].tolist()), int(example)))
        if batch.step == self.die_at:
            raise Killed
        return self.loss_at(0.0)(batch)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"prepared": [], "seen": [], "die_at": None, "surplus": 0}.items():
        monkeypatch.setattr(Noting, name, value)


def noting_model() -> AdaptiveModel:
    encoder, task = copy.deepcopy(tiny_encoder("bert", 2)), Classification(["bad", "good"])
    backbone = backbone_for(encoder)
    method = Noting(FullConfig(), Shape(backbone.d, backbone.n_layers, backbone.n_labels), task)
    return AdaptiveModel(encoder, tiny_tokenizer(), method, task).eval()


def numbers(data: Any) -> dict[tuple[int, ...], int]:
    """The tokens of each example -> its number, from 1."""
    tokenizer = tiny_tokenizer()
    found = {tuple(tokenizer(*texts)["input_ids"]): i for i, texts in enumerate(data.texts, start=1)}
    assert len(found) == len(data.texts)  # all different
    return found


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
def test_notes_reach_their_examples_in_any_order(sampling: str, tmp_path: Path) -> None:
    data = tiny_reviews(40)
    train(noting_model(), data, data, tmp_path / "out", train_sampling_strategy=sampling, **QUICK)
    expected = numbers(data)
    assert len(Noting.seen) == 80  # two epochs
    assert all(expected[tokens] == example for tokens, example in Noting.seen)
    order = [example for _, example in Noting.seen]
    assert order[:40] != sorted(order[:40])
    assert order[:40] != order[40:]
    assert Noting.prepared == ["noted"]
    assert not (tmp_path / "out.work").exists()


def test_notes_are_read_back_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_reviews(40)
    with monkeypatch.context() as patch:
        patch.setattr(Noting, "die_at", 7)  # in the second epoch of 5 steps
        with pytest.raises(Killed):
            train(noting_model(), data, data, tmp_path / "out", **QUICK)
    assert (tmp_path / "out.work" / "1-noted" / "notes.safetensors").exists()
    Noting.seen.clear()
    train(noting_model(), data, data, tmp_path / "out", **QUICK)
    expected = numbers(data)
    assert len(Noting.seen) == 40  # from the checkpoint after the first epoch on
    assert all(expected[tokens] == example for tokens, example in Noting.seen)
    assert Noting.prepared == ["noted"]  # not once more


def test_notes_that_do_not_fit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noting, "surplus", 1)
    data = tiny_reviews(8)
    with pytest.raises(StrettoError, match=r"Expected a note 'number' on each of the \d+ tokens of example 0, got \d+"):
        train(noting_model(), data, data, tmp_path / "out", **QUICK)


def test_a_method_without_notes_leaves_the_examples_alone(tmp_path: Path) -> None:
    model = noting_model()
    examples = EncodedDataset([{"input_ids": [2, 5, 3], "attention_mask": [1, 1, 1]}], [1])
    (stage,) = model.method.stages()
    for prepare in (None, lambda *_: {}):
        unnoted = dataclasses.replace(stage, prepare=prepare)
        assert with_notes(model, unnoted, examples, tmp_path, False) is examples
    assert not list(tmp_path.iterdir())


def test_notes_are_padded_with_zeros() -> None:
    features = [{"input_ids": [2, 5, 3], "attention_mask": [1, 1, 1]}, {"input_ids": [2, 3], "attention_mask": [1, 1]}]
    examples = EncodedDataset(features, [1, 0], {"mark": [torch.tensor([0.5, 1.0, 1.5]), torch.tensor([2.0, 2.5])]})
    batch = collate(0)([examples[1], examples[0]])
    assert batch["mark"].tolist() == [[2.0, 2.5, 0.0], [0.5, 1.0, 1.5]]
    assert batch["example_id"].tolist() == [1, 0]


def test_notes_are_the_mean_of_the_best_checkpoints(tmp_path: Path) -> None:
    """Saliency of three checkpoints of the fine-tuning, averaged, as AdapLeR is published."""
    seen: list[list[Tensor]] = []
    model = tiny_model("adapler", num_train_epochs=4, adaptive_epochs=1, retrain_epochs=0, saliency_checkpoints=3)
    note = model.method.note_saliency

    def watched(engine: Any, batches: Any) -> Any:
        found = note(engine, batches)
        seen.append(found["saliency"])
        return found

    model.method.note_saliency = watched
    learned: list[Tensor] = []

    def watched_loss(batch: TrainingBatch) -> Tensor:
        if len(batch.labels) == 6:
            learned.append(batch.inputs.notes["saliency"])
        return adaptive_loss(batch)

    adaptive_loss, model.method.adaptive_loss = model.method.adaptive_loss, watched_loss
    data = tiny_reviews(6)
    train(model, data, data, tmp_path / "out", **QUICK)
    assert len(seen) == 3
    assert not torch.equal(torch.cat(seen[0]), torch.cat(seen[1]))
    mean = torch.stack([torch.cat(each) for each in seen]).mean(dim=0)
    (together,) = learned
    torch.testing.assert_close(together[together > 0].sort().values, mean.sort().values)
