"""What a training run shows while it runs: a bar, and a line per epoch."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback


class StageProgress(ProgressCallback):
    """The bars of Hugging Face, with its logs as readable lines on stderr."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and self.training_bar is not None:
            line = log_line(logs)
            if line:
                tqdm.write(line, file=sys.stderr)


def log_line(logs: dict[str, Any]) -> str:
    """Losses and scores; the final summary, rates and timings are left out."""
    names = {
        "loss": "loss", "eval_loss": "dev loss", "eval_score": "dev score", "eval_perplexity": "dev perplexity",
    }  # fmt: skip
    parts = [f"{names[name]} {float(logs[name]):.4f}" for name in names if name in logs]
    return f"  epoch {float(logs.get('epoch', 0)):.3g}: {', '.join(parts)}" if parts else ""
