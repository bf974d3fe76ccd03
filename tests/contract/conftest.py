"""In the contract tests `patchwork` is one of the backbones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from patchwork import Patchwork

from stretto.backbones import BACKBONES


@pytest.fixture(autouse=True, scope="module")
def with_patchwork() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES.entries, "patchwork", Patchwork)
        yield
