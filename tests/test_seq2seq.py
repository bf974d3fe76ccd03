"""Encoder–decoders as models: trained from nothing, saved, loaded, translating, with methods on either stack."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny_seq2seq import NUMBERS, SMALL, fresh, number_pairs
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel, MarianTokenizer

from stretto.budget.frontier import search_pairs
from stretto.budget.search import SearchSettings, search
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.training.run import train
from stretto.training.scratch import ScratchConfig, from_nothing, joint_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the numbers well enough to have something to lose."""
    place = tmp_path_factory.mktemp("numbers") / "model"
    model = fresh(num_train_epochs=14, exit_epochs=2, learning_rate=5e-3, oracle_penalty=0.02, exit_weight=1.0)
    train(
        model, number_pairs(512, 0), number_pairs(16, 1), place, progress=False, per_device_train_batch_size=32,
        eval_strategy="no", save_strategy="no", logging_strategy="no", seed=1,
    )  # fmt: skip
    return place


def test_a_model_from_nothing_learns_to_translate_and_to_leave_early(trained: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained)
    points = {point.dial: point for point in model.operating_points}
    assert points[0.0].metrics["chrf"] > 0.8 and points[0.0].cost == 1.0 and points[0.0].depth == 3.0
    assert points[0.5].depth < 3.0 and points[0.5].cost < 1.0
    assert points[1.0].depth == 1.0 and points[1.0].metrics["average_exit"] == 1.0
    assert {"bleu", "chrf", "average_exit"} <= set(points[0.0].metrics)


def test_a_saved_model_is_plain_hugging_face_and_says_the_same(trained: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained)
    plain, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    texts = ["eins zwei", "sechs", "vier vier drei"]
    for beams in (1, 3):
        model.generation.update(num_beams=beams, max_new_tokens=20)
        batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        expected = plain.generate(**batch, num_beams=beams, max_new_tokens=20)
        written = [answer.text for answer in model.predict(texts, dial=0.0)]
        assert written == [text.strip() for text in tokenizer.batch_decode(expected, skip_special_tokens=True)]
    assert model.predict("eins zwei", dial=0.0).text.startswith("one")


def test_answers_do_not_depend_on_the_batch(trained: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained)
    texts = [parts[0] for parts in number_pairs(12, 3).texts]
    together, alone = model.predict(texts, dial=0.5), model.predict(texts, dial=0.5, batch_size=1)
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.depth for answer in together] == [answer.depth for answer in alone]
    assert [answer.cost for answer in together] == pytest.approx([answer.cost for answer in alone])
    one = model.predict("eins zwei", dial=0.5)
    assert 1 <= one.depth <= 3 and 0 < one.cost <= 1.01 and one.score <= 0


def test_odd_inputs_are_answered(trained: Path) -> None:
    """An empty text, one far too long, and characters never seen: the first has one token, the second is truncated."""
    model = AdaptiveModel.from_pretrained(trained)
    model.generation.update(max_new_tokens=8)
    encoded = model.encode([("",), ("eins " * 5000,), ("☃ 漢字 \u0301",)])
    assert encoded.truncated == 1 and len(encoded.features[1]["input_ids"]) == model.max_length
    assert len(encoded.features[0]["input_ids"]) == 1
    answers = model.predict(["", "eins " * 5000, "☃ 漢字 \u0301"], dial=0.5)
    assert all(isinstance(answer.text, str) and answer.cost > 0 for answer in answers)
    model.generation.update(max_new_tokens=1000)
    with pytest.raises(StrettoError, match="at most 512 new tokens"):
        model.predict("eins")
    with pytest.raises(StrettoError, match="one text"):
        model.predict(("eins", "zwei"))


def test_int8_translates(trained: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained, dtype="int8")
    assert model.predict("eins zwei", dial=0.0).text.startswith("one")


@pytest.mark.parametrize("mechanism", ["multinomial", "sequence", "confidence"])
def test_every_mechanism_follows_its_dial(trained: Path, mechanism: str) -> None:
    model = AdaptiveModel.from_pretrained(trained, "depth_adaptive", mechanism=mechanism)
    if mechanism != "confidence":
        torch.nn.init.normal_(model.method.gate.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    texts = [parts[0] for parts in number_pairs(8, 5).texts]
    depths = [sum(a.depth for a in model.predict(texts, dial=dial)) / 8 for dial in (0.0, 0.5, 1.0)]
    assert depths[0] == 3.0 and depths[2] == 1.0 and 1.0 <= depths[1] <= 3.0
    full = model.predict(texts, dial=0.0)
    assert all(answer.cost == 1.0 for answer in full)
    if mechanism == "sequence":  # all tokens of a text leave at one block
        assert all(answer.depth == int(answer.depth) for answer in model.predict(texts, dial=0.5))


@pytest.mark.parametrize("training", ["aligned", "mixed", "last"])
@pytest.mark.parametrize("mechanism", ["geometric", "sequence"])
def test_every_objective_has_a_gradient(training: str, mechanism: str) -> None:
    from stretto.data.tokenise import EncodedDataset, collate
    from stretto.training.learner import Learner

    model = fresh(training=training, mechanism=mechanism, oracle="likelihood", oracle_sigma=2.0)
    data = number_pairs(4, 0)
    encoded = model.encode(data.texts, data.labels)
    examples = EncodedDataset(encoded.features, encoded.labels)
    batch = collate(model.tokenizer.pad_token_id)([examples[i] for i in range(4)])
    learner = Learner(model, model.method.stages()[1]).train()
    learner(**batch)["loss"].backward()
    assert bool((model.method.gate.weight.grad != 0).any())
    assert bool((model.encoder.get_input_embeddings().weight.grad != 0).any())


def test_length_adaptive_shortens_the_encoder_of_a_translator(trained: Path) -> None:
    """Dropped tokens are restored before the decoder reads them."""
    model = AdaptiveModel.from_pretrained(trained, "length_adaptive")
    texts = ["eins zwei drei vier fünf sechs eins zwei drei", "sechs fünf vier drei zwei eins sechs fünf"]
    full, short = model.predict(texts, dial=1.0), model.predict(texts, dial=0.0)
    assert [a.text for a in full] == [a.text for a in AdaptiveModel.from_pretrained(trained, "full").predict(texts)]
    assert all(a.cost == 1.0 for a in full) and all(a.cost < 1.0 for a in short)
    assert [a.text for a in short] == [model.predict(text, dial=0.0).text for text in texts]


def test_length_adaptive_learns_with_a_decoder(tmp_path: Path) -> None:
    model = fresh("length_adaptive", num_train_epochs=1, drop_epochs=1)
    model.generation["max_new_tokens"] = 4
    train(
        model, number_pairs(24, 0), number_pairs(8, 1), tmp_path / "out", progress=False, eval_strategy="no",
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    assert AdaptiveModel.from_pretrained(tmp_path / "out").method.name == "length_adaptive"


def test_the_lengths_of_a_translator_are_searched_by_score(trained: Path, tmp_path: Path) -> None:
    model, data = AdaptiveModel.from_pretrained(trained, "length_adaptive"), number_pairs(12, 4)
    few = SearchSettings(iterations=1, mutations=2, crossovers=1, population=3)
    result = search(model, data, tmp_path / "out", few, progress=False)
    points = AdaptiveModel.from_pretrained(tmp_path / "out").operating_points
    assert points == result.points and points[0].cost == 1.0 and points[-1].cost < 1.0
    assert all(point.score == point.metrics["bleu"] for point in points)
    for refused in ({"settings": SearchSettings(objective="divergence")}, {"per_input": True}):
        with pytest.raises(StrettoError, match="got a model that writes texts"):
            search(model, data, tmp_path / "refused", progress=False, **refused)
    with pytest.raises(StrettoError, match="Expected labelled data for the objective 'score'"):
        search(model, dataclasses.replace(data, labels=None), tmp_path / "refused", progress=False)


def test_one_method_on_each_stack(trained: Path) -> None:
    model = AdaptiveModel.from_pretrained(trained, "length_adaptive+depth_adaptive")
    text = "eins zwei drei vier fünf sechs eins zwei drei"
    full, cheap = model.predict(text, dial=1.0), model.predict(text, dial=0.05)
    assert full.depth == 3.0 and full.cost == 1.0
    assert cheap.depth == 1.0 and cheap.cost < model.predict(text, dial=0.5).cost < 1.0
    model.generation["max_new_tokens"] = 20
    found = search_pairs(model, number_pairs(8, 4), progress=False)[1:]  # by score: the cheaper, the worse
    assert [point.dials for point in found] == list(model.method.config.frontier)
    scores = [point.score for point in found]
    assert scores[0] > 0 and scores == sorted(scores, reverse=True)
    assert all(score == point.metrics["bleu"] for score, point in zip(scores, found, strict=True))


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_other_families_from_nothing(kind: str, tmp_path: Path) -> None:
    model = fresh("full", kind, dataclasses.replace(SMALL, encoder_layers=3)).eval()
    model.save_pretrained(tmp_path / "out")
    plain, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    expected = plain.generate(
        **tokenizer("eins zwei", return_tensors="pt", return_token_type_ids=False), max_new_tokens=9
    )
    model.generation["max_new_tokens"] = 9
    assert model.predict("eins zwei").text == tokenizer.decode(expected[0], skip_special_tokens=True).strip()


def test_a_marian_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    """Of opus-mt: a SentencePiece model for each language and one vocabulary, the padding token last."""
    import sentencepiece

    pieces: list[str] = []
    for side, words in (("source", NUMBERS), ("target", NUMBERS.values())):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(words)] * 20), model_prefix=str(tmp_path / side), vocab_size=30,
            hard_vocab_limit=False, minloglevel=3,
        )  # fmt: skip
        (tmp_path / f"{side}.model").rename(tmp_path / f"{side}.spm")
        pieces += [line.split("\t")[0] for line in (tmp_path / f"{side}.vocab").read_text().splitlines()[3:]]
    names = ["</s>", "<unk>", *dict.fromkeys(pieces), "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    tokenizer = MarianTokenizer(*(str(tmp_path / name) for name in ("source.spm", "target.spm", "vocab.json")))
    special = {"pad_token_id": len(names) - 1, "decoder_start_token_id": len(names) - 1, "eos_token_id": 0}
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    torch.manual_seed(0)
    plain = MarianMTModel(
        MarianConfig(
            vocab_size=len(names), d_model=16, encoder_layers=1, decoder_layers=2, max_position_embeddings=32,
            **special, **sizes, forced_eos_token_id=None, init_std=1.0,
        )
    ).eval()  # fmt: skip
    plain.save_pretrained(tmp_path / "opus")
    tokenizer.save_pretrained(tmp_path / "opus")
    model = AdaptiveModel.from_pretrained(tmp_path / "opus")
    assert (model.task.name, model.method.name) == ("seq2seq", "full")
    model.generation["max_new_tokens"] = 6
    texts = ["eins zwei", "sechs", ""]
    expected = plain.generate(**tokenizer(texts, padding=True, return_tensors="pt"), max_new_tokens=6)
    written = [answer.text for answer in model.predict(texts)]
    assert written == [text.strip() for text in tokenizer.batch_decode(expected, skip_special_tokens=True)]
    assert len(set(written)) > 1
    right = model.encode([("eins",)], ["one"]).labels
    assert right is not None and tokenizer.decode(right[0], skip_special_tokens=True) == "one"  # by the target's pieces


def test_the_joint_tokenizer_gives_back_what_it_was_given() -> None:
    tokenizer = joint_tokenizer(["ein Haus", "a house"], 300, 64)
    for text in ("ein Haus", "Straße, ☃!", "  two  spaces"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text.strip()
    assert tokenizer("ein")["input_ids"][-1] == tokenizer.eos_token_id


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(StrettoError, match="multiple of 3 heads"):
        from_nothing("marian", ScratchConfig(d_model=32, attention_heads=3), number_pairs(4, 0), 0)
    with pytest.raises(StrettoError, match="marian, bart, t5; got 'gpt2'"):
        from_nothing("gpt2", SMALL, number_pairs(4, 0), 0)
    with pytest.raises(StrettoError, match="one per block but the last"):
        fresh(mechanism="confidence", thresholds=((0.5,),))


def test_methods_that_answer_sequences_refuse_texts() -> None:
    with pytest.raises(StrettoError, match="Expected a task that deebert can do"):
        fresh("deebert")
