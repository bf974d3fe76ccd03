"""Keep oneDNN from AMX, which ends the process on some virtual machines (`stretto.training.bfloat16`).

To be imported before torch; processes that tests start inherit it."""

import os

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
