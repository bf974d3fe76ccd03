"""Whether this processor really computes in bfloat16.

Some virtual machines announce AMX and then end the process at its first AMX instruction (SIGILL). oneDNN uses AMX for
every bfloat16 product where it is announced. So the first product is tried in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from stretto.errors import StrettoError

#: A product large enough for oneDNN to take its fastest kernel.
PROBE = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


@cache
def survives_bf16() -> bool:
    """Whether a process survives a bfloat16 product. Takes as long as importing torch."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode == 0


def check_bf16(device: str) -> None:
    """Refuse before the training is killed."""
    if device == "cpu" and not survives_bf16():
        raise StrettoError(
            "Expected a processor that computes in bfloat16, got one on which a bfloat16 product ends the process. "
            f"Set {WITHOUT_AMX} in the environment, or leave out bf16."
        )
