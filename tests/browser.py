"""Pages in a real Chromium, the system's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()

needs_chromium = pytest.mark.skipif(
    not CHROMIUM.exists(), reason="THE PAGE WAS NOT TESTED: no /usr/bin/chromium (apt-get install chromium)"
)


@contextmanager
def chromium_page() -> Iterator[Any]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser.new_page()
        browser.close()
