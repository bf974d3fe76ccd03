"""Loose flags become typed settings; wrong ones are named, with a guess."""

from __future__ import annotations

from typing import Any

import pytest

from stretto import StrettoError
from stretto.cli.settings import field_types, sort_settings, take_flags
from stretto.cli.verbs import with_json_target
from stretto.methods import METHODS
from stretto.methods.settings import limits

OPTIONS = {"--model": True, "--overwrite": False}


def test_flags_are_told_from_options_and_arguments() -> None:
    args = "--pool cls data.csv --fp16 --model m --no-load-best-model-at-end --seed=3 --overwrite --max_steps -1"
    rest, settings = take_flags(args.split(), OPTIONS)
    assert rest == ["data.csv", "--model", "m", "--overwrite"]
    assert settings == {
        "pool": "cls", "fp16": "true", "load_best_model_at_end": "false", "seed": "3", "max_steps": "-1",
    }  # fmt: skip
    assert take_flags(["--fp16", "false", "data.csv"], {}) == (["data.csv"], {"fp16": "false"})
    assert take_flags(["--seed", "1", "--", "--seed"], {}) == (["--", "--seed"], {"seed": "1"})
    assert take_flags(["--model", "--odd", "--seed", "1"], OPTIONS) == (["--model", "--odd"], {"seed": "1"})


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--exit-epoch", "Did you mean --exit-epochs"),
        ("--modle", "Did you mean --model"),
        ("--sede", "Did you mean --seed"),
        ("--output-dir", "which stretto sets"),
        ("--zzzzzz", r"got --zzzzzz\. `--help`"),
    ],
)
def test_unknown_flags_are_guessed(flag: str, answer: str) -> None:
    with pytest.raises(StrettoError, match=answer):
        take_flags([flag, "3"], OPTIONS)


def test_a_flag_without_its_value() -> None:
    for args in (["--seed"], ["--seed", "--fp16"]):
        with pytest.raises(StrettoError, match="a value after --seed, got none"):
            take_flags(args, {})


def test_settings_take_the_types_of_their_fields() -> None:
    loose = {
        "exit_epochs": "5", "factors": "1, 2,0.5", "pool": "cls", "learning_rate": "1e-3", "seed": "7",
        "bf16": "yes", "eval_steps": "none", "report_to": "tensorboard", "lr_scheduler_kwargs": '{"a": 1}',
    }  # fmt: skip
    config, arguments = sort_settings("branchynet", loose)
    assert config == {"exit_epochs": 5.0, "factors": (1.0, 2.0, 0.5), "pool": "cls", "learning_rate": 1e-3}
    assert arguments == {
        "seed": 7, "bf16": True, "eval_steps": None, "report_to": ["tensorboard"], "lr_scheduler_kwargs": '{"a": 1}',
    }  # fmt: skip


@pytest.mark.parametrize("value", ["0.5,1;0,1", [[0.5, 1], [0, 1]]])
def test_a_setting_may_be_a_list_of_lists(value: Any) -> None:
    config, _ = sort_settings("depth_adaptive", {"thresholds": value})
    assert config == {"thresholds": ((0.5, 1.0), (0.0, 1.0))}


def test_settings_of_a_run_file_may_have_types_already() -> None:
    loose = {"exit_epochs": 5, "factors": [1, 2], "bf16": True, "eval_steps": None, "lr_scheduler_kwargs": {"a": 1}}
    config, arguments = sort_settings("branchynet", loose)
    assert config == {"exit_epochs": 5.0, "factors": (1.0, 2.0)}
    assert arguments == {"bf16": True, "eval_steps": None, "lr_scheduler_kwargs": {"a": 1}}


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("exit_epochs", "two", "a number for --exit-epochs, got 'two'"),
        ("seed", "1.5", "a whole number for --seed, got '1.5'"),
        ("pool", "max", "'mean' or 'cls' for --pool, got 'max'"),
        ("bf16", "perhaps", "true or false for --bf16, got 'perhaps'"),
        ("penalty", "0.1", "settings of deebert .*got --penalty of another method"),
        ("exit_epoch", "1", "Did you mean --exit-epochs"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any, answer: str) -> None:
    with pytest.raises(StrettoError, match=answer):
        sort_settings("deebert", {name: value})


@pytest.mark.parametrize(
    ("method", "settings", "answer"),
    [
        ("depth_mi", {"smoothing": 0.0}, r"smoothing in \(0, ∞\), got 0.0"),
        ("depth_mi", {"label_bins": 1}, r"label_bins in \[2, ∞\), got 1"),
        ("depth_mi", {"depth_epochs": -1.0}, r"depth_epochs in \[0, ∞\), got -1.0"),
        ("depth_mi", {"head": "first"}, "head among 'pooled', 'mean', 'model', got 'first'"),
        ("depth_mi", {"direction": "up"}, "direction among 'deep', 'shallow', got 'up'"),
        ("depth_reconstruction", {"penalty": 0.0}, r"penalty in \(0, ∞\), got 0.0"),
        ("depth_reconstruction", {"mask_share": 2.0}, r"mask_share in \(0, 1\], got 2.0"),
        ("token_halting", {"penalty": float("nan")}, r"penalty in \[0, ∞\), got nan"),
        ("deebert", {"pool": "max"}, "pool among 'mean', 'cls', got 'max'"),
        ("deebert", {"dropout": "much"}, r"dropout in \[0, 1\], got 'much'"),
        ("static_depth", {"depth": -1}, r"depth in \[0, ∞\), got -1"),
    ],
)
def test_settings_outside_their_range_are_refused(method: str, settings: dict[str, Any], answer: str) -> None:
    with pytest.raises(StrettoError, match=f"Expected {answer}. Choose another value"):
        METHODS[method].Config(**settings)


@pytest.mark.parametrize("method", METHODS)
def test_every_number_of_every_method_has_a_range(method: str) -> None:
    config = METHODS[method].Config
    free = {name for name, kind in field_types(config).items() if kind in (int, float) and name not in limits(config)}
    assert free <= {"selection_seed", "table_seed"}


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_of_every_method_can_be_a_flag(method: str) -> None:
    defaults = METHODS[method].Config()
    flags = [part for name, value in vars(defaults).items() for part in (f"--{name.replace('_', '-')}", text_of(value))]
    rest, settings = take_flags(flags, {})
    config, arguments = sort_settings(method, settings)
    assert (rest, arguments) == ([], {})
    assert METHODS[method].Config(**config) == defaults


def text_of(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def test_json_may_stand_alone() -> None:
    assert with_json_target(["a", "--json"]) == ["a", "--json", "-"]
    assert with_json_target(["--json", "--plot", "p"]) == ["--json", "-", "--plot", "p"]
    assert with_json_target(["--json", "f.json", "b"]) == ["--json", "f.json", "b"]
    assert with_json_target(["--json", "-"]) == ["--json", "-"]
    assert with_json_target([]) == []
