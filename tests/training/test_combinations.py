"""A combination is trained in stages from one call, gets one dial, and is saved as any other method."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny import give_table, tiny_model, tiny_reviews
from tiny_seq2seq import fresh, number_pairs
from torch import Tensor

from stretto import AdaptiveModel, StrettoError, sweep, train
from stretto.budget.frontier import search_pairs, set_frontier
from stretto.data.batches import batches
from stretto.data.tokenise import EncodedDataset, collate
from stretto.engine.decider import Decider
from stretto.engine.replay import Recorder
from stretto.methods import METHODS, Combined, Targets
from stretto.methods.combine import Beneath
from stretto.saving.points import OperatingPoint
from stretto.state import Inputs
from stretto.training.learner import Learner
from stretto.training.notes import above_beneath

QUICK = {"per_device_train_batch_size": 16, "progress": False, "seed": 1}
PAIRS = {
    "length_adaptive+deebert": {"length_adaptive_drop_epochs": 1, "deebert_exit_epochs": 4},
    "depth_mi+pabee": {"depth_mi_depth_epochs": 1, "pabee_joint_epochs": 4, "pabee_joint_exit_learning_rate": 5e-3},
    "adapler+alberta": {"adapler_adaptive_epochs": 1, "alberta_gate_epochs": 1},
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_combination_learns_and_is_saved(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, num_train_epochs=6, learning_rate=2e-3, **PAIRS[name])
    train(model, tiny_reviews(96), tiny_reviews(24, seed=1), tmp_path / "out", **QUICK)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    method = loaded.method
    assert isinstance(method, Combined)
    assert method.name == name
    assert method.config.frontier  # found on the dev data
    assert method.dial.sweep[1:] == method.config.costs
    points = sweep(loaded, tiny_reviews(48, seed=2), progress=False)
    assert points[0].score > 0.85
    assert min(point.cost for point in points) < 0.7
    texts = [text for (text,) in tiny_reviews(12, seed=3).texts]
    budgets = torch.tensor([method.dial.sweep[i % len(method.dial.sweep)] for i in range(12)])
    for text, budget, together in zip(texts, budgets.tolist(), loaded.predict(texts, budgets), strict=True):
        alone = loaded.predict(text, budget)
        assert (alone.label, alone.depth, alone.cost) == (together.label, together.depth, together.cost)
        assert alone.score == pytest.approx(together.score, abs=1e-5)


def test_pairs_that_save_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No frontier is made up, and the model stays as it was."""
    monkeypatch.setattr("stretto.budget.frontier.sweep", lambda *_, **__: [OperatingPoint(0.5, 0.9, 1.1, 4.0, {})])
    model = tiny_model("constant_ratio+deebert")
    before = model.method.dial.sweep
    with pytest.raises(StrettoError, match="only pairs that cost as much as the full model"):
        set_frontier(model, tiny_reviews(8), objective="score", progress=False)
    assert model.method.dial.sweep == before and model.method.config.costs == ()


@pytest.mark.parametrize(
    "name", ["constant_ratio+halting", "constant_ratio+lte", "depth_mi+halting", "constant_ratio+branchynet"]
)
def test_what_is_told_before_and_after_a_stage_comes_from_shortened_texts(name: str) -> None:
    """Oracle depths, wrongness and threshold factors are those of the exits that will serve."""
    model = tiny_model(name, **({"branchynet_leaving_share": 0.5} if "branchynet" in name else {}))
    give_table(model.method.first)
    stage = next(stage for stage in model.method.stages() if stage.beneath and (stage.prepare or stage.finish))
    seen: list[Tensor] = []

    def above(recorder: Decider, batch: int) -> Decider:
        assert isinstance(recorder, Recorder)
        dials = torch.full((batch,), stage.beneath.dial.sweep[-1], dtype=torch.float64)
        shortened = Beneath(stage.beneath, dials, recorder)
        output = model.reference.run(inputs, shortened, 0.0)
        seen.append(output.trace.n_ffn)
        return shortened

    data = tiny_reviews(8)
    encoded = model.encode(data.texts)
    (inputs,) = batches(encoded.features, model.tokenizer.pad_token_id, 8)
    hook = stage.prepare or stage.finish
    hook(model.reference, [(inputs, torch.tensor(data.labels))], above=above)
    assert (seen[0][:, -1] < inputs.attention_mask.sum(dim=1)).any()
    given = above_beneath(stage, hook)
    assert given.keywords.keys() == {"above"}
    given(model.reference, [(inputs, torch.tensor(data.labels))])


def test_a_pair_on_both_stacks_learns_and_is_saved(tmp_path: Path) -> None:
    """Its backbone is trained once, as `depth_adaptive` needs it; its frontier is found by score."""
    name, own = "length_adaptive+depth_adaptive", METHODS["depth_adaptive"].Config()
    backbone, *others = fresh(name).method.stages()
    assert (backbone.epochs, backbone.learning_rate) == (own.num_train_epochs, own.learning_rate) == (20, 1e-3)
    assert (backbone.name, backbone.taught, [stage.name for stage in others]) == ("backbone", False, ["drop", "exits"])
    model = fresh(
        name, num_train_epochs=6, learning_rate=5e-3, length_adaptive_drop_epochs=1, depth_adaptive_exit_epochs=1
    )
    model.generation["max_new_tokens"] = 5
    assert model.method.stages()[0].objective == model.method.second.decoder_loss  # of all blocks
    unscored = {"eval_strategy": "no", "save_strategy": "no"}
    train(model, number_pairs(128, 0), number_pairs(8, 1), tmp_path / "out", **unscored, **QUICK)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    loaded.generation["max_new_tokens"] = 5
    assert isinstance(loaded.method, Combined) and loaded.method.config.frontier == model.method.config.frontier != ()
    points = loaded.operating_points
    assert [point.dial for point in points] == [1.0, *loaded.method.config.costs]
    assert points[0].cost == 1.0 and points[-1].cost < 0.9 and points[-1].depth < 3.0
    texts = [text for (text,) in number_pairs(6, 2).texts]
    for point in points:
        alone = [loaded.predict(text, point.dial).text for text in texts]
        assert [answer.text for answer in loaded.predict(texts, point.dial)] == alone
    full = AdaptiveModel.from_pretrained(tmp_path / "out", "full")
    full.generation["max_new_tokens"] = 5
    assert [a.text for a in loaded.predict(texts, 1.0)] == [a.text for a in full.predict(texts)]


def test_pairs_that_write_texts_are_searched_by_score() -> None:
    model, data = fresh("length_adaptive+depth_adaptive").eval(), number_pairs(4, 0)
    with pytest.raises(StrettoError, match="got a model that writes texts"):
        search_pairs(model, data, objective="divergence", progress=False)
    with pytest.raises(StrettoError, match="Expected labelled data for the objective 'score', got none"):
        search_pairs(model, dataclasses.replace(data, labels=None), progress=False)


def test_a_decoder_learns_from_the_shortened_source() -> None:
    model = fresh("length_adaptive+depth_adaptive")
    pairs = number_pairs(4, 0)
    encoded = model.encode(pairs.texts, pairs.labels)
    examples = EncodedDataset(encoded.features, encoded.labels)
    batch = collate(model.tokenizer.pad_token_id)([examples[i] for i in range(4)])
    stage = next(stage for stage in model.method.stages() if stage.beneath is not None)
    learner = Learner(model.acting(stage.method), stage).eval()
    labels = batch.pop("labels")
    inputs = Inputs(batch["input_ids"], batch["attention_mask"])
    lesson = learner.training_batch(inputs, Targets(labels, None, None, {}))
    full = learner.model.reference.hidden_states(inputs)[-1]
    torch.manual_seed(0)
    shortened = [lesson.last_states() for _ in range(4)]
    there = inputs.attention_mask.bool()
    assert shortened[0].shape == full.shape
    assert any(not torch.allclose(each[there], full[there], atol=1e-4) for each in shortened)
