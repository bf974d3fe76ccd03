"""The processes of a torchrun. Light: the command line asks before torch is loaded."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Whether this process does the talking and the writing (torchrun numbers its processes)."""
    return os.environ.get("RANK", "0") == "0"


def wait_for_all() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
