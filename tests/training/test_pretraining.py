"""Masked-LM pretraining: that it learns, that a killed run ends the same, what the command says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from meals import corpus
from sources import jsonl, write
from tiny import TAGS, tiny_questions, tiny_reviews, tiny_tagging, tiny_tokenizer
from transformers import AutoModelForMaskedLM, AutoTokenizer

from stretto import AdaptiveModel, StrettoError, train
from stretto.backbones.alberta_config import AlbertaConfig
from stretto.backbones.alberta_model import AlbertaForMaskedLM
from stretto.data import Dataset
from stretto.data.tokenise import IGNORED
from stretto.data.wordpiece import train_tokenizer
from stretto.methods.alberta import GATED
from stretto.methods.alberta import IGNORED as UNGATED
from stretto.state import Inputs
from stretto.tasks import Classification, Span, Tokens
from stretto.training.pretraining import Learner, PretrainingTrainer, make_gates, perplexity, pretrain
from stretto.training.run import last_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 24, "max_relative_distance": 4,
}  # fmt: skip
FLAGS = [
    "--hidden-size", 32, "--embedding-size", 16, "--num-hidden-layers", 2, "--num-hidden-groups", 2,
    "--intermediate-size", 64, "--max-length", 24, "--max-steps", 2,
]  # fmt: skip
QUICK: dict[str, Any] = {"progress": False, "per_device_train_batch_size": 16, "learning_rate": 5e-3}


def dataset(texts: list[str]) -> Dataset:
    return Dataset([(text,) for text in texts], None, None, [f"made:{i + 1}" for i in range(len(texts))])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(corpus(), 60)


def fresh(tokenizer: Any, **changes: Any) -> AlbertaForMaskedLM:
    torch.manual_seed(0)
    return AlbertaForMaskedLM(
        AlbertaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **{**SIZES, **changes})
    )


# ---- learning ----------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_whole_model(tokenizer: Any) -> None:
    model = fresh(tokenizer).eval()
    ids = torch.tensor(
        [tokenizer(text)["input_ids"] for text in ("the old cat eats fish .", "the old cat eats fish .")]
    )
    labels = torch.full_like(ids, IGNORED)
    labels[0, 2:4], labels[1, 4] = ids[0, 2:4], ids[1, 4]
    with torch.no_grad():
        expected = model(ids, labels=labels).loss
        got = Learner(model)(labels, input_ids=ids, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(got["loss"], expected)
    sums, counts = got["logits"].unbind(dim=1)
    assert counts.tolist() == [2, 1]
    torch.testing.assert_close(sums.sum() / 3, expected)


def test_perplexity_counts_tokens_not_batches() -> None:
    prediction: Any = SimpleNamespace(predictions=np.array([[1.0, 1.0], [5.0, 2.0]]))
    assert perplexity(prediction) == {"perplexity": pytest.approx(np.exp(2.0))}


def test_it_learns_and_is_saved(tokenizer: Any, tmp_path: Path) -> None:
    model, held_out = fresh(tokenizer), dataset(corpus(30, seed=1))
    summary = pretrain(model, tokenizer, dataset(corpus()), held_out, tmp_path / "out", num_train_epochs=30, **QUICK)
    assert summary.perplexity < 4  # untrained about 60; what is left is which of the two adjectives, and the like
    assert (summary.texts, summary.held_out_texts, summary.windows, summary.epochs) == (120, 30, 120, 30.0)
    written = json.loads((tmp_path / "out" / "pretraining.json").read_text())
    assert written["perplexity"] == summary.perplexity
    assert not (tmp_path / "out.work").exists()
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    known = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert known.model_max_length == SIZES["max_position_embeddings"]
    tokens = known("the old panda eats bamboo .")
    hidden = [token for token, word in enumerate(tokens.word_ids()) if word == 4]
    ids = torch.tensor([tokens["input_ids"]])
    with torch.no_grad():
        told = loaded(ids.index_fill(1, torch.tensor(hidden), known.mask_token_id)).logits.argmax(dim=-1)
    assert told[0, hidden].tolist() == ids[0, hidden].tolist()


class Killed(Exception):
    pass


def test_a_killed_run_ends_the_same(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, held_out = dataset(corpus(60)), dataset(corpus(10, seed=1))
    plan = {**QUICK, "max_steps": 12, "save_steps": 3, "eval_steps": 6, "per_device_train_batch_size": 8}

    def start() -> dict[str, Any]:
        model = fresh(tokenizer)
        return {"model": model, "gates": make_gates(model.config)}

    whole = start()
    expected = pretrain(
        **whole, tokenizer=tokenizer, train_data=texts, held_out=held_out, output=tmp_path / "whole", **plan
    )
    plan |= {"tokenizer": tokenizer, "train_data": texts, "held_out": held_out, "output": tmp_path / "out"}

    step = PretrainingTrainer.training_step

    def die(self: PretrainingTrainer, *args: Any, **named: Any) -> Any:
        if self.state.global_step == 10:  # in the second epoch of 8 steps; the last checkpoint is 9
            raise Killed
        return step(self, *args, **named)

    monkeypatch.setattr(PretrainingTrainer, "training_step", die)
    with pytest.raises(Killed):
        pretrain(**start(), **plan)
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    with pytest.raises(StrettoError, match="with the same plan, got another "):
        pretrain(**start(), **{**plan, "seed": 7})

    seen: list[int] = []
    monkeypatch.setattr(
        PretrainingTrainer,
        "training_step",
        lambda self, *a, **n: (seen.append(self.state.global_step), step(self, *a, **n))[1],
    )
    resumed = start()
    assert pretrain(**resumed, **plan) == expected
    assert seen == [9, 10, 11]
    for part in ("model", "gates"):
        weights = whole[part].state_dict()
        for name, weight in resumed[part].state_dict().items():
            assert torch.equal(weight, weights[name]), name


def test_a_checkpoint_cut_short_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_checkpoint(tmp_path) is None
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


# ---- gates -------------------------------------------------------------------------------------------------


def test_gates_start_evenly_spaced_above_the_first_group(tokenizer: Any) -> None:
    model = fresh(tokenizer, num_hidden_layers=6, num_hidden_groups=3)
    gates: Any = make_gates(model.config)
    assert gates.static_layers == 2
    gates.predictor.out.weight.data.zero_()
    torch.testing.assert_close(gates.predictor(torch.ones(1, 32)), torch.tensor([[1, 0.75, 0.5, 0.25]]))
    assert make_gates(model.config, static_layers=3).static_layers == 3
    flat: Any = make_gates(model.config, revpc=False)
    flat.predictor.out.weight.data.zero_()
    torch.testing.assert_close(flat.predictor(torch.ones(1, 32)), torch.full((1, 4), 0.5))


def test_an_encoder_learns_through_its_gates(tokenizer: Any) -> None:
    model = fresh(tokenizer).eval()
    gates: Any = make_gates(model.config)
    learner, ids = Learner(model, gates), torch.tensor([tokenizer("the old cat eats fish .")["input_ids"]])
    mask = torch.ones_like(ids)
    plain = model.alberta(ids, mask).last_hidden_state
    ungated = learner.engine.run(Inputs(ids, mask, None), gates, UNGATED).logits
    torch.testing.assert_close(ungated, plain)
    gated = learner.encode(ids, mask)
    assert (gated - plain).abs().max() > 1e-2
    gates.predictor.out.bias.data[-1] = 50.0  # the last layer is needed for certain: all gates are open
    torch.testing.assert_close(learner.encode(ids, mask), plain)
    learner(labels=ids, input_ids=ids, attention_mask=mask)["loss"].backward()
    assert all(parameter.grad is not None for parameter in learner.parameters())


@pytest.fixture(scope="module")
def pretrained(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An encoder with gates, and the gates."""
    folder, model = tmp_path_factory.mktemp("pretrained") / "encoder", fresh(tokenizer)
    gates = make_gates(model.config)
    pretrain(
        model, tokenizer, dataset(corpus(40)), dataset(corpus(8, seed=1)), folder, gates=gates, max_steps=3, **QUICK
    )
    return folder, gates


@pytest.mark.parametrize("task", ["classification", "tokens", "span"])
def test_fine_tuning_starts_from_encoder_and_gates(task: str, pretrained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, gates = pretrained
    posed, data = {
        "classification": (Classification(["bad", "good"]), tiny_reviews(24)),
        "tokens": (Tokens(TAGS), tiny_tagging(24)),
        "span": (Span(stride=4), tiny_questions(24, longest=4)),
    }[task]
    model = AdaptiveModel.from_pretrained(folder, "alberta", task=posed)
    assert [stage.name for stage in model.method.stages()] == ["gates"]
    for name, weight in gates.state_dict().items():
        assert torch.equal(weight, model.method.state_dict()[name]), name
    train(model, data, data, tmp_path / "out", progress=False, max_steps=2)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    assert loaded.dial >= GATED
    assert len(loaded.operating_points) == len(model.method.dial.sweep)


def test_another_method_takes_the_encoder_alone(pretrained: tuple[Path, Any]) -> None:
    model = AdaptiveModel.from_pretrained(pretrained[0], "deebert", task=Classification(["bad", "good"]))
    assert [stage.name for stage in model.method.stages()] == ["backbone", "exits"]


# ---- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["txt.gz", "jsonl"])
def test_the_command(kind: str, tmp_path: Path) -> None:
    texts = corpus(40)
    content = "\n".join([*texts, ""]) if kind == "txt.gz" else jsonl(*({"body": text} for text in texts))
    file = write(tmp_path / f"corpus.{kind}", content)
    column = [] if kind == "txt.gz" else ["--text", "body"]
    out = tmp_path / "encoder"
    result = run("pretrain", file, out, "--vocab-size", 60, *column, *FLAGS, "--no-absolute", "--no-revpc", "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["texts"], summary["held_out_texts"], summary["steps"]) == (38, 2, 2)
    assert summary["perplexity"] > 1
    model = AutoModelForMaskedLM.from_pretrained(out)
    assert (model.config.use_absolute, model.config.use_relative, model.config.num_hidden_layers) == (False, True, 2)
    assert not Path(f"{out}.work").exists()

    assert "holds a finished encoder" in run("pretrain", file, out, "--vocab-size", 60, *column, *FLAGS).stderr
    assert json.loads((out / "stretto.json").read_text())["config"]["revpc"] is False
    again = run("pretrain", file, out, "--tokenizer", out, *column, *FLAGS, "--overwrite", "--no-gates")
    assert again.exit_code == 0
    assert "Perplexity of masked words in 2 held-out texts" in again.stdout
    assert AutoModelForMaskedLM.from_pretrained(out).config.use_absolute is True
    assert not (out / "stretto.json").exists()


def test_ctrl_c_is_answered_with_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = write(tmp_path / "corpus.txt", "\n".join(corpus(40))), tmp_path / "out"
    step = PretrainingTrainer.training_step

    def interrupt(self: PretrainingTrainer, *args: Any, **named: Any) -> Any:
        if self.state.global_step == 1:
            raise KeyboardInterrupt
        return step(self, *args, **named)

    monkeypatch.setattr(PretrainingTrainer, "training_step", interrupt)
    command = ["pretrain", file, out, "--vocab-size", 60, *FLAGS, "--save-steps", 1]
    result = run(*command)
    assert result.exit_code == 130
    assert f"The work so far is in '{out}.work': the same command resumes it" in result.stderr
    monkeypatch.undo()
    other = run(*command, "--cased")
    assert other.exit_code == 1
    assert "training a tokenizer" in other.stderr and "with the same plan" in other.stderr
    result = run(*command)
    assert result.exit_code == 0
    assert "resuming the unfinished run" in result.stderr
    assert "training a tokenizer" not in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("empty.txt", "", ["--vocab-size", 60], "expected at least one row of data, got none"),
        ("blank.txt", "\n \n\n", ["--vocab-size", 60], "expected texts, got blank lines only"),
        ("short.txt", "a\nb\nc\n", ["--vocab-size", 60], "Expected train texts of two words or more, got none"),
        ("one.txt", "only one text\n", ["--vocab-size", 60], "Expected two examples or more to split, got 1"),
        ("rows.jsonl", jsonl({"body": "a b"}), ["--vocab-size", 60], "expected one column"),
        ("rows.jsonl", jsonl({"body": "a b"}), ["--vocab-size", 60, "--text", "txt"], "expected a column 'txt'"),
        ("some.txt", "a b\nc d\n", [], "Expected either --tokenizer or --vocab-size, got neither"),
        ("some.txt", "a b\nc d\n", ["--tokenizer", "PLAIN"], "with a mask token and a padding token, got one without"),
        ("some.txt", "a b\nc d\n", ["--tokenizer", "nowhere"], "got 'nowhere', which is neither a folder here"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--num-hidden-groups", 50], "Expected num_hidden_groups"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--no-gates", "--no-revpc"], "with --no-gates, got revpc"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--static-layers", 9], "Expected static_layers between 1"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--held-out", 0.9], "Expected a fraction above 0"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--predictor-size", 0], "Expected predictor_size in [1, ∞)"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--json", "no/x.json"], "Expected to write 'no/x.json'"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--hiden-size", 8], "Did you mean --hidden-size"),
        ("some.txt", "a b\nc d\n", ["--vocab-size", 60, "--exit-epochs", 8], "got --exit-epochs"),
    ],
)
def test_what_cannot_be_done_is_said(name: str, content: str, flags: list[Any], message: str, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "plain")  # it has no mask token
    flags = [tmp_path / "plain" if flag == "PLAIN" else flag for flag in flags]
    result = run("pretrain", write(tmp_path / name, content), tmp_path / "out", *flags)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_learned_from_other_texts_is_not_taken(tmp_path: Path) -> None:
    out = tmp_path / "out"
    failed = run(
        "pretrain", write(tmp_path / "words.txt", "xylophone\nzeppelin\n" * 9), out, "--vocab-size", 60, *FLAGS
    )
    assert "Expected train texts of two words or more" in failed.stderr
    result = run("pretrain", write(tmp_path / "corpus.txt", "\n".join(corpus(40))), out, "--vocab-size", 60, *FLAGS)
    assert result.exit_code == 0, result.stderr
    assert "xylophone" not in AutoTokenizer.from_pretrained(out).get_vocab()


def test_the_size_of_a_vocabulary(tmp_path: Path) -> None:
    file = write(tmp_path / "corpus.txt", "\n".join(corpus(40)))
    assert run("pretrain", file, tmp_path / "out", "--vocab-size", 4).exit_code == 2
    assert not (tmp_path / "out.work").exists()
    with pytest.raises(StrettoError, match="Expected a --vocab-size above 5, got 4"):
        train_tokenizer(corpus(), 4)
    told = run("pretrain", file, tmp_path / "out", "--vocab-size", 7, *FLAGS)
    assert told.exit_code == 0
    assert f"the tokenizer has {len(AutoTokenizer.from_pretrained(tmp_path / 'out'))} entries, not 7" in told.stderr


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="got nan: training has diverged"):
        perplexity(SimpleNamespace(predictions=torch.tensor([[float("nan"), 1.0]])))  # type: ignore[arg-type]
    file, out = write(tmp_path / "corpus.txt", "\n".join(corpus(40))), tmp_path / "out"
    result = run("pretrain", file, out, "--vocab-size", 60, *FLAGS, "--learning-rate", 1e4, "--warmup-steps", 0)
    assert result.exit_code == 1
    assert "training has diverged. Lower --learning-rate" in result.stderr
    assert not out.exists()


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    file, out = write(tmp_path / "some.txt", "a b\nc d\n"), tmp_path / "out"
    (out / "precious").mkdir(parents=True)
    result = run("pretrain", file, out, "--vocab-size", 60, "--overwrite")
    assert result.exit_code == 1
    assert "has other content" in result.stderr
    shutil.rmtree(out)
