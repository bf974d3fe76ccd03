"""The server's page in a real Chromium, with the keyboard, and with nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium_page, needs_chromium
from playwright.sync_api import expect
from serving import serving
from tiny import tiny_model

from stretto.deploy.server import Settings, create_app
from stretto.saving.points import OperatingPoint

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    model = tiny_model("length_adaptive")
    model.dial = model.method.dial.sweep[-1]
    model.operating_points = [
        OperatingPoint(dial, 0.9 - 0.01 * i, dial, 4.0, {"accuracy": 0.9}, name="quick" if i == 15 else "")
        for i, dial in enumerate(model.method.dial.sweep)
    ]
    with serving(create_app({"reviews": model}, Settings(api_key="secret-key"))) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture
def page() -> Iterator[Any]:
    with chromium_page() as opened:
        yield opened


def test_the_page_shows_answers_tokens_and_points(address: str, page: Any) -> None:
    requested: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    page.goto(address)

    page.get_by_label("API key").press_sequentially("secret-key")  # it is asked for, and Enter sends it
    page.keyboard.press("Enter")
    page.wait_for_selector(".card .took b")
    assert page.locator(".card").count() == 2, "two texts side by side"

    page.keyboard.press("Alt+n")  # a third one, and the keyboard is in it
    page.keyboard.type("this film was very dull and not a good story")
    third = page.locator(".card").nth(2)
    third.locator(".bar").first.wait_for()
    assert third.locator(".bar span").all_text_contents() in (["bad", "good"], ["good", "bad"])
    shares = [float(text) for text in third.locator(".bar b").all_text_contents()]
    assert sum(shares) == pytest.approx(1.0, abs=0.002) and shares[0] >= shares[1]
    assert third.locator(".layers i.run").count() == 4
    gone = third.locator(".tokens .gone")
    assert gone.count() > 0, "some tokens were dropped"
    faded = float(gone.first.evaluate("token => getComputedStyle(token).opacity"))
    kept = float(third.locator(".tokens span:not(.gone)").first.evaluate("token => getComputedStyle(token).opacity"))
    assert faded < kept == 1.0

    slider = page.get_by_label("Operating point", exact=True).last
    assert "budget quick" in page.locator("#point").inner_text()
    slider.focus()
    page.keyboard.press("Home")  # the full model
    assert "score 0.900" in page.locator("#point").inner_text() and "cost 100 %" in page.locator("#point").inner_text()
    expect(gone).to_have_count(0)

    expect(page.locator("#total")).to_contain_text("answers")
    assert page.locator("#histogram div").count() == 4
    third.locator(".remove").click()
    assert page.locator(".card").count() == 2
    assert not problems
    assert all(url.startswith(address) for url in requested), "nothing comes from elsewhere"


def test_texts_are_never_markup(address: str, page: Any) -> None:
    page.goto(address)
    page.get_by_label("API key").press_sequentially("secret-key")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card .took b")
    page.locator("textarea").first.fill("a <img src=x onerror=alert(1)> film")
    expect(page.locator(".card .tokens").first).to_contain_text("img")
    assert page.locator(".card img").count() == 0
