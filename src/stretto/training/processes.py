"""The processes of a torchrun."""

from __future__ import annotations

import torch


def is_main_process() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def wait_for_all() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
