"""Operating points: a dial with its measured score and cost; a budget also has a name, a guarantee also a certificate.

A model folder keeps them as a list: those along the dial, without names, and the budgets that `stretto calibrate` has
found. Which point to use is chosen in `stretto.budget.choose`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from stretto.errors import StrettoError


@dataclass(frozen=True)
class Latency:
    """How long a batch takes, where it was measured."""

    milliseconds: float
    batch: int
    percentile: float
    cpu: str


@dataclass(frozen=True)
class Certificate:
    """A guarantee: with this `confidence`, `loss` is on average at most `risk` on data like the calibration data."""

    loss: str
    """What is bounded, per example and in [0, 1], such as 'right answers lost'."""
    risk: float
    """What was allowed."""
    confidence: float
    measured: float
    """The average loss on the calibration data."""
    p_values: tuple[tuple[float, float], ...]
    """Dials and their p-values in the order of the tests, which is fixed before the data are read."""
    seed: int
    """Seed of the sample, if the calibration data are a sample."""
    versions: dict[str, str | None]


@dataclass(frozen=True)
class OperatingPoint:
    """A dial with its measured score, cost and depth."""

    dial: float
    score: float
    """The task's main metric, in [0, 1] (correlations in [-1, 1]). NaN: not measured, because there were no labels."""
    cost: float
    """Fraction of the full model's FLOPs, deciders included."""
    depth: float
    """Average number of layers run."""
    metrics: dict[str, float]
    name: str = ""
    """The name of a budget."""
    dials: tuple[float, ...] = ()
    """Of a composed method: the dial of each part."""
    n: int = 0
    """Examples it was measured on; 0 if that is not known."""
    data: str = ""
    """Hash of these examples (`saving.digests`)."""
    dtype: str = "float32"
    """What the model computed in."""
    latency: Latency | None = None
    certificate: Certificate | None = None
    """None: an estimate, nothing is guaranteed."""
    needs: int | None = None
    """Of an estimate: fresh examples that a guarantee would need, or might do with; None: not known."""

    def to_json(self) -> dict[str, Any]:
        """As JSON; fields with their default value are left out, but not the dtype that a guarantee holds for."""
        empty = {each.name: each.default for each in dataclasses.fields(self) if each.name not in REQUIRED}
        content = {name: value for name, value in dataclasses.asdict(self).items() if value != empty.get(name, NOTHING)}
        if self.certificate is not None:
            content["dtype"] = self.dtype
        return {**content, "score": None if math.isnan(self.score) else self.score}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> OperatingPoint:
        """The inverse; a TypeError names what does not fit."""
        check_kinds(content, REQUIRED, "an operating point")
        check_kinds(content, {name: OPTIONAL[name] for name in OPTIONAL if name in content}, "an operating point")
        latency, certificate = content.get("latency"), content.get("certificate")
        given = {
            **content,
            "score": math.nan if content["score"] is None else content["score"],
            "metrics": dict(content["metrics"]),
            "dials": tuple(content.get("dials", ())),
            "latency": None if latency is None else latency_from_json(latency),
            "certificate": None if certificate is None else certificate_from_json(certificate),
        }
        return cls(**given)


#: What the fields may be in JSON.
REQUIRED: dict[str, Any] = {"dial": Real, "score": Real | None, "cost": Real, "depth": Real, "metrics": Mapping}
OPTIONAL: dict[str, Any] = {"name": str, "dials": Sequence, "n": int, "data": str, "dtype": str, "needs": int}
OF_LATENCY: dict[str, Any] = {"milliseconds": Real, "batch": int, "percentile": Real, "cpu": str}
OF_CERTIFICATE: dict[str, Any] = {
    "loss": str, "risk": Real, "confidence": Real, "measured": Real, "p_values": Sequence, "seed": int,
    "versions": Mapping,
}  # fmt: skip
NOTHING = object()


def check_kinds(content: Any, kinds: Mapping[str, Any], what: str) -> None:
    """A TypeError names the first field that is missing or of another kind."""
    if not isinstance(content, Mapping):
        raise TypeError(f"{content!r:.40} as {what}")
    for name, kind in kinds.items():
        if name not in content:
            raise TypeError(f"{what} without its {name}")
        if not isinstance(content[name], kind):
            raise TypeError(f"{content[name]!r:.40} as the {name} of {what}")


def latency_from_json(content: Any) -> Latency:
    check_kinds(content, OF_LATENCY, "the latency of an operating point")
    return Latency(**content)


def certificate_from_json(content: Any) -> Certificate:
    check_kinds(content, OF_CERTIFICATE, "the certificate of an operating point")
    for pair in content["p_values"]:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(each, Real) for each in pair)):
            raise TypeError(f"{pair!r:.40} as a dial and its p-value")
    return Certificate(**{**content, "p_values": tuple((dial, p) for dial, p in content["p_values"])})


def budget_named(points: Sequence[OperatingPoint], name: str, dtype: str) -> OperatingPoint:
    """The budget of this name for a model in `dtype`: measurements in another dtype do not apply."""
    named = [point for point in points if point.name]
    for point in named:
        if (point.name, point.dtype) == (name, dtype):
            return point
    if others := sorted({point.dtype for point in named if point.name == name}):
        raise StrettoError(
            f"Expected a budget '{name}' for {dtype}, got one for {', '.join(others)}. "
            f"Use it with that dtype, or calibrate again with --dtype {dtype}."
        )
    known = ", ".join(f"'{each}'" for each in dict.fromkeys(point.name for point in named)) or "no budgets at all"
    raise StrettoError(
        f"Expected the name of a budget that the model has ({known}), got '{name:.60}'. "
        "`stretto calibrate` adds budgets."
    )


def as_estimates(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """The same points without guarantees and what these need: they were measured with other settings, or in another
    dtype."""
    return [dataclasses.replace(point, certificate=None, needs=None) for point in points]


def promise(point: OperatingPoint) -> str:
    """What a point promises, in words: a guarantee, a latency, or an estimate."""
    if point.certificate is not None:
        given = point.certificate
        return (
            f"guaranteed with {100 * given.confidence:g} % confidence: {given.loss} at most {100 * given.risk:g} % "
            f"({point.n} examples)"
        )
    if point.latency is not None:
        took = point.latency
        return (
            f"{took.percentile:g} % of the batches of {took.batch} in {took.milliseconds:.3g} ms on {took.cpu}, "
            "as measured; no guarantee"
        )
    measured = f"estimate on {point.n} examples, no guarantee" if point.n else "estimate, no guarantee"
    return measured if point.needs is None else f"{measured} (one needs at least {point.needs} fresh examples)"


def relied_on(points: Sequence[OperatingPoint], dial: float, dtype: str = "float32") -> OperatingPoint | None:
    """What is known of a dial: of several points there one with a certificate, else one that says what it needs."""
    here = [point for point in points if point.dial == dial and point.dtype == dtype]
    return max(here, key=lambda point: (point.certificate is not None, point.needs is not None), default=None)


def promise_at(
    points: Sequence[OperatingPoint], dial: float, dtype: str = "float32", *, off: float | None = None
) -> str:
    """What may be relied on at a dial, in words; `off` is that of the full model."""
    found = relied_on(points, dial, dtype)
    if dial == off:
        if found is None or found.needs is None:
            return "the full model"
        return f"the full model; a guarantee for less needs at least {found.needs} fresh examples"
    return "not measured" if found is None else promise(found)


def standing(points: Sequence[OperatingPoint], dial: float, dtype: str = "float32", *, off: float | None = None) -> str:
    """The same in a word or two, for tables and plots."""
    found = relied_on(points, dial, dtype)
    if dial == off:
        return "full model"
    return "not measured" if found is None else "estimate" if found.certificate is None else "guaranteed"
