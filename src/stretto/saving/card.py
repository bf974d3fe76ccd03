"""The model card (README.md) of a saved folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.saving.folder import Folder
    from stretto.tasks import Task


def model_card(folder: Folder, config: Any, task: Task) -> str:
    """Markdown with the metadata block the hub reads."""
    points = "\n".join(
        f"| {p.dial:g} | {p.score:.4f} | {p.cost:.3f} | {p.depth:.2f} |"
        for p in folder.points[:: max(len(folder.points) // 10, 1)]
    )
    table = (
        f"| dial | {task.main_metric} | cost | depth |\n|---|---|---|---|\n{points}"
        if points
        else "No operating points have been measured yet."
    )
    provenance = "\n".join(f"- {name}: {value}" for name, value in folder.provenance.items()) or "- not recorded"
    return f"""---
library_name: stretto
pipeline_tag: {task.pipeline_tag}
tags: [adaptive-computation, {folder.method}]
---

# {config.model_type} with {folder.method}

A {task.name} model ({config.num_hidden_layers} layers, hidden size {config.hidden_size}) that spends only the
computation each input needs. Its answers: {task.outputs}.

```python
from stretto import AdaptiveModel

model = AdaptiveModel.from_pretrained("this-folder")
print(model.predict({task.example}))
```

The folder is also a plain Hugging Face model: `{task.auto_class}.from_pretrained` loads the full model from it
and ignores what stretto adds.

## Operating points

Default dial: {folder.dial:g}. Cost is the fraction of the full model's FLOPs, deciders included.

{table}

## How it was made

{provenance}
"""
