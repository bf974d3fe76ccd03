"""The model card (README.md) of a saved folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.errors import counted
from stretto.methods import METHODS
from stretto.saving.points import promise, promise_at

if TYPE_CHECKING:
    from stretto.saving.folder import Folder
    from stretto.saving.points import OperatingPoint
    from stretto.tasks import Task


def model_card(folder: Folder, config: Any, task: Task) -> str:
    """Markdown with the metadata block the hub reads."""
    measured = [point for point in folder.points if not point.name]
    points = "\n".join(
        f"| {p.dial:g} | {p.score:.4f} | {p.cost:.3f} | {p.depth:.2f} |"
        for p in measured[:: max(len(measured) // 10, 1)]
    )
    table = (
        f"| dial | {task.main_metric} | cost | depth |\n|---|---|---|---|\n{points}"
        if points
        else "No operating points have been measured yet."
    )
    # The dial of some methods depends on the model; a method of somebody's own need not be in the registry.
    dial = getattr(METHODS[folder.method], "dial", None) if folder.method in METHODS else None
    dtype = next((point.dtype for point in folder.points if point.dial == folder.dial), "float32")
    promised = promise_at(folder.points, folder.dial, dtype, off=dial.off if dial else None)
    promised += "" if dtype == "float32" else f", in {dtype}"
    budgets = budget_table([point for point in folder.points if point.name])
    provenance = "\n".join(f"- {name}: {value}" for name, value in folder.provenance.items()) or "- not recorded"
    return f"""---
library_name: stretto
pipeline_tag: {task.pipeline_tag}
tags: [adaptive-computation, {folder.method}]
---

# {config.model_type} with {folder.method}

A {task.name} model ({counted(config.num_hidden_layers, "layer")}, hidden size {config.hidden_size}) that spends only \
the computation each input needs. Its answers: {task.outputs}.

```python
from stretto import AdaptiveModel

model = AdaptiveModel.from_pretrained("this-folder")
print(model.predict({task.example}))
```

The folder is also a plain Hugging Face model: `{task.auto_class}.from_pretrained` loads the full model from it
and ignores what stretto adds.

## Operating points

Default dial: {folder.dial:g} ({promised}). Cost is the fraction of the full model's FLOPs, deciders included.

{table}

{budgets}## How it was made

{provenance}
"""


def budget_table(budgets: list[OperatingPoint]) -> str:
    """The named points and what they promise; nothing if there are none."""
    if not budgets:
        return ""
    rows = "\n".join(f"| {p.name} | {p.dtype} | {p.dial:g} | {p.cost:.3f} | {promise(p)} |" for p in budgets)
    return (
        "## Budgets\n\n`model.predict(texts, budget=NAME)`, `stretto predict --budget NAME`.\n\n"
        f"| budget | dtype | dial | cost | promise |\n|---|---|---|---|---|\n{rows}\n\n"
    )
