"""Methods with depths of words, end to end: trained, saved, served, shown; and texts they have never seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from tiny import random_inputs, tiny_model, tiny_reviews, tiny_tokenizer

from stretto import AdaptiveModel, StrettoError, train
from stretto.data import Dataset
from stretto.data.batches import batches
from stretto.data.tokenise import NO_WORD, UNKNOWN_WORD, encode
from stretto.methods import METHODS, Shape, Targets, TrainingBatch
from stretto.methods.depth_reconstruction import DepthReconstruction
from stretto.methods.depths import WordDepths
from stretto.state import Inputs
from stretto.training.plan import Plan
from stretto.training.run import run_stage
from stretto.view.explain import explain
from stretto.view.explain_html import explanation_page
from stretto.view.explain_terminal import token_rows

QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 16}
ODD: list[Any] = [
    "", "   ", "zyx wvu", "日本語 🎬 \u202e \x00 ﬃ", "good " * 500, ("good film", ""), ("", ""), "ＧＯＯＤ",
]  # fmt: skip
WITH_TABLE = [name for name in METHODS if issubclass(METHODS[name], WordDepths)]
SETTINGS: dict[str, dict[str, Any]] = {
    "depth_reconstruction": {"num_train_epochs": 1, "depth_epochs": 1, "reconstruction_epochs": 1},
    "depth_mi": {"num_train_epochs": 1, "depth_epochs": 1},
}


def untrained(name: str, n_labels: int = 2) -> AdaptiveModel:
    model: AdaptiveModel = tiny_model(name, n_labels=n_labels, **SETTINGS[name])
    empty = METHODS[name](model.method.config, model.method.shape, model.task)
    return AdaptiveModel(model.encoder, model.tokenizer, empty, model.task).eval()


@pytest.fixture(scope="module", params=WITH_TABLE)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained model."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    train(untrained(request.param), tiny_reviews(64), tiny_reviews(20, seed=1), folder, **QUICK)
    return folder


def test_the_table_is_saved_with_the_model(trained: Path, tmp_path: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained)
    method = model.method
    assert isinstance(method, WordDepths)
    words = method.table.words(model.tokenizer, torch.arange(len(method.table)))
    assert {"good", "bad", "film"} < set(words)
    assert method.table.keys.tolist() == sorted(method.table.keys.tolist())
    assert {word for (text,) in tiny_reviews(64).texts for word in text.split()} == set(words)
    model.save_pretrained(tmp_path / "again")
    again = AdaptiveModel.from_pretrained(tmp_path / "again")
    texts = [text for (text,) in tiny_reviews(8, seed=3).texts]
    for dial in method.dial.sweep[::3]:
        assert again.predict(texts, dial) == model.predict(texts, dial)
    assert min(point.cost for point in model.operating_points) < 1
    other = AdaptiveModel.from_pretrained(trained, "full")  # another method has no use for the table
    assert other.predict(texts) == model.predict(texts, method.dial.off)


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_texts(trained: Path, text: Any) -> None:
    model = AdaptiveModel.from_pretrained(trained)
    if isinstance(text, tuple):  # a pair, for a model of single texts
        with pytest.raises(StrettoError, match="Expected single texts"):
            model.predict(text)
        return
    for dial in (model.method.dial.off, model.method.dial.sweep[-1]):
        alone = model.predict(text, dial)
        together = model.predict([text, text], dial)[1]
        assert alone.probabilities == pytest.approx(together.probabilities, abs=1e-5)
    explanation = explain(model, text, model.method.dial.sweep[-1])
    assert explanation.depths is not None
    if text in ("", "   ", "zyx wvu"):  # nothing of it was seen
        assert set(explanation.depths) == {4} and explanation.depth == 4


def test_capitals_are_what_the_tokenizer_makes_of_them(trained: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained)
    dial = model.method.dial.sweep[-1]
    assert explain(model, "GOOD Film", dial).depths == explain(model, "good film", dial).depths


def test_explain_tells_the_depth_of_every_word(trained: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained)
    method, dial = model.method, model.method.dial.sweep[-1]
    assert isinstance(method, WordDepths)
    words = method.table.words(model.tokenizer, torch.arange(len(method.table)))
    depth_of = dict(zip(words, method.table_depths(dial).tolist(), strict=True))
    explanation = explain(model, "a good film xyz", dial)
    assert explanation.depths == [4, depth_of["a"], depth_of["good"], depth_of["film"], 4, 4]  # xyz was never seen
    assert [row["depth"] for row in token_rows(explanation)] == explanation.depths
    for place, depth in enumerate(explanation.depths):
        assert explanation.frozen[:, place].tolist() == [layer > depth for layer in range(1, 5)]
    page = explanation_page(explanation)
    assert page.count('<td class="depth"') == 6
    assert f'style="--depth: {explanation.depths[1] / 4:.3f}">{explanation.depths[1]}<' in page
    off = explain(model, "a good film", method.dial.off)
    assert off.depths is None and "depth" not in token_rows(off)[0] and '<td class="depth"' not in explanation_page(off)
    assert json.loads(json.dumps(explanation.to_json()))["depths"] == explanation.depths


# ---- the command -------------------------------------------------------------------------------------------


def test_depths_command(trained: Path, tmp_path: Path) -> None:
    result = run("depths", trained, "--top", 3, "--plot", tmp_path / "depths.png", "--json", tmp_path / "all.json")
    assert result.exit_code == 0, result.stderr
    assert "Shallowest words at" in result.stdout and "Deepest words at" in result.stdout
    assert (tmp_path / "depths.png").stat().st_size > 5000
    told = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert {row["word"] for row in told["words"]} == {w for (t,) in tiny_reviews(64).texts for w in t.split()}
    found = [row["depth"] for row in told["words"]]
    assert found == sorted(found) and set(found) <= {1, 2, 3, 4}
    off = json.loads(run("depths", trained, "--json", "--dial", 0).stdout)
    assert off["dial"] == 0 and {row["depth"] for row in off["words"]} == {4}
    frequent = json.loads(run("depths", trained, "--at-least", 12, "--json").stdout)["words"]
    assert frequent and all(row["met"] >= 12 for row in frequent)


def test_what_has_no_depths(model: Path, trained: Path, tmp_path: Path) -> None:
    result = run("depths", model)
    assert result.exit_code == 1
    assert "Expected a model with a table of depths, got one of the method deebert" in result.stderr
    assert "depth_mi" in result.stderr
    assert "occurred 1000 times, got none" in run("depths", trained, "--at-least", 1000).stderr
    for dial in (-1, "inf", "nan"):
        assert "Expected the dial" in run("depths", trained, "--dial", dial).stderr
    unwritable = run("depths", trained, "--plot", tmp_path / "nowhere" / "depths.png")
    assert unwritable.exit_code == 1 and "Expected to write" in unwritable.stderr and not unwritable.stdout
    assert "ending in .png" in run("depths", trained, "--plot", "depths.doc").stderr
    name = AdaptiveModel.from_pretrained(trained).method.name
    untrained(name).save_pretrained(tmp_path / "empty")
    assert f"this {name} model has not been trained" in run("depths", tmp_path / "empty").stderr
    weights = trained / "stretto.safetensors"
    kept = weights.read_bytes()
    try:
        weights.unlink()
        assert "Expected stretto.safetensors to fit" in run("depths", trained).stderr
    finally:
        weights.write_bytes(kept)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_a_model_without_a_table_is_the_full_one_or_says_so(name: str) -> None:
    model = untrained(name)
    assert model.predict("good film").depth == 4
    with pytest.raises(StrettoError, match=rf"got none: this {name} model has not been trained"):
        model.predict("good film", model.method.dial.sweep[1])
    inputs = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(StrettoError, match=r"Tokenise with AdaptiveModel\.encode"):
        tiny_model(name).run(Inputs(inputs, inputs), model.method.dial.sweep[1])


# ---- mutual information ------------------------------------------------------------------------------------


def test_the_words_that_tell_are_deep_or_as_published_shallow(tmp_path: Path) -> None:
    """One table serves both directions: a folder can be opened with either."""
    train(untrained("depth_mi"), tiny_reviews(200), tiny_reviews(20, seed=1), tmp_path / "model", **QUICK)
    depths = {}
    for direction in ("deep", "shallow"):
        model = AdaptiveModel.from_pretrained(tmp_path / "model", "depth_mi", direction=direction)
        table = model.method.table
        words = table.words(model.tokenizer, torch.arange(len(table)))
        depth_of = dict(zip(words, model.method.table_depths(1.0).tolist(), strict=True))
        telling = {"deep": 4, "shallow": 1}[direction]
        assert depth_of["good"] == depth_of["bad"] == telling != depth_of["film"]
        assert {min(depth_of.values()), max(depth_of.values())} == {1, 4}
        met = dict(zip(words, table.counts.tolist(), strict=True))
        assert met["film"] == sum("film" in text.split() for (text,) in tiny_reviews(200).texts)
        depths[direction] = depth_of
    assert all(depths["deep"][word] == 5 - depths["shallow"][word] for word in words)
    assert AdaptiveModel.from_pretrained(tmp_path / "model").method.config.direction == "deep"
    result = run("depths", tmp_path / "model", "--top", 1)
    assert result.stdout.index("Shallowest") < result.stdout.index("Deepest")
    assert any(word in result.stdout.split("Deepest")[1] for word in ("good", "bad"))


def test_the_shuffled_table_is_a_control(trained: Path) -> None:
    """The same depths, of other words: drawn by the seed, and the same in every process."""
    name, texts = (
        AdaptiveModel.from_pretrained(trained).method.name,
        [text for (text,) in tiny_reviews(8, seed=3).texts],
    )

    def depths(**settings: Any) -> list[int]:
        model = AdaptiveModel.from_pretrained(trained, name, **settings)
        assert all(len(prediction.label) > 2 for prediction in model.predict(texts, model.method.dial.sweep[-1]))
        return model.method.table_depths(model.method.dial.sweep[len(model.method.dial.sweep) // 2]).tolist()

    estimated, drawn = depths(), depths(table="random")
    assert drawn == depths(table="random")
    if len(set(estimated)) > 1:
        assert drawn != estimated and drawn != depths(table="random", table_seed=1)
    assert sorted(drawn) == sorted(estimated)
    first, other = (
        AdaptiveModel.from_pretrained(trained, name, table=table).method.word_measure()
        for table in ("estimated", "random")
    )
    assert torch.equal(first, other)  # what was measured of a word stays its own


@pytest.mark.parametrize("name", WITH_TABLE)
def test_the_mean_head_answers_with_the_dial_on(name: str) -> None:
    model = tiny_model(name, head="mean")
    inputs, dial = random_inputs([9, 5, 12]), model.method.dial.sweep[-1]
    head = model.method.own_head()
    assert head is model.method.mean_head
    output = model.reference.run(inputs, model.method, dial, keep_hidden=True)
    mask = inputs.attention_mask.unsqueeze(-1)
    mean = (output.hidden * mask).sum(dim=1) / mask.sum(dim=1)
    torch.testing.assert_close(output.logits, head(mean), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.run(inputs, dial).logits, output.logits, atol=1e-5, rtol=1e-5)
    full = tiny_model(name, head="model").run(inputs, model.method.dial.off).logits
    torch.testing.assert_close(model.run(inputs, model.method.dial.off).logits, full)


def test_numbers_may_take_the_place_of_labels(tmp_path: Path) -> None:
    reviews = tiny_reviews(100)
    scores = [float(label) + index / 1000 for index, label in enumerate(reviews.labels)]
    data = Dataset(reviews.texts, scores, None, reviews.where)
    model = train(untrained("depth_mi", n_labels=1), data, data, tmp_path / "model", **QUICK)
    words = model.method.table.words(model.tokenizer, torch.arange(len(model.method.table)))
    depth_of = dict(zip(words, model.method.table_depths(1.0).tolist(), strict=True))
    assert depth_of["good"] == 4 and depth_of["bad"] == 4 and depth_of["film"] < 4
    assert isinstance(model.predict("good film", 1.0).label, float)


def test_texts_without_words_cannot_be_counted(tmp_path: Path) -> None:
    data = Dataset([("",), ("",)] * 8, [0, 1] * 8, ["bad", "good"], ["made"] * 16)
    with pytest.raises(StrettoError, match="Expected training texts with words in them"):
        train(untrained("depth_mi"), data, data, tmp_path / "model", **QUICK)


def test_words_of_features() -> None:
    tokenizer = tiny_tokenizer()
    encoded = encode(tokenizer, [("A good xyz", "Film !")], 64, words=True)
    assert encoded.features[0]["word"] == [NO_WORD, 0, 1, UNKNOWN_WORD, NO_WORD, 0, 1, NO_WORD]
    cut = encode(tokenizer, [("good film " * 40,)], 8, words=True)
    assert cut.features[0]["word"] == [NO_WORD, 0, 1, 2, 3, 4, 5, NO_WORD]
    assert "word" not in encode(tokenizer, [("a",)], 64).features[0]


# ---- reconstruction ----------------------------------------------------------------------------------------


def test_other_texts_without_labels_are_another_plan() -> None:
    model, data = tiny_model("depth_reconstruction"), tiny_reviews(8)
    plans = [Plan(model, [], data, data, tiny_reviews(8, seed), {}, guarantee=False).written() for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_texts_without_labels_fill_the_table_and_occurrences_can_be_asked(tmp_path: Path) -> None:
    few = Dataset([("a good plot",), ("bad",)], [1, 0], ["bad", "good"], ["made:1", "made:2"])
    more = Dataset([("the plot was dull",)], None, None, ["made:1"])
    model = tiny_model("depth_reconstruction", **SETTINGS["depth_reconstruction"], keep_estimator=True)
    model = train(model, few, few, tmp_path / "model", skip=["backbone"], unlabelled=more, **QUICK)
    assert isinstance(model.method, DepthReconstruction)
    words = model.method.table.words(model.tokenizer, torch.arange(len(model.method.table)))
    assert sorted(words) == ["a", "bad", "dull", "good", "plot", "the", "was"]
    assert dict(zip(words, model.method.table.counts.tolist(), strict=True))["plot"] == 2
    loaded = AdaptiveModel.from_pretrained(tmp_path / "model")
    (inputs,) = batches(model.encode([("a good plot",)]).features, 0, 1)
    depths = loaded.method.occurrence_depths(inputs, 0.01)
    assert torch.equal(depths, model.method.occurrence_depths(inputs, 0.01))
    assert depths[0, [0, -1]].tolist() == [4, 4] and depths.shape == (1, 5)
    assert (loaded.method.occurrence_depths(inputs, 9.0)[0, 1:4] == 1).all()
    loaded.method.estimator = None
    with pytest.raises(StrettoError, match="--keep-estimator"):
        loaded.method.occurrence_depths(inputs, 0.1)


def test_a_killed_training_keeps_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    fill, run = DepthReconstruction.fill_table, run_stage

    def count(self: Any, *others: Any) -> None:
        fill(self, *others)
        filled.append(len(self.table))

    def die_in_the_last(model: Any, stage: Any, *others: Any) -> None:
        if stage.dials:
            raise KeyboardInterrupt
        run(model, stage, *others)

    monkeypatch.setattr(DepthReconstruction, "fill_table", count)
    monkeypatch.setattr("stretto.training.run.run_stage", die_in_the_last)
    data = tiny_reviews(16), tiny_reviews(8), tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        train(untrained("depth_reconstruction"), *data, skip=["backbone"], **QUICK)
    monkeypatch.setattr("stretto.training.run.run_stage", run)
    model = train(untrained("depth_reconstruction"), *data, skip=["backbone"], **QUICK)
    assert filled == [len(model.method.table)] and filled[0] > 20  # the masked language model was trained once
    assert not any(name.startswith("estimator") for name in model.method.state_dict())


def test_a_mask_is_needed() -> None:
    method = METHODS["depth_reconstruction"]
    shape = Shape(32, 4, 2)
    built = method(method.Config(keep_estimator=True), shape, tiny_model("full").task)
    with pytest.raises(StrettoError, match="Expected a tokenizer with a mask token"):
        built.attach(tiny_model("full").backbone)


# ---- who answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_TABLE)
def test_the_model_may_answer_with_its_own_head(name: str) -> None:
    own, pooled = tiny_model(name, head="model"), tiny_model(name)
    dial = own.method.dial.sweep[-1]
    inputs = random_inputs([7, 4, 9])
    with torch.no_grad():
        expected = own.reference.run(inputs, own.method, dial, keep_hidden=True)
        first = expected.hidden[:, 0]
    torch.testing.assert_close(own.run(inputs, dial).logits, own.backbone.head(first), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(own.run(inputs, dial).logits, pooled.run(inputs, dial).logits)
    with pytest.raises(StrettoError, match="Expected head among 'pooled', 'mean', 'model', got"):
        tiny_model(name, head="both")


def test_some_texts_run_in_full_while_training() -> None:
    model = tiny_model("depth_mi", full_share=0.5)
    dials: list[Any] = []

    def run_at(dial: Any, skip: tuple[int, ...] = ()) -> Any:
        dials.append(dial)
        return model.reference.run(inputs, model.method, dial)

    inputs = random_inputs([4] * 64)
    torch.manual_seed(0)
    batch = TrainingBatch(inputs, Targets(torch.zeros(64, dtype=torch.long)), run_at, 0, 0.0, model.reference)
    model.method.stages()[-1].objective(batch).backward()
    assert set(dials[0].tolist()) == {0.0, 1.0} and 16 < int(dials[0].sum()) < 48
    assert model.method.pooled_head.classifier.weight.grad.any()
    assert model.encoder.classifier.weight.grad.any()


def test_token_halting_trains_and_serves_any_dial(tmp_path: Path) -> None:
    model = tiny_model("token_halting", num_train_epochs=1, anytime_epochs=1, depth_epochs=1)
    train(model, tiny_reviews(32), tiny_reviews(16, seed=1), tmp_path / "model", **QUICK)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "model")
    texts = [text for (text,) in tiny_reviews(4, seed=3).texts]
    for dial in (1.0, 0.6, 0.0):
        assert loaded.predict(texts, dial) == model.predict(texts, dial)
    shallow = explain(loaded, texts[0], 0.0)
    assert shallow.depth == 1 and set(shallow.depths or []) == {1}
    told = explain(loaded, texts[0], 0.9)
    assert told.depths is not None and max(told.depths) == told.depth
