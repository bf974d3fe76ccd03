"""The processes of torchrun. Light: the command line uses it before torch is loaded."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Whether this process prints and writes (torchrun numbers its processes)."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
