"""What tokens are ranked by: attention, a table of words, or a predictor."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import ragged_state
from tiny import give_table, make, random_inputs, tiny_backbone, tiny_model, tiny_reviews

from stretto import AdaptiveModel, train
from stretto.data.words import WordTable
from stretto.engine.cost import flops
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.methods import METHODS, Shape, Targets, TrainingBatch
from stretto.methods.contribution import ContributionPredictors, saliency_notes
from stretto.methods.length_adaptive import FixedLengths
from stretto.methods.saliency import saliency
from stretto.methods.scores import CANDIDATES, LAST, KeepsBest, Shortened, association
from stretto.tasks import Classification

QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 16}
KEEPING = ["constant_ratio", "power_bert", "length_adaptive"]
SHAPE = Shape(d=4, n_layers=3, n_labels=2)


def test_association_by_hand() -> None:
    balanced = torch.tensor([100.0, 100.0])
    words = torch.tensor([[8.0, 0.0], [3.0, 6.0], [5.0, 5.0]])  # |n_1 - n_0| / √(n + 1)
    assert association(words, balanced).tolist() == pytest.approx([8 / 3, 3 / math.sqrt(10), 0.0])
    three = torch.tensor([60.0, 20.0, 20.0])
    as_expected, told = torch.tensor([[6.0, 2.0, 2.0]]), torch.tensor([[0.0, 8.0, 0.0]])
    assert association(as_expected, three).tolist() == pytest.approx([0.0])  # no more often with one label than all are
    # n p = 4.8, 1.6, 1.6: differences -4.8, 6.4, -1.6
    assert association(told, three).tolist() == pytest.approx([math.sqrt(2 * (23.04 + 40.96 + 2.56)) / 3])


def with_table(**settings: Any) -> Any:
    kind = METHODS["constant_ratio"]
    method = kind(kind.Config(**settings), SHAPE, Classification(["no", "yes"]))
    method.scores.table.fill(
        torch.tensor([7, 9]), torch.tensor([[1], [2]]), torch.ones(2), torch.tensor([[0.5], [2.0]])
    )
    return method


def test_the_table_is_added_to_attention_with_a_maximum_of_1() -> None:
    keys = torch.tensor([0, 7, 8, 9, 0, 9])  # [CLS], a word, an unseen one, another; [CLS], the same
    state = ragged_state([4.0, 1.0, 3.0, 0.5], [0.2, 0.1], dial=0.5, input_notes={"word_key": keys})
    assert with_table().score(state).tolist() == pytest.approx([1.0, 0.25 + 0.5, 0.75, 0.125 + 2, 1.0, 0.5 + 2])
    again = ragged_state([4.0, 1.0, 3.0, 0.5], [0.2, 0.1], dial=0.5, input_notes={"word_key": keys})
    assert with_table(table_weight=0.0).score(again).tolist() == pytest.approx([1.0, 0.25, 0.75, 0.125, 1.0, 0.5])
    assert with_table().decide(state).drop.tolist() == [False, True, True, False, False, False]
    with pytest.raises(StrettoError, match="Expected the word of every token"):
        with_table().score(ragged_state([0.1, 0.2]))


def test_an_empty_table_leaves_attention_as_it_is() -> None:
    kind = METHODS["length_adaptive"]
    method = kind(kind.Config(), SHAPE, Classification(["no", "yes"]))
    assert method.score(ragged_state([4.0, 1.0, 3.0])).tolist() == [4.0, 1.0, 3.0]


@pytest.mark.parametrize("name", KEEPING)
def test_a_table_costs_nothing_and_a_predictor_is_paid_by_those_who_drop(name: str) -> None:
    backbone, inputs = tiny_backbone("bert"), random_inputs([9, 5, 12])
    cost = {}
    for select in ("attention", "attention+table", "predictor"):
        method = make(name, backbone, select=select)
        if name == "power_bert":  # every layer keeps three tokens
            with torch.no_grad():
                method.weights.zero_()[:, :3] = 1
        dials = torch.tensor([method.dial.sweep[-1], method.dial.off, method.dial.sweep[-1]])
        packed, padded = PackedEngine(backbone), ReferenceEngine(backbone)
        found = packed.run(inputs, method, dials)
        with torch.no_grad():
            torch.testing.assert_close(found.logits, padded.run(inputs, method, dials).logits, atol=1e-4, rtol=1e-4)
        cost[select] = flops(found.trace, backbone).tolist()
    assert cost["attention"] == cost["attention+table"]
    assert cost["predictor"][1] == cost["attention"][1]
    assert cost["predictor"][0] > cost["attention"][0] and cost["predictor"][2] > cost["attention"][2]


@pytest.mark.parametrize("name", ["constant_ratio", "length_adaptive"])
@pytest.mark.parametrize("select", ["attention+table", "predictor"])
def test_length_drop_trains_with_the_score_it_serves_with(name: str, select: str) -> None:
    """The same lengths, from a dial or drawn in a training step: the same tokens leave."""
    backbone, inputs = tiny_backbone("bert"), random_inputs([9, 5, 12])
    method, engine = make(name, backbone, select=select), ReferenceEngine(tiny_backbone("bert"))
    dial = method.dial.sweep[-1]
    lengths = FixedLengths(method.lengths(torch.tensor([dial], dtype=torch.float64))[0])
    with torch.no_grad():
        served = engine.run(inputs, method, dial)
        trained = engine.run(inputs, method, method.dial.off, context=lengths)
        other = engine.run(inputs, make(name, backbone, select="attention"), dial)
    torch.testing.assert_close(served.logits, trained.logits)
    assert not torch.allclose(served.logits, other.logits, atol=1e-4)


def test_every_layer_asks_its_own_predictor_and_only_who_is_asked_pays() -> None:
    predictors = ContributionPredictors(SHAPE, size=2)
    with torch.no_grad():
        for parameter in predictors.parameters():
            parameter.zero_()
        for number, predictor in enumerate(predictors, start=1):
            predictor[-1].bias.fill_(number)
    for layer in (1, 2, 3):
        state = ragged_state([0.5, 0.5], [1.0], layer=layer)
        assert predictors.ask(state, torch.tensor([True, False])).tolist() == [layer, layer, 0]
        assert state.decider_macs.tolist() == [2 * (4 + 1) * 2, 0]


def test_predictors_learn_the_saliency_of_every_layer() -> None:
    backbone, engine = tiny_backbone("bert"), ReferenceEngine(tiny_backbone("bert"))
    method = make("length_adaptive", backbone, select="predictor")
    plain, labels = random_inputs([6, 3, 9]), torch.tensor([0, 2, 1])
    target = saliency(engine, method.task, plain, labels)
    noted = saliency_notes(engine, method.task, [(plain, labels)])["saliency"]
    assert [each.tolist() for each in noted] == [target[i, :n].tolist() for i, n in enumerate((6, 3, 9))]
    inputs = dataclasses.replace(plain, notes={**plain.notes, "saliency": target})
    batch = TrainingBatch(inputs, Targets(labels), lambda *_, **__: None, 0, 0.0, engine)  # type: ignore[arg-type]
    stage = method.stages()[1]
    assert (stage.name, stage.trains_backbone) == ("predictors", False)
    states, by_hand = engine.hidden_states(inputs), 0.0
    for layer, predictor in enumerate(method.scores.predictors):
        for i, n in enumerate((6, 3, 9)):
            said = predictor(states[layer][i, :n]).squeeze(-1).log_softmax(dim=0)
            by_hand += float((target[i, :n] * (target[i, :n].log() - said)).sum().detach()) / 3
    assert float(stage.objective(batch).detach()) == pytest.approx(by_hand, rel=1e-4)
    optimizer = torch.optim.Adam(method.scores.predictors.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = stage.objective(batch)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.2 * by_hand


@pytest.mark.parametrize("name", KEEPING)
def test_the_table_is_counted_saved_and_carried_over(name: str, tmp_path: Path) -> None:
    first = METHODS[name].Config()
    epochs = {each.name: 0.25 for each in dataclasses.fields(first) if each.name.endswith("epochs")}
    model = tiny_model(name, **epochs)
    empty(model.method.scores.table)
    data = tiny_reviews(64)
    train(model, data, tiny_reviews(8, seed=1), tmp_path / "out", **QUICK)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    table: Any = loaded.method.scores.table  # type: ignore[union-attr]
    words = table.words(loaded.tokenizer, torch.arange(len(table)))
    ranked = [words[i] for i in table.values[:, 0].argsort(descending=True).tolist()]
    assert set(ranked[:2]) == {"good", "bad"}  # what decides the label of these texts
    if name == "length_adaptive":
        other: Any = AdaptiveModel.from_pretrained(tmp_path / "out", "constant_ratio").method
        assert torch.equal(other.scores.table.values, table.values)
        assert not len(
            AdaptiveModel.from_pretrained(
                tmp_path / "out", "constant_ratio", select="attention"
            ).method.scores.state_dict()
        )  # type: ignore[union-attr]


# ---- the choice on the dev texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("best", ["attention", "attention+table", "predictor"])
def test_the_closest_to_the_full_model_is_chosen_and_trained_with(name: str, best: str) -> None:
    """Each score is asked for the same numbers of tokens; the least sum of distances wins, and is what is used."""
    method = make(name, tiny_backbone("bert"))
    assert method.config.select == "auto"
    tried: list[tuple[str, float]] = []

    def distance(decider: Any) -> float:
        tried.append((method.ranks_by, decider.last))
        return {best: 0.1}.get(method.ranks_by, 0.2)

    chooser = next(stage.choose for stage in method.stages() if stage.choose is not None)
    chooser(distance)
    assert tried == [(each, last) for each in CANDIDATES for last in LAST]
    assert method.ranks_by == best and method.found() == {"tokens ranked by": f"{best}, chosen on dev data"}
    named = make(name, tiny_backbone("bert"), select=best)
    named.load_state_dict(method.state_dict(), strict=False)
    keys = torch.tensor([0, 7, 8, 9, 0, 9])
    states = [
        ragged_state([4.0, 1.0, 3.0, 0.5], [0.2, 0.1], dial=0.5, input_notes={"word_key": keys}) for _ in range(2)
    ]
    for state in states:
        state.layer, state.rows = 1, torch.randn(6, method.shape.d, generator=torch.Generator().manual_seed(1))
    assert torch.equal(method.score(states[0]), named.score(states[1]))
    again = make(name, tiny_backbone("bert"))
    again.load_state_dict(method.state_dict())
    assert again.ranks_by == best
    assert all(stage.choose is None for stage in named.stages())


def test_scores_are_compared_at_the_same_lengths() -> None:
    """Layer l of 4 keeps 1 - (1 - last) l / 4 of the tokens, whatever the score."""
    backbone, inputs = tiny_backbone("bert"), random_inputs([8, 12])
    method = make("power_bert", backbone)  # its own numbers of tokens are not known yet
    for name in CANDIDATES:
        method.scores.pick(name)
        trace = PackedEngine(backbone).run(inputs, Shortened(method, 0.5), 0.0, keep_hidden=True).trace  # all rows
        assert trace.n_ffn.tolist() == [[7, 6, 5, 4], [11, 9, 8, 6]]


def test_a_training_chooses_on_its_dev_texts(tmp_path: Path) -> None:
    """The choice is that of the mean divergence, measured by hand; it is saved, and the card has it."""
    epochs = {"num_train_epochs": 1, "predictor_epochs": 0.5, "drop_epochs": 0.25}
    model, dev = tiny_model("constant_ratio", **epochs), tiny_reviews(12, seed=1)
    found: dict[str, float] = {}

    def spied(distance: Any) -> None:
        def measured(decider: Any) -> float:
            value = distance(decider)
            found[model.method.ranks_by] = found.get(model.method.ranks_by, 0.0) + value
            return value

        KeepsBest.choose(model.method, measured)

    model.method.choose = spied
    train(model, tiny_reviews(64), dev, tmp_path / "out", **QUICK)
    assert set(found) == set(CANDIDATES) and len(set(found.values())) > 1
    best = min(found, key=found.__getitem__)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    assert loaded.method.ranks_by == model.method.ranks_by == best  # type: ignore[union-attr]
    assert f"{best}, chosen on dev data" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def empty(table: WordTable) -> None:
    none = torch.empty(0)
    table.fill(none.long(), none.long().unsqueeze(1), none, none.unsqueeze(1))


def test_every_method_that_keeps_a_number_of_tokens_has_a_table_to_test_with() -> None:
    for name in KEEPING:
        assert len(give_table(make(name, tiny_backbone("bert"))).scores.table)
