"""The page of a comparison in Chromium: marks with values on hover, means over seeds, nothing fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browser import chromium_page, needs_chromium

from stretto.bench.page import cost_marks, looks_of, page
from stretto.bench.report.groups import groups_of
from stretto.bench.results import FULL, HF, Clock, Point, Row
from stretto.bench.suite import BASELINES, Recipe, SetSpec, Suite
from stretto.bench.summary import compared, table
from stretto.methods import METHODS

SUITE = Suite("made", "Made up.", "m", {"trec": SetSpec("trec", 1)}, {"full": Recipe("full")})


def row(name: str, seed: int, points: list[Point], **more: Any) -> Row:
    about = {"set": "trec", "model": "m", "metric": "accuracy", "n_train": 9, "n_test": 4, "versions": {}}
    return Row(**about, command="", name=name, method=name, seed=seed, points=points, **more)


def points(*each: tuple[float, float, float], dtype: str = "float32") -> list[Point]:
    measured = [Point(dial, score, cost, 12 * cost, dtype=dtype) for dial, score, cost in each]
    return [Point(p.dial, p.score, p.cost, p.depth, split="dev") for p in measured if dtype == "float32"] + measured


def clock(batch: int, dial: float, dtype: str = "float32", ratio: float = 2.0, **more: Any) -> Clock:
    return Clock(batch, 2.0, {FULL: ratio, HF: 3.0}, 4, 5, 1, dial=dial, dtype=dtype, ms_per_text=1.5, **more)


def rows(seed: int, more: float = 0.0) -> list[Row]:
    exits = points((0, 0.9 + more, 1.0), (0.2, 0.895 + more, 0.4))
    int8 = points((0, 0.89 + more, 1.0), (0.2, 0.885 + more, 0.4), dtype="int8")
    times = [clock(size, 0.2) for size in (1, 8, 32)] + [clock(32, 0.2, stream=True), clock(1, 0.2, "int8", 4.0)]
    answers = {"dial": 0.2, "depth": [0, 3, 1], "left": [1] + [0] * 8 + [3]}
    return [
        row("full", seed, points((0, 0.9 + more, 1.0)), clock=[clock(1, 0, ratio=1.0)]),
        row("huggingface", seed, [Point(0, 0.9 + more, 1.3, 12)], clock=[clock(1, 0.0, ratio=0.5)]),
        row("deebert", seed, exits + int8, clock=times, answers=answers),
        row("length_adaptive", seed, points((1, 0.9, 1.0), (0.5 + more, 0.88, 0.5))),
        row("static_depth", seed, points((12, 0.5, 1.0), (6, 0.87, 0.5))),
    ]


BOTH = [*rows(1), *rows(2, 0.02)]


def made() -> str:
    answer = {"answer": ["a", "b", "a", "b"], "right": [True, False, True, True], "cost": [0.3, 0.9, 0.4, 0.5]}
    answers = {each.key: answer for each in BOTH if each.name in ("full", "deebert")}
    texts = {"trec": {place: f"text <{place}>" for place in range(4)}}
    return page(SUITE, groups_of(BOTH), compared(BOTH, answers), texts)


def test_points_are_means_of_the_seeds_that_share_their_dials() -> None:
    two = [each for each in BOTH if each.name == "deebert"]
    low, high = cost_marks(two, "float32")
    assert (low[0], round(low[1], 6), round(high[1], 6)) == (0.4, 90.5, 91.0)
    assert "score 90.50 ± 1.41\ncost 0.400 ± 0.000\ndial 0.2" in low[2] and round(low[3], 2) == 1.41
    searched = [each for each in BOTH if each.name == "length_adaptive"]
    assert "±" not in cost_marks(searched, "float32")[0][2]  # each seed has found its own
    assert [mark[1] for mark in cost_marks([each for each in BOTH if each.name == "static_depth"], "float32")] == [87.0]


def test_the_table_has_means_and_int8() -> None:
    from stretto.bench.results import Results

    found = table(Results("made", BOTH, comparison=compared(BOTH, {})))
    assert "| deebert | 91.00 ± 1.41 | 90.50 ± 1.41 | 0.400 ± 0.000 | " in found
    assert "| deebert, int8 | 90.00 ± 1.41 | 89.50 ± 1.41 | 0.400 ± 0.000 | – | 4.00 / – / – / – |" in found
    assert "| huggingface | 91.00 ± 1.41 | – | 1.300 ± 0.000 | – | 0.50 / – / – / – |" in found


def test_every_row_has_its_own_look() -> None:
    looks = looks_of([*METHODS, *BASELINES, *(f"more-{n}" for n in range(10))])
    assert len({tuple(look.values()) for look in looks.values()}) == len(looks)
    assert all((looks[name]["colour"] == "#777") == (name in BASELINES) for name in looks)


@needs_chromium
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(made(), encoding="utf-8")
    problems: list[str] = []
    requested: list[str] = []
    with chromium_page() as opened:
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.on("request", lambda request: requested.append(request.url))
        opened.goto((tmp_path / "report.html").as_uri())
        titles = opened.locator(".plots figcaption").all_text_contents()
        times = [f"Score over time, {where}" for where in ("batch 1", "batch 8", "batch 32", "stream")]
        assert titles == [
            "Score over FLOPs", *times, "deebert: layers run (dial 0.2)", "deebert: tokens left at the end"
        ]  # fmt: skip
        first = opened.locator("figure").first
        first.locator("g[data-row=deebert] .mark").first.hover()
        assert opened.locator("#tip").inner_text().startswith("deebert\nscore 90.50 ± 1.41\ncost 0.400")
        assert opened.locator("#tip").is_visible()
        assert first.locator("g[data-row=deebert]").count() == 2  # float32 and int8
        assert first.locator("g[data-row=deebert] line").count() == 4  # their standard deviations
        opened.get_by_role("button", name="deebert").click()
        assert not first.locator("g[data-row=deebert]").first.is_visible()
        assert opened.locator("svg").evaluate_all(
            "all => all.every(svg => [...svg.querySelectorAll('text')].every(text => {"
            "const a = text.getBoundingClientRect(), b = svg.getBoundingClientRect();"
            "return a.left >= b.left - 1 && a.right <= b.right + 1 && a.bottom <= b.bottom + 1; }))"
        ), "a label is clipped"
        assert "text <1>" in opened.inner_text("body") and "91.00 ± 1.41" in opened.inner_text("body")
    assert problems == [] and len(requested) == 1
