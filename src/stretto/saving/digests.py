"""Numbers and hashes that differ for other weights or other data."""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from stretto.data import Dataset


def weights_digest(module: nn.Module) -> int:
    """A number that differs for other weights."""
    number = 0
    for name, tensor in sorted(module.state_dict().items()):
        number = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), zlib.crc32(name.encode(), number))
    return number


def dataset_digest(data: Dataset) -> str:
    """The first 16 digits of a SHA-256 over texts and labels, in their order."""
    found = hashlib.sha256()
    for each in zip(data.texts, data.labels or [None] * len(data), strict=True):
        found.update(repr(each).encode("utf-8", "surrogatepass"))
    return found.hexdigest()[:16]
