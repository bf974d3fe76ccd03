"""The model card (README.md) of a saved folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.saving.folder import Folder
    from stretto.tasks import Task
    from stretto.training.pretraining import Summary


def model_card(folder: Folder, config: Any, task: Task) -> str:
    """Markdown with the metadata block the hub reads."""
    points = "\n".join(
        f"| {p['dial']:g} | {p['score']:.4f} | {p['cost']:.3f} | {p['depth']:.2f} |"
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


def pretraining_card(model: Any, summary: Summary) -> str:
    """The card of a folder with no task yet."""
    config = model.config
    return f"""---
library_name: stretto
tags: [stretto, {config.model_type}, fill-mask]
---

# {config.model_type}, pretrained with stretto

{config.num_hidden_layers} layers in {config.num_hidden_groups} groups, {config.hidden_size} wide, \
{summary.parameters:,} parameters, {summary.vocabulary:,} tokens in its vocabulary.

Masked language model of {summary.texts:,} texts ({summary.tokens:,} tokens), {summary.epochs:g} epochs, \
{summary.steps:,} steps, seed {summary.seed}. Perplexity of hidden words in {summary.held_out_texts:,} held-out texts: \
{summary.perplexity:.2f}.

```python
from stretto.backbones import register_architectures
from transformers import AutoModelForMaskedLM, AutoTokenizer

register_architectures()

model = AutoModelForMaskedLM.from_pretrained("this folder")
tokenizer = AutoTokenizer.from_pretrained("this folder")
```

`stretto train DATA --model "this folder" --output …` fine-tunes it.
"""
