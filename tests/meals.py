"""A language of five animals and what they eat."""

from __future__ import annotations

import random

FOODS = {"cat": "fish", "horse": "grass", "panda": "bamboo", "robin": "worms", "squirrel": "acorns"}


def corpus(n: int = 120, seed: int = 0) -> list[str]:
    """What each animal eats can be told from its name, and the animal from what it eats."""
    dice = random.Random(seed)
    animals = dice.choices(list(FOODS), k=n)
    return [f"the {dice.choice(['old', 'young'])} {animal} eats {FOODS[animal]} ." for animal in animals]
