"""A combination is trained in stages from one call, gets one dial, and is saved as any other method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import give_table, tiny_model, tiny_reviews
from tiny_seq2seq import fresh, number_pairs
from torch import Tensor

from stretto import AdaptiveModel, sweep, train
from stretto.data.batches import batches
from stretto.data.tokenise import EncodedDataset, collate
from stretto.engine.decider import Decider
from stretto.engine.replay import Recorder
from stretto.methods import Combined, Targets
from stretto.methods.combine import Beneath
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
