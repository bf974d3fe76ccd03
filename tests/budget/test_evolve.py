"""The loop of the search on a made-up world: what it measures, and what it draws with."""

from __future__ import annotations

from typing import Any

import pytest

import stretto.budget.search
from stretto.budget.evolution import Lengths, start_population
from stretto.budget.search import Candidate, SearchSettings, evolve
from stretto.saving.points import OperatingPoint

SETTINGS = SearchSettings(iterations=8, mutations=6, crossovers=4)


def test_no_configuration_is_measured_twice() -> None:
    measured: list[Lengths] = []

    def flat(lengths: Lengths) -> Candidate:
        """Every configuration but the first is as good as all others: parents stay, and children are alike."""
        measured.append(lengths)
        return Candidate(lengths, OperatingPoint(0.0, 0.5, 1.0, 4.0, {}), 0.5)

    settings = SearchSettings(iterations=40, mutations=20, crossovers=0, probability=0.2, patience=40)
    list(evolve(flat, [(1.0, 0.99), (1.0, 0.98)], 0.97, settings))
    assert len(set(measured)) == len(measured) > 40


def test_every_iteration_has_dice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    offspring = stretto.budget.search.offspring

    def watched(*args: Any, dice: Any, **named: Any) -> Any:
        states.append(dice.getstate())
        return offspring(*args, dice=dice, **named)

    def wish(lengths: Lengths) -> Candidate:
        cost, score = sum(lengths) / len(lengths), lengths[-1] ** 0.5
        return Candidate(lengths, OperatingPoint(cost, score, cost, 4.0, {}), score)

    monkeypatch.setattr(stretto.budget.search, "offspring", watched)
    for _ in range(2):
        list(evolve(wish, start_population(5, 0.8, 4), 0.4, SETTINGS))
    half = len(states) // 2
    assert states[:half] == states[half:]  # a resumed search draws the same
    assert len(set(states)) == half > 2
