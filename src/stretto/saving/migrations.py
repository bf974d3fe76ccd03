"""Folders of earlier formats: their stretto.json, converted to the current format.

A change that would make a saved folder answer differently goes here. If the layout of stretto.json changes, raise
`FORMAT` and add a step. If only the default of a method's setting changes, or a new setting has a default that is not
what the method did before, add the earlier value to `EARLIER_SETTINGS`. A removed setting is listed in `GONE`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.errors import StrettoError

FORMAT = 2

Settings = dict[str, Any]

#: Format -> method -> setting -> value: a folder of this format, or of an earlier one, that does not name the setting
#: means this value.
EARLIER_SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        **{name: {"select": "attention"} for name in ("constant_ratio", "length_adaptive", "power_bert")},
        "alberta": {"pool": "cls", "exit_loss": "drawn"},
        "depth_mi": {"direction": "shallow"},
    },
}
#: Method -> settings that folders of earlier formats name and that no longer exist: they were about training alone.
GONE: dict[str, tuple[str, ...]] = {"depth_reconstruction": ("unlabelled",)}


def to_current(settings: Settings) -> Settings:
    """A stretto.json of any known format, converted to the current one."""
    version = settings["format"]
    if version not in range(1, FORMAT + 1):
        raise StrettoError(
            f"Expected a stretto.json of format {FORMAT} or earlier, got format {version!r:.20}. "
            "Use the version of stretto that wrote it, or a newer one."
        )
    for number in range(version, FORMAT):
        settings = STEPS[number](settings)
    config = {**earlier(version, settings["method"]), **settings["config"]}
    for name in GONE.get(settings["method"], ()):
        config.pop(name, None)
    return {**settings, "format": FORMAT, "config": config}


def earlier(version: int, method: str) -> dict[str, Any]:
    """Earlier values of settings that a folder of this format does not name."""
    meant: dict[str, Any] = {}
    for number in sorted(EARLIER_SETTINGS, reverse=True):
        for part in method.split("+") if version <= number else ():
            prefix = f"{part}_" if part != method else ""  # settings of a part of a combination
            meant |= {prefix + name: value for name, value in EARLIER_SETTINGS[number].get(part, {}).items()}
    return meant


def count_examples(settings: Settings) -> Settings:
    """1 → 2: operating points have their number of examples, which format 1 stores with the training."""
    count = settings.get("provenance", {}).get("dev examples", 0)
    return {**settings, "points": [{**point, "n": count} for point in settings["points"]]}


STEPS: dict[int, Callable[[Settings], Settings]] = {1: count_examples}
