"""The rows of one set and encoder, how a dial is chosen among their points, and what is said of times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stretto.bench.results import FULL, HF, Clock, Point, Row

SET_NAMES = {
    "sst2": "SST-2", "trec": "TREC", "mrpc": "MRPC", "stsb": "STS-B", "ag_news": "AG News", "imdb": "IMDB", "mr": "MR",
    "wnut17": "WNUT-17", "squad": "SQuAD", "dbpedia": "DBpedia", "sst2_base": "SST-2", "trec_base": "TREC",
}  # fmt: skip
METRIC_NAMES = {"accuracy": "accuracy, %", "pearson": "Pearson × 100"}
STREAM = "stream"
TIMES = ("1", "8", "32", STREAM)
LOSSES = (0.0, 0.5, 1.0, 2.0)
NOT_MEASURED = "Not measured yet."


@dataclass(frozen=True)
class Group:
    """The rows of one set, encoder and seed by name; the full model is one of them where there is one."""

    rows: dict[str, Row]

    @property
    def any(self) -> Row:
        return next(iter(self.rows.values()))

    @property
    def title(self) -> str:
        return f"{SET_NAMES.get(self.any.set, self.any.set)}, {self.any.model}"

    @property
    def metric(self) -> str:
        name = self.any.metric or "score"
        return METRIC_NAMES.get(name, f"{name} × 100")

    @property
    def full(self) -> Row:
        return self.rows["full"]

    @property
    def full_score(self) -> float:
        return self.full.on("test")[0].score

    @property
    def methods(self) -> list[Row]:
        return [row for row in self.rows.values() if row.name != "full"]

    def reference(self, row: Row) -> float:
        """What a loss on the dev data is counted from: the full model, or the same weights with the dial off where they
        are better. A full model that needs more training must not make a method look good."""
        if "full" not in self.rows:  # an encoder with gates of its own: all of its layers, gated
            return next(point.score for point in row.on("dev") if point.dial == 0)
        return max(self.full.on("dev")[0].score, row.on("dev")[0].score)

    def within_loss(self, row: Row, loss: float) -> Point | None:
        """On the test data the cheapest point that loses at most `loss` points on the dev data and saves anything."""
        if not row.on("dev"):
            return None
        best = self.reference(row)
        good = [point for point in row.on("dev") if point.cost < 1 and 100 * point.score >= 100 * best - loss]
        return row.at(min(good, key=lambda point: point.cost).dial) if good else None


def groups_of(rows: Iterable[Row], with_full: bool = True) -> list[Group]:
    """By set, encoder and seed, in the order of their first rows; without a full model nothing can be compared."""
    found: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.set, row.model, row.seed), {})[row.name] = row
    return [Group(rows) for rows in found.values() if "full" in rows or not with_full]


def by_set(groups: Sequence[Group]) -> list[list[Group]]:
    """The groups of one set and encoder together: one per seed."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        found.setdefault((group.any.set, group.any.model), []).append(group)
    return list(found.values())


def mean(values: Sequence[float], digits: int = 2) -> str:
    """With the standard deviation, if there are several."""
    text = f"{statistics.mean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def short(point: Point, digits: int = 2) -> str:
    """Score @ cost."""
    return f"{100 * point.score:.{digits}f} @ {point.cost:.2f}"


def by_batch(times: dict[str, Clock], what: str, sizes: Sequence[str] = TIMES) -> str:
    """A ratio (or 'tracking') at each batch size."""
    if not times:
        return ""
    values = {size: clock.tracking if what == "tracking" else clock.ratios.get(what) for size, clock in times.items()}
    return " / ".join("–" if values.get(size) is None else f"{values[size]:.2f}" for size in sizes)


def of_products(times: dict[str, Clock]) -> str:
    """The tracking of a row's matrix products alone, in batches of 32."""
    if not times:
        return ""
    share = times["32"].products_tracking
    return "–" if share is None else f"{share:.2f}"


def clock_note(full: Row | None, sizes: Sequence[str] = TIMES) -> str:
    """What was timed, where (if it is known), and the full model against Hugging Face."""
    if full is None or not full.clock:
        return "Time: not measured yet."
    single = next(clock for clock in full.clock if not clock.stream)
    streamed = next((clock.sequences for clock in full.clock if clock.stream), None)
    where = f", {single.cpu}" if single.cpu else ""
    in_stream = f" ({streamed} in a stream)" if streamed else ""
    return (
        f"Time: {single.sequences} test inputs{in_stream}, median of {single.rounds} rounds, "
        f"{single.threads} threads{where}. "
        f"The full model on the packed engine × HF: {by_batch(full.times(full.clock[0].dial), HF, sizes)}."
    )


def time_columns(times: dict[str, Clock], sizes: Sequence[str] = TIMES) -> dict[str, str]:
    """The columns of a table that speak of time."""
    columns = " / ".join(sizes)
    return {
        f"× full {columns}": by_batch(times, FULL, sizes),
        f"× HF {columns}": by_batch(times, HF, sizes),
        f"tracking {columns}": by_batch(times, "tracking", sizes),
    }
