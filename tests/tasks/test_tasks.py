"""Tasks: losses, answers, metrics against scikit-learn and hand-computed numbers, and transformers configs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sklearn_metrics
from tiny import tiny_model, tiny_questions, tiny_reviews
from transformers import BertConfig

from stretto.errors import StrettoError
from stretto.tasks import TASKS, Classification, Regression, SequenceTask, Span, Tokens, task_from_config
from stretto.tasks.metrics import ece

NAMES = ["bad", "good", "mixed"]


# ---- classification --------------------------------------------------------------------------------------------------


def test_classification_loss_is_each_examples_cross_entropy() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(3.0), 0.0]])  # probabilities 1/4, 3/4 and 3/4, 1/4
    loss = Classification(["no", "yes"]).loss(logits, torch.tensor([1, 1]))
    torch.testing.assert_close(loss, torch.tensor([math.log(4 / 3), math.log(4.0)]))


def test_classification_loss_carries_gradients() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    Classification(NAMES).loss(logits, torch.tensor([0, 2])).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], torch.tensor([-2 / 3, 1 / 3, 1 / 3]))


def test_classification_decodes_to_names_and_probabilities() -> None:
    logits = torch.tensor([[0.0, math.log(2.0), 0.0], [math.log(6.0), math.log(3.0), 0.0]], requires_grad=True)
    first, second = Classification(NAMES).decode(logits)
    assert first.label == "good"
    assert first.score == pytest.approx(0.5)
    assert first.probabilities == pytest.approx({"bad": 0.25, "good": 0.5, "mixed": 0.25})
    assert (second.label, second.score) == ("bad", pytest.approx(0.6))


def test_a_tie_goes_to_the_first_label_as_in_correct() -> None:
    task, logits = Classification(NAMES), torch.zeros(1, 3)
    assert task.decode(logits)[0].label == "bad"
    assert task.correct(logits, torch.tensor([0])).tolist() == [True]


def test_correct_is_a_bool_per_example() -> None:
    correct = Classification(NAMES).correct(torch.tensor([[0.0, 1.0, 0.0], [2.0, 1.0, 0.0]]), torch.tensor([1, 1]))
    assert correct.dtype == torch.bool
    assert correct.tolist() == [True, False]


@pytest.mark.parametrize("kind", ["torch", "numpy", "lists"])
def test_classification_metrics_equal_scikit_learn(kind: str) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(50, 3)), rng.integers(0, 3, size=50)
    predicted = logits.argmax(axis=1)
    convert = {"torch": torch.tensor, "numpy": np.asarray, "lists": np.ndarray.tolist}[kind]
    got = Classification(NAMES).metrics(convert(logits), convert(labels))  # type: ignore[operator]
    assert list(got) == ["accuracy", "macro_f1", "mcc", "ece"]
    assert got["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    assert got["macro_f1"] == pytest.approx(sklearn_metrics.f1_score(labels, predicted, average="macro"))
    assert got["mcc"] == pytest.approx(sklearn_metrics.matthews_corrcoef(labels, predicted))
    assert all(type(value) is float for value in got.values())


def test_metrics_of_one_class_alone_are_defined() -> None:
    got = Classification(["no", "yes"]).metrics(np.array([[5.0, 0.0]] * 4), np.array([0, 0, 0, 0]))
    assert (got["accuracy"], got["macro_f1"], got["mcc"]) == (1.0, 1.0, 0.0)


def test_metrics_of_a_class_never_predicted_are_defined() -> None:
    got = Classification(["no", "yes"]).metrics(np.array([[5.0, 0.0]] * 4), np.array([0, 1, 1, 0]))
    assert (got["accuracy"], got["mcc"]) == (0.5, 0.0)
    assert got["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)


def logits_of(confidences: list[float]) -> np.ndarray:
    """Two-class logits that give class 1 these probabilities."""
    p = np.array(confidences)
    return np.stack([np.log1p(-p), np.log(p)], axis=1)


def test_ece_by_hand() -> None:
    # bins of width 1/15: 0.9 and 0.92 share (13/15, 14/15]; 0.7 is in (10/15, 11/15]
    # bin one: accuracy 1/2, confidence 0.91, weight 2/3; bin two: accuracy 1, confidence 0.7, weight 1/3
    got = ece(logits_of([0.9, 0.92, 0.7]), np.array([1, 0, 1]))
    assert got == pytest.approx(2 / 3 * 0.41 + 1 / 3 * 0.3)


def test_ece_does_not_let_bins_cancel() -> None:
    # 0.6 always right (gap 0.4) and 0.95 always wrong (gap 0.95): their mean gap, not |mean confidence - accuracy|
    assert ece(logits_of([0.6, 0.95]), np.array([1, 0])) == pytest.approx((0.4 + 0.95) / 2)


def test_the_upper_edge_belongs_to_a_bin() -> None:
    # two bins: 0.5 (wrong) is in (0, 1/2], 0.75 (right) in (1/2, 1]
    got = ece(np.array([[0.0, 0.0], [np.log(3), 0.0]]), np.array([1, 0]), bins=2)
    assert got == pytest.approx((0.5 + 0.25) / 2)


def test_ece_of_certainty() -> None:
    logits = np.array([[1000.0, 0.0], [1000.0, 0.0]])  # confidence 1 exactly: the last bin, and no overflow
    assert ece(logits, np.array([0, 0])) == 0.0
    assert ece(logits, np.array([1, 1])) == 1.0
    assert ece(logits, np.array([0, 1])) == 0.5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50), st.integers(0, 1)), min_size=1, max_size=30))
def test_ece_is_between_the_overall_gap_and_one(rows: list[tuple[float, float, int]]) -> None:
    logits, labels = np.array([row[:2] for row in rows]), np.array([row[2] for row in rows])
    shifted = logits - logits.max(axis=1, keepdims=True)
    confidence = 1 / np.exp(shifted).sum(axis=1)
    overall = abs((logits.argmax(axis=1) == labels).mean() - confidence.mean())
    assert overall - 1e-9 <= ece(logits, labels) <= 1


@pytest.mark.parametrize("names", [[], ["only"], ["same", "same"]])
def test_classification_wants_several_different_names(names: list[str]) -> None:
    with pytest.raises(StrettoError, match=r"Expected two or more different label names, got .* regression task"):
        Classification(names)


# ---- regression ------------------------------------------------------------------------------------------------------


def test_regression_loss_is_each_examples_squared_error() -> None:
    loss = Regression().loss(torch.tensor([[1.0], [2.5]]), torch.tensor([3.0, 2.0], dtype=torch.float64))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor([4.0, 0.25]))


def test_regression_decodes_to_a_value() -> None:
    [answer] = Regression().decode(torch.tensor([[2.5]]))
    assert (answer.label, answer.score, answer.probabilities) == (2.5, None, None)


def test_regression_has_no_right_or_wrong() -> None:
    with pytest.raises(StrettoError, match=r"right or wrong, got regression. Use a class"):
        Regression().correct(torch.zeros(1, 1), torch.zeros(1))


def test_regression_metrics_equal_scipy() -> None:
    rng = np.random.default_rng(0)
    labels = rng.normal(size=40)
    values = np.exp(labels) + rng.normal(size=40)
    got = Regression().metrics(values[:, None], labels)
    assert got["pearson"] == pytest.approx(stats.pearsonr(labels, values).statistic)
    assert got["spearman"] == pytest.approx(stats.spearmanr(labels, values).statistic)
    assert got["mse"] == pytest.approx(sklearn_metrics.mean_squared_error(labels, values))
    assert got["pearson"] != pytest.approx(got["spearman"], abs=1e-3)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]),
        ([1e9, 1e9 + 1e-6, 1e9], [1, 2, 3]),
        ([4.0], [4.0]),
    ],
)
def test_correlation_with_a_constant_is_zero(values: list[float], labels: list[float]) -> None:
    got = Regression().metrics(np.array(values)[:, None], labels)  # warnings are errors here
    assert (got["pearson"], got["spearman"]) == (0.0, 0.0)


def test_regression_has_no_label_names() -> None:
    assert (Regression().label_names, Regression().num_labels) == ([], 1)
    with pytest.raises(StrettoError, match=r"Expected no label names for regression, got .'bad', 'good'"):
        Regression(["bad", "good"])


# ---- all tasks that answer sequences ---------------------------------------------------------------------------------

SEQUENCE_TASKS = [name for name in TASKS if issubclass(TASKS[name], SequenceTask)]


def example_of(name: str) -> Any:
    return TASKS[name].make(NAMES)


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
def test_main_metric_is_among_the_metrics_and_perfect_for_perfect_logits(name: str) -> None:
    task = example_of(name)
    labels = torch.tensor([0, 1, 2, 1])
    logits = torch.nn.functional.one_hot(labels).double() if task.num_labels > 1 else labels[:, None].double()
    assert task.metrics(logits, labels)[task.main_metric] == pytest.approx(1.0)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_survives_a_transformers_config(name: str) -> None:
    """By the architecture that plain transformers writes, and by what stretto writes beside it."""
    task = example_of(name)
    heads = (task.architecture,) if isinstance(task.architecture, str) else task.architecture
    config = BertConfig(**task.hf_config(), architectures=["Bert" + heads[0]])
    for again in (
        task_from_config(BertConfig(**config.to_dict())),
        task_from_config(config, {"name": name, **task.settings()}),
    ):
        assert (again.name, again.label_names, again.num_labels) == (name, task.label_names, task.num_labels)
        assert again.settings() == task.settings()


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
@pytest.mark.parametrize(("logits", "labels"), [((0, 3), 0), ((4, 3), 5), ((4,), 4)])
def test_metrics_want_matching_shapes(name: str, logits: tuple[int, ...], labels: int) -> None:
    with pytest.raises(StrettoError, match=r"Expected logits \[N, C\] and labels \[N\].*, got the shapes"):
        example_of(name).metrics(np.zeros(logits), np.zeros(labels, dtype=int))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_metrics_refuse_logits_of_a_diverged_model(bad: float) -> None:
    with pytest.raises(StrettoError, match=r"Expected finite logits, got .* for example 1\. .* training has diverged"):
        Classification(["no", "yes"]).metrics(np.array([[0.0, 1.0], [bad, 0.0]]), np.array([0, 1]))


def test_hf_config_fields() -> None:
    assert Classification(["no", "yes"]).hf_config() == {
        "num_labels": 2,
        "id2label": {0: "no", 1: "yes"},
        "label2id": {"no": 0, "yes": 1},
        "problem_type": "single_label_classification",
    }
    assert Regression().hf_config()["problem_type"] == "regression"


def test_a_config_without_problem_type_goes_by_its_labels() -> None:
    assert isinstance(task_from_config(BertConfig(num_labels=1)), Regression)
    assert task_from_config(BertConfig(num_labels=3)).label_names == ["LABEL_0", "LABEL_1", "LABEL_2"]


@pytest.mark.parametrize(
    ("kind", "outputs"), [("multi_label_classification", 1), ("multi_label_classification", 3), ("regression", 2)]
)
def test_a_config_of_another_task_is_refused(kind: str, outputs: int) -> None:
    config = BertConfig(num_labels=outputs, problem_type=kind)
    with pytest.raises(StrettoError, match=rf"got {kind} with {outputs} outputs. Use a model for classification or"):
        task_from_config(config)


def test_an_unknown_task_is_told_the_names() -> None:
    with pytest.raises(StrettoError, match=r"tokens, span, seq2seq; got 'regresion'\. Did you mean 'regression'\?"):
        TASKS["regresion"]


# ---- capabilities ------------------------------------------------------------------------------------------


def test_scores_of_single_examples_have_the_main_metric_as_their_mean() -> None:
    for task, data in (
        (Classification(["bad", "good"]), tiny_reviews(24)),
        (Span(no_answer=True), tiny_questions(24, no_answer=True)),
    ):
        model = tiny_model("full", task=task)
        encoded = model.encode(data.texts)
        logits, _ = model.run_features(encoded.features, 0.0, 8)
        scores = task.example_scores(logits, encoded, data.labels)
        assert scores is not None and scores.shape == (24,)
        assert float(scores.mean()) == pytest.approx(task.scores(logits, encoded, data.labels)[task.main_metric])
        assert scores.min() >= 0 and scores.max() <= 1
    assert Regression().example_scores(torch.zeros(1, 1), encoded, [0.0]) is None  # a correlation is no mean
    assert Tokens(["O", "B-x"]).example_scores([torch.zeros(1, 2)], encoded, [[0]]) is None


def test_only_some_tasks_are_capable_of_some_things() -> None:
    tagging = Tokens(["O", "B-x"])
    for ask in (tagging.correct, tagging.wrongness):
        with pytest.raises(StrettoError, match="a task whose answers are right or wrong, got tokens"):
            ask(torch.zeros(1, 2), torch.zeros(1))
    with pytest.raises(StrettoError, match="a task that answers whole sequences, got tokens"):
        tagging.same_answer(torch.zeros(1, 2), torch.zeros(1, 2), 0.1)
    with pytest.raises(StrettoError, match="a task that answers whole sequences, got tokens"):
        tagging.classes(torch.zeros(1), 5)


def test_the_command_line_lists_the_tasks_there_are() -> None:
    assert f"{', '.join(TASKS)}; default: classification." in " ".join(run("train", "--help").stdout.split())
