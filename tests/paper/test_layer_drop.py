"""LayerDrop: which layers are left out, in training and afterwards, on numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_inputs, tiny_backbone, tiny_model, tiny_reviews

from stretto import AdaptiveModel, StrettoError, train
from stretto.engine.cost import Cost
from stretto.engine.decider import Silent
from stretto.engine.reference import ReferenceEngine
from stretto.methods import METHODS, Shape, Targets, TrainingBatch
from stretto.methods import layer_drop as module
from stretto.methods.layer_drop import spread_layers
from stretto.tasks import Classification
from stretto.view.explain import explain
from stretto.view.explain_html import explanation_page
from stretto.view.explain_terminal import layer_rows, token_rows

TASK = Classification(["no", "perhaps", "yes"])


def test_every_other_layer_by_hand() -> None:
    """If n divides L it is the paper's rule: leave out layer d if d ≡ 0 mod L / n."""
    assert spread_layers(12, 12) == ()
    assert spread_layers(12, 6) == (2, 4, 6, 8, 10, 12)
    assert spread_layers(12, 8) == (3, 6, 9, 12)
    assert spread_layers(12, 9) == (4, 8, 12)
    assert spread_layers(12, 4) == (2, 3, 5, 6, 8, 9, 11, 12)
    assert spread_layers(12, 7) == (3, 5, 8, 10, 12)
    assert spread_layers(12, 1) == tuple(range(2, 13))
    for kept in range(1, 13):
        assert len(set(spread_layers(12, kept))) == 12 - kept


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_pruned_model_is_the_model_of_the_other_layers(kept: int) -> None:
    """The answers of a backbone that has only the layers kept, and their cost: nothing else is executed."""
    model = tiny_model("layer_drop")
    inputs = random_inputs([9, 5, 12])
    output = model.run(inputs, float(kept))
    backbone, left_out = model.backbone, spread_layers(4, kept)
    with torch.no_grad():
        expected = ReferenceEngine(backbone).run(inputs, Silent(), 0.0, skip=left_out).logits
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-5)
    ran = [layer not in left_out for layer in range(1, 5)]
    assert (output.trace.n_key > 0).tolist() == (output.trace.n_query > 0).tolist() == [ran] * 3
    assert output.trace.depth.tolist() == [kept] * 3
    deeper = Cost.of(model.run(inputs, kept + 1.0).trace, backbone)
    assert bool((Cost.of(output.trace, backbone).per_sequence < deeper.per_sequence).all())


def test_training_leaves_out_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step draws anew, the whole batch leaves the same layers out, and the loss is the task's."""
    backbone = tiny_backbone("bert")
    method = METHODS["layer_drop"](METHODS["layer_drop"].Config(layer_drop=0.5), Shape(backbone.d, 4, 3), TASK)
    engine, inputs, labels = ReferenceEngine(backbone), random_inputs([6, 3]), torch.tensor([0, 2])
    seen: list[Any] = []

    def run(dial: float, **named: Any) -> Any:
        seen.append((dial, named))
        return engine.run(inputs, method, dial, **named)

    asked: list[tuple[float, int]] = []
    monkeypatch.setattr(module, "sample_skips", lambda *given: asked.append(given) or (1, 3))
    batch = TrainingBatch(inputs, Targets(labels), run, 0, 0.0, engine)
    _, stage = method.stages()
    loss = stage.objective(batch)
    assert asked == [(0.5, 4)] and seen == [(4.0, {"skip": (1, 3)})]
    expected = engine.run(inputs, Silent(), 0.0, skip=(1, 3)).logits
    assert float(loss.detach()) == pytest.approx(float(torch.nn.functional.cross_entropy(expected, labels).detach()))
    loss.backward()
    touched = [any(p.grad is not None for p in layer.parameters()) for layer in backbone.model.bert.encoder.layer]
    assert touched == [False, True, False, True]
    assert (stage.name, stage.dials) == ("drop", (4.0, 2.0))


def test_one_training_serves_every_depth(tmp_path: Path) -> None:
    model = tiny_model("layer_drop", num_train_epochs=1, drop_epochs=1)
    train(model, tiny_reviews(64), tiny_reviews(20, seed=1), tmp_path / "out", progress=False)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    costs = [point.cost for point in loaded.operating_points]
    assert [point.depth for point in loaded.operating_points] == [4.0, 3.0, 2.0, 1.0]
    assert costs == sorted(costs, reverse=True) and costs[0] == 1
    with pytest.raises(StrettoError, match="between 1 and 4"):
        loaded.predict("good film", 0.5)
    assert loaded.predict("good film", 2.0).depth == 2


def test_the_explanation_shows_which_layers_were_left_out() -> None:
    explanation = explain(tiny_model("layer_drop"), "a good film", 2.0)
    assert explanation.depth == 2 and explanation.answered_after == 4
    assert explanation.lives.all() and explanation.frozen.all(dim=1).tolist() == [False, True, False, True]
    assert [row["layers"] for row in token_rows(explanation)] == ["#*#*"] * len(explanation.tokens)
    assert [row["layer"] for row in layer_rows(explanation) if row[""]] == [4]
    assert "frozen" in explanation_page(explanation)
