"""Training: every method learns, a killed run ends the same, two processes work, seeds decide."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import QUICK, learner, settings_of, task_of, taught
from tiny import LABELLING, TAGS, tiny_model, tiny_questions, tiny_reviews, tiny_tagging

from stretto import AdaptiveModel, OperatingPoint, StrettoError, sweep, train
from stretto.data import Dataset
from stretto.methods import METHODS
from stretto.tasks import Tokens
from stretto.training.processes import is_main_process
from stretto.training.trainer import FASTEST, StageTrainer, rate_to_reach


@pytest.fixture(scope="session")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a model that has learned a lesson: the first stage of most methods, trained once for all."""

    @functools.cache
    def folder(lesson: str) -> Path:
        place = tmp_path_factory.mktemp("fine-tuned") / lesson
        taught(learner("full", task=task_of(lesson)), lesson, place)
        return place

    return folder


def trained(lesson: str, method: str, fine_tuned: Callable[[str], Path], output: Path) -> AdaptiveModel:
    """A model that has learned a lesson in all stages of its method."""
    model = learner(method, task=task_of(lesson))
    first = model.method.stages()[0]
    if method == "full" or (first.name, first.epochs) != ("backbone", settings_of("full")["num_train_epochs"]):
        return taught(model, lesson, output)
    model.encoder.load_state_dict(AdaptiveModel.from_pretrained(fine_tuned(lesson)).encoder.state_dict())
    return taught(model, lesson, output, ("backbone",))


def as_trained(model: AdaptiveModel, points: list[OperatingPoint]) -> OperatingPoint:
    """The most expensive trained point: off, unless the method says otherwise."""
    dial = model.method.dial
    return next(point for point in points if point.dial == (dial.off if dial.trained is None else dial.trained))


@pytest.mark.parametrize("method", LABELLING)
def test_every_method_learns_and_is_saved(method: str, fine_tuned: Callable[[str], Path], tmp_path: Path) -> None:
    model = trained("reviews", method, fine_tuned, tmp_path / "out")
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    points = sweep(loaded, tiny_reviews(48, seed=2), progress=False)
    assert as_trained(loaded, points).score > 0.9
    cheap = points[2] if method == "layer_drop" else points[-1]  # half of the layers; one alone is hardly ever trained
    assert cheap.score > 0.7  # the shallowest exit has learned too
    assert loaded.operating_points == model.operating_points
    assert len(loaded.operating_points) == len(model.method.dial.sweep)
    assert loaded.dial == model.dial
    on_dev = {point.dial: point for point in loaded.operating_points}
    whole = as_trained(loaded, list(on_dev.values()))
    assert on_dev[loaded.dial].score >= whole.score - 0.005 - 1e-9  # the default dial gives up half a point at most
    assert loaded.provenance["training examples"] == 128
    assert not (tmp_path / "out.work").exists()  # checkpoints are gone


@pytest.mark.parametrize("method", ["length_adaptive"])
def test_operating_points_are_those_of_the_saved_weights(method: str, tmp_path: Path) -> None:
    """Several stages pack the model in between; fused optimizers do not tell that they changed it."""
    dev = tiny_reviews(48, seed=1)
    model = train(learner(method, num_train_epochs=1, drop_epochs=1), tiny_reviews(64), dev, tmp_path / "out", **QUICK)
    again = sweep(AdaptiveModel.from_pretrained(tmp_path / "out"), dev, progress=False)
    assert again == [dataclasses.replace(point, needs=None) for point in model.operating_points]


@pytest.mark.parametrize("method", ["pabee", "lte", "alberta"])
def test_regression_learns(method: str, tmp_path: Path) -> None:
    reviews = tiny_reviews(128)
    numbers = Dataset(reviews.texts, [2.0 * label + 1 for label in reviews.labels], None, reviews.where)
    model = train(learner(method, n_labels=1), numbers, numbers, tmp_path / "out", **QUICK)
    assert as_trained(model, sweep(model, numbers, progress=False)).score > 0.8


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].needs.met_by(Tokens)])
def test_tagging_learns(method: str, fine_tuned: Callable[[str], Path], tmp_path: Path) -> None:
    model = trained("tagging", method, fine_tuned, tmp_path / "out")
    points = sweep(AdaptiveModel.from_pretrained(tmp_path / "out"), tiny_tagging(32, seed=2), progress=False)
    assert as_trained(model, points).score > 0.9
    assert points[-1].score > 0.4  # the shortest sequences, every token restored
    assert set(points[0].metrics) == {"f1", "precision", "recall", "accuracy"}
    assert model.predict("how many city").entities[0].type == "ask"


@pytest.mark.parametrize("method", ["adapler"])
def test_bfloat16_autocast_trains_what_float32_measures(method: str, tmp_path: Path) -> None:
    data, dev = tiny_tagging(96), tiny_tagging(32, seed=1)
    model = train(learner(method, task=Tokens(TAGS)), data, dev, tmp_path / "out", bf16=True, **QUICK)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sweep(model, dev, progress=False)[0].score > 0.9


def test_adapler_retrains_its_weights_alone(tmp_path: Path) -> None:
    """With tokens removed for good there is no gradient to predictors and thresholds."""
    data, dev = tiny_reviews(96), tiny_reviews(32, seed=1)
    train(learner("adapler"), data, dev, tmp_path / "adaptive", **QUICK)
    before, model = (
        AdaptiveModel.from_pretrained(tmp_path / "adaptive", retrain_epochs=2, retrain_learning_rate=1e-3) for _ in "ab"
    )
    train(model, data, dev, tmp_path / "out", skip=("backbone", "adaptive"), **QUICK)
    assert not same(before.encoder, model.encoder)
    assert same(before.method, model.method)
    assert sweep(model, dev, [1.0], progress=False)[0].score > 0.9


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    weights = other.state_dict()
    return all(torch.equal(value, weights[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("method", ["length_adaptive", "power_bert", "alberta"])  # tagging: every method that can
def test_question_answering_learns(method: str, fine_tuned: Callable[[str], Path], tmp_path: Path) -> None:
    trained("questions", method, fine_tuned, tmp_path / "out")
    test = tiny_questions(32, 2, no_answer=True)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    assert loaded.task.settings() == {"no_answer": True, "null_threshold": 0.0, "stride": 4, "n_best": 5}
    whole = as_trained(loaded, sweep(loaded, test, progress=False))
    assert whole.score > 0.8
    assert set(whole.metrics) == {"f1", "exact_match"}
    assert loaded.predict(("how many ?", "the movie was two"), dial=whole.dial).answer == "two"


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    data, brief = tiny_reviews(48), {"num_train_epochs": 1, "exit_epochs": 1}
    first, again, other = (
        train(learner(**brief), data, data, tmp_path / str(i), seed=seed, **QUICK).state_dict()
        for i, seed in enumerate((1, 1, 2))
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("method", "stage"), [("deebert", -1), ("lte", 0), ("depth_reconstruction", 0), ("length_adaptive", -1)]
)
def test_a_killed_run_ends_the_same(method: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_reviews(48)
    expected = train(learner(method), data, data, tmp_path / "whole", **QUICK)

    killed_in = learner(method).method.stages()[stage].name
    compute_loss = StageTrainer.compute_loss

    def die(self: StageTrainer, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        if self.model.stage.name == killed_in and self.state.global_step == 8:  # in the third epoch of 3 steps
            raise Killed
        return compute_loss(self, model, inputs, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "compute_loss", die)
        with pytest.raises(Killed):
            train(learner(method), data, data, tmp_path / "killed", **QUICK)
    assert not (tmp_path / "killed").exists()
    resumed = train(learner(method), data, data, tmp_path / "killed", **QUICK)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[key], value, atol=1e-6, rtol=1e-5, msg=key)


def test_another_plan_does_not_continue_an_unfinished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_reviews(48)
    with monkeypatch.context() as patch:
        patch.setattr("stretto.training.run.run_stage", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            train(learner(), data, data, tmp_path / "out", **QUICK)
    with pytest.raises(StrettoError, match="same plan"):
        train(learner(pool="cls"), data, data, tmp_path / "out", **QUICK)
    shorter = learner()
    shorter.max_length = 8
    with pytest.raises(StrettoError, match="same plan"):
        train(shorter, data, data, tmp_path / "out", **QUICK)
    with pytest.raises(StrettoError, match="same plan"):
        train(learner(), data, data, tmp_path / "out", attention_dropout=0.3, **QUICK)


def test_the_same_plan_in_other_words_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tiny_reviews(48)
    monkeypatch.setattr("stretto.training.run.run_stage", lambda *_: (_ for _ in ()).throw(Killed))
    for nothing in (0, 0.0):
        with pytest.raises(Killed):
            train(learner(), data, data, tmp_path / "out", attention_dropout=nothing, **QUICK)


@pytest.mark.parametrize("name", LABELLING)
def test_the_plan_of_a_stage_can_be_written_and_is_the_same_for_the_same_settings(name: str) -> None:
    plans = [[stage.plan() for stage in tiny_model(name).method.stages()] for _ in range(2)]
    assert json.dumps(plans[0]) == json.dumps(plans[1])  # callables, which differ, are no part of it
    assert all({"name", "epochs", "learning_rate", "layers", "dials"} <= set(plan) for plan in plans[0])
    assert tiny_model(name).method.stages() == tiny_model(name).method.stages()


@pytest.mark.parametrize(("steps", "epochs"), [(-1, [0, 0.5, 1, 1.5, 2, 2.5]), (3, [0, 1, 2])])
def test_a_schedule_ends_with_the_steps(
    steps: int, epochs: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdapLeR hardens its removal by epochs: with `max_steps` too it must get to the end."""
    seen, compute_loss = [], StageTrainer.compute_loss

    def watched(trainer: StageTrainer, *args: Any, **named: Any) -> Any:
        loss = compute_loss(trainer, *args, **named)
        seen.append(trainer.model.epoch)
        return loss

    monkeypatch.setattr(StageTrainer, "compute_loss", watched)
    model = learner("adapler", adaptive_epochs=3, retrain_epochs=0)
    train(model, tiny_reviews(32), tiny_reviews(16), tmp_path / "out", skip=("backbone",), max_steps=steps, **QUICK)
    assert seen == epochs


def test_savings_are_counted_from_the_full_model_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from what untrained predictors leave of it, nor from what the stages in between make of it."""
    seen = []

    def watched(score: float, cost: float, start: float) -> float:
        seen.append(start)
        return 1 - cost

    monkeypatch.setattr("stretto.training.trainer.saving", watched)
    model, dev = learner("adapler", adaptive_epochs=1, retrain_epochs=1), tiny_reviews(16)
    (full,) = sweep(model, dev, [model.method.dial.off], progress=False)
    train(model, tiny_reviews(32), dev, tmp_path / "out", skip=("backbone",), **QUICK)
    assert len(seen) == 2 and seen[-1] == full.score  # the stage in between keeps its last checkpoint
    assert not (tmp_path / "out.work").exists()


def test_a_checkpoint_that_loses_much_is_not_kept_for_its_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three checkpoints: the cheapest of those that lose at most a point; not the cheapest, nor the best."""
    measured, kept = iter([(0.895, 0.5), (0.5, 0.1), (0.9, 0.6)]), []
    load = StageTrainer._load_best_model

    def watched(trainer: StageTrainer) -> None:
        kept.append(trainer.state.best_global_step)
        load(trainer)

    monkeypatch.setattr(StageTrainer, "score", lambda trainer, dials: next(measured))
    monkeypatch.setattr(StageTrainer, "_load_best_model", watched)
    monkeypatch.setattr("stretto.training.material.Material.full_score", lambda *_: 0.9)
    model, skip = learner("adapler", retrain_epochs=3), ("backbone", "adaptive")
    train(model, tiny_reviews(32), tiny_reviews(16), tmp_path / "out", skip=skip, **QUICK)
    assert kept == [2]  # the first epoch


def test_thresholds_move_fast_enough_and_are_clipped_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, usual, norms, step = [], [], [], torch.optim.AdamW.step

    def watched(optimizer: Any, *args: Any, **named: Any) -> Any:
        for group in optimizer.param_groups:
            (rates if group["apart"] else usual).append(group["initial_lr"])
            both[group["apart"]] += [each.grad for each in group["params"] if each.grad is not None]
        norms.extend(float(torch.nn.utils.get_total_norm(both[apart])) for apart in (False, True))
        for found in both.values():
            found.clear()
        return step(optimizer, *args, **named)

    both: dict[bool, list[Any]] = {False: [], True: []}
    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    model = learner("adapler", adaptive_epochs=60, retrain_epochs=0, phi=1e6, gamma=10.0)
    some = {"max_steps": 4, "save_strategy": "no", "eval_strategy": "no"}
    train(model, tiny_reviews(32), tiny_reviews(16), tmp_path / "out", skip="backbone", **QUICK, **some)
    assert norms == pytest.approx([1.0] * 8, rel=1e-3)  # φ and γ are so large that both are clipped
    assert rates == [FASTEST] * 4  # 2 · 0.99 / 4 would be more
    assert set(usual) == {5e-4, 1e-3}  # the backbone's, the predictors'
    assert rate_to_reach(0.99, 198) == pytest.approx(0.01)  # with linear decay 198 · 0.01 / 2
    assert rate_to_reach(0.0, 198) == 0


def test_only_the_first_process_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_main_process()
    monkeypatch.setenv("RANK", "1")  # also before the processes have met
    assert not is_main_process()


def test_skipping_stages(tmp_path: Path) -> None:
    data = tiny_reviews(48)
    model = learner("halting")
    before = {key: value.clone() for key, value in model.encoder.state_dict().items()}
    train(model, data, data, tmp_path / "out", skip="backbone", **QUICK)
    assert all(torch.equal(value, before[key]) for key, value in model.encoder.state_dict().items())
    with pytest.raises(StrettoError, match="backbone, exits, halting"):
        train(model, data, data, tmp_path / "other", skip=("backbones",), **QUICK)
    with pytest.raises(StrettoError, match=r"to skip, got backbones\."):  # a string is one name
        train(model, data, data, tmp_path / "other", skip="backbones", **QUICK)


def test_bad_arguments_and_data(tmp_path: Path) -> None:
    data = tiny_reviews(16)
    with pytest.raises(StrettoError, match="TrainingArguments, got bach_size"):
        train(learner(), data, data, tmp_path / "out", bach_size=3)
    with pytest.raises(StrettoError, match=r"attention_dropout from 0 to below 1, got 1\.5"):
        train(learner(), data, data, tmp_path / "out", attention_dropout=1.5)
    with pytest.raises(StrettoError, match="labelled"):
        train(learner(), Dataset(data.texts, None, None, data.where), data, tmp_path / "out")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    with pytest.raises(StrettoError, match="an empty folder or an earlier stretto model"):
        train(learner(), data, data, taken)
    with pytest.raises(StrettoError, match=r"to train with \(.*predictor, random\), got saliency"):
        train(learner("constant_ratio", select="saliency"), data, data, tmp_path / "out")
    assert not list(tmp_path.glob("*.work"))


def test_recorded_exits_equal_exits_trained_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen backbone may be read once or at every step: the losses, and so the exits, are the same."""
    data = tiny_reviews(48)
    settings = {**QUICK, "skip": ("backbone",), "train_sampling_strategy": "random"}
    once = train(learner(dropout=0.0, exit_epochs=2), data, data, tmp_path / "once", **settings)
    monkeypatch.setattr("stretto.training.frozen.RECORDING_LIMIT_BYTES", 0)
    always = train(learner(dropout=0.0, exit_epochs=2), data, data, tmp_path / "always", **settings)
    for key, value in once.method.state_dict().items():
        torch.testing.assert_close(always.method.state_dict()[key], value, atol=1e-4, rtol=1e-3, msg=key)


def test_tensorboard_through_report_to(tmp_path: Path) -> None:
    data = tiny_reviews(32)
    model = learner("deebert", num_train_epochs=1, exit_epochs=1)
    train(model, data, data, tmp_path / "out", report_to="tensorboard", **QUICK)
    logs = {path.parent.name for path in (tmp_path / "out.logs").rglob("events.out.tfevents.*")}
    assert logs == {"1-backbone", "2-exits"}  # a folder per stage
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ


SCRIPT = """
import sys
from tiny import tiny_model, tiny_reviews
from stretto import train
import torch
torch.set_num_threads(1)
model = tiny_model(sys.argv[1], num_train_epochs=4, learning_rate=2e-3, exit_epochs=4, exit_learning_rate=5e-3)
train(model, tiny_reviews(128), tiny_reviews(48, seed=1), sys.argv[2], progress=False, per_device_train_batch_size=8,
      ddp_backend="gloo")
"""


@pytest.mark.parametrize("method", ["lte"])  # of deebert: tests/cli/test_cli.py
def test_two_processes(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), method, str(tmp_path / "out")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    settings = json.loads((tmp_path / "out" / "stretto.json").read_text())
    assert settings["points"][0]["score"] > 0.8


def test_branchynet_lets_a_share_of_the_texts_go(tmp_path: Path) -> None:
    data = tiny_reviews(64)
    model = tiny_model("branchynet", joint_epochs=1, leaving_share=0.25)
    train(model, data, tiny_reviews(16, seed=1), tmp_path / "out", **QUICK)
    loaded = AdaptiveModel.from_pretrained(tmp_path / "out")
    assert len(set(loaded.method.factors.tolist())) == 3  # every exit has its own
    depths = [answer.depth for answer in loaded.predict([text for (text,) in data.texts], dial=0.5)]
    assert depths.count(1) == 16
