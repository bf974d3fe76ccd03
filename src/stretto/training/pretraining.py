"""Masked-LM pretraining of our own architectures on plain text.

`pretrain` is resumable, as `stretto.training.train` is: checkpoints are in `OUTPUT.work` until the end, and a run
started again with the same plan resumes from the last one and ends with the same result.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    EvalPrediction,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from stretto.backbones.alberta import Alberta
from stretto.backbones.alberta_config import AlbertaConfig
from stretto.backbones.alberta_model import AlbertaForMaskedLM
from stretto.backbones.heads import EveryRow, Head
from stretto.data import Dataset
from stretto.data.tokenise import IGNORED, collate
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError, counted
from stretto.methods import METHODS, Method, Shape
from stretto.methods.alberta import GATED
from stretto.model import make_config
from stretto.saving.digests import dataset_digest
from stretto.saving.files import replacing_folder, write_errors, write_json, write_text
from stretto.saving.folder import Folder, quiet_transformers, write_method
from stretto.saving.place import locked
from stretto.saving.same_run import digest, hold_to
from stretto.saving.versions import versions
from stretto.state import Inputs
from stretto.tasks import task_from_config
from stretto.training.bfloat16 import check_bf16
from stretto.training.masking import HiddenWords, Order, Vocabulary, Window, cut
from stretto.training.plan import PLAN, check_names
from stretto.training.processes import is_main_process, wait_for_all
from stretto.training.progress import StageProgress
from stretto.training.run import LOGS, last_checkpoint, logs_in

#: Guessing blindly among a million tokens has a loss of 14.
MOST_LOSS = 100.0

#: Written last into the folder of a finished pretraining: its settings and its perplexity.
SUMMARY = "pretraining.json"

#: What we set differently from `TrainingArguments`; anything the caller names wins.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "num_train_epochs": 10,
    "learning_rate": 1e-3,
    "warmup_steps": 0.06,
    "weight_decay": 0.01,
    "optim": "adamw_torch_fused",
    "eval_strategy": "steps",
    "eval_steps": 0.1,
    "save_strategy": "steps",
    "save_steps": 0.05,
    "logging_steps": 0.05,
    "save_total_limit": 1,
    "report_to": "none",
    "seed": 42,
}


@dataclass(frozen=True)
class Summary:
    """The result of a pretraining."""

    perplexity: float
    """exp of the mean loss of the masked tokens of the held-out texts."""
    loss: float
    texts: int
    held_out_texts: int
    windows: int
    tokens: int
    """Of the training texts, special tokens included."""
    steps: int
    epochs: float
    parameters: int
    vocabulary: int
    seed: int


def pretrain(
    model: AlbertaForMaskedLM,
    tokenizer: Any,
    train_data: Dataset,
    held_out: Dataset,
    output: str | Path,
    *,
    gates: Method | None = None,
    progress: bool = True,
    **arguments: Any,
) -> Summary:
    """Train `model` to predict masked words of `train_data`, measure it on `held_out`, save it to `output`.

    Long texts are split into windows of the model's maximum length. `gates` (see `make_gates`) are trained and saved
    with it. `arguments` are `TrainingArguments` by their Hugging Face names."""
    check_names(arguments)
    output = Path(output)  # "out/" and "out" are one
    with locked(output, main=is_main_process()):
        return run_pretraining(model, tokenizer, train_data, held_out, output, gates, progress, arguments)


def run_pretraining(
    model: AlbertaForMaskedLM,
    tokenizer: Any,
    train_data: Dataset,
    held_out: Dataset,
    output: Path,
    gates: Method | None,
    progress: bool,
    arguments: dict[str, Any],
) -> Summary:
    settings, work = {**DEFAULTS, **arguments}, Path(f"{output}.work")
    check_tokenizer(model, tokenizer)
    seed, longest = settings["seed"], model.config.max_position_embeddings
    vocabulary = Vocabulary.of(tokenizer)
    windows = {name: windows_of(data, tokenizer, longest, name) for name, data in
               (("train", train_data), ("held-out", held_out))}  # fmt: skip
    plan = {
        "model": model.config.to_dict(),
        "gates": None if gates is None else asdict(gates.config),
        "tokenizer": crc32(tokenizer.backend_tokenizer.to_str().encode()),
        "arguments": settings,
        "digests": {"train": dataset_digest(train_data), "held_out": dataset_digest(held_out)},
    }
    hold_to(work / PLAN, plan, what="the unfinished training", place=work, write=is_main_process())
    plan_name = digest(plan)  # before training changes the model's config
    set_seed(seed)
    if settings.get("bf16"):
        check_bf16(model.device.type)
    with logs_in(Path(os.environ.get(LOGS, f"{output}.logs"))):
        trainer = PretrainingTrainer(
            model=Learner(model, gates),
            args=TrainingArguments(
                output_dir=str(work),
                disable_tqdm=not progress,
                remove_unused_columns=False,
                label_names=["labels"],
                use_cpu=model.device.type == "cpu",
                **settings,
            ),
            train_dataset=HiddenWords(windows["train"], vocabulary, seed),
            eval_dataset=HiddenWords(windows["held-out"], vocabulary, seed),
            data_collator=collate(tokenizer.pad_token_id),
            compute_metrics=perplexity,
        )
        trainer.remove_callback(ProgressCallback if progress else PrinterCallback)
        if progress:
            trainer.add_callback(StageProgress)
        with write_errors(work):  # checkpoints
            trainer.train(resume_from_checkpoint=last_checkpoint(work))
        measured = trainer.evaluate()
    summary = Summary(
        perplexity=measured["eval_perplexity"],
        loss=math.log(measured["eval_perplexity"]),
        texts=len(train_data),
        held_out_texts=len(held_out),
        windows=len(windows["train"]),
        tokens=sum(len(window.ids) for window in windows["train"]),
        steps=trainer.state.global_step,
        epochs=round(float(trainer.state.epoch or 0), 4),
        parameters=model.num_parameters(),
        vocabulary=len(tokenizer),
        seed=seed,
    )
    if is_main_process():
        save(model.eval(), tokenizer, gates, summary, output, plan_name)
        shutil.rmtree(work)
    wait_for_all()
    return summary


def make_gates(config: AlbertaConfig, **settings: Any) -> Method:
    """The method `alberta` as published: the first group always runs, the gates of the others start evenly spaced, and
    nothing but the loss moves them.

    `settings` are those of the method. They are saved as the defaults of fine-tuning: gates from the beginning, and
    a higher learning rate than for large encoders."""
    n_layers = config.num_hidden_layers
    first_group = sum(config.group_of(layer) == 0 for layer in range(n_layers))
    static_layers = settings.get("static_layers") or (first_group if config.num_hidden_groups > 1 else 0)
    n_adaptive = n_layers - (static_layers or n_layers // 3)
    even = 1 / max(n_adaptive, 2) if settings.get("revpc", True) else 0.5
    given = {
        "num_train_epochs": 0, "gate_learning_rate": 3e-4, "depth_penalty": 0.0, "pool": "cls", "exit_loss": "drawn",
        "exit_share": 0.0,
        **settings, "static_layers": static_layers, "initial_gate": settings.get("initial_gate", even),
    }  # fmt: skip
    method, task = METHODS["alberta"], task_from_config(config)  # gates are the same for any task
    return method(make_config(method, given), Shape(config.hidden_size, n_layers, task.num_labels), task)


def check_tokenizer(model: AlbertaForMaskedLM, tokenizer: Any) -> None:
    if len(tokenizer) != model.config.vocab_size or tokenizer.pad_token_id != model.config.pad_token_id:
        raise StrettoError(
            f"Expected a model for the tokenizer's {len(tokenizer)} tokens with padding {tokenizer.pad_token_id}, got "
            f"one for {model.config.vocab_size} with {model.config.pad_token_id}. Set vocab_size and pad_token_id."
        )


def windows_of(data: Dataset, tokenizer: Any, max_length: int, part: str) -> list[Window]:
    specials = tokenizer.num_special_tokens_to_add()
    if max_length < specials + 2:
        raise StrettoError(
            f"Expected a maximum length above the {specials} special tokens and a word or two, got {max_length}. "
            "Raise --max-length."
        )
    windows = list(cut(tokenizer, [text for texts in data.texts for text in texts], max_length))
    if not windows:
        raise StrettoError(
            f"Expected {part} texts of two words or more, got none among {len(data)}. "
            "Check the file, or hold out more texts with --held-out."
        )
    return windows


class Learner(nn.Module):
    """The model for `transformers.Trainer`. Logits are computed for masked tokens only: in a small model with a large
    vocabulary they are most of the work."""

    def __init__(self, model: AlbertaForMaskedLM, gates: Method | None = None) -> None:
        super().__init__()
        self.model, self.gates = model, gates
        self.engine = ReferenceEngine(Headless(model))
        self.register_state_dict_post_hook(untie)

    def forward(self, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """[B, T] each -> the mean loss, and for each sequence the sum of its losses and their number: [B, 2]."""
        hidden = labels != IGNORED
        logits = self.model.lm_head(self.encode(**inputs)[hidden])  # [hidden tokens, vocabulary]
        losses = F.cross_entropy(logits, labels[hidden], reduction="none")
        sums = losses.new_zeros(len(labels)).index_add(0, hidden.nonzero()[:, 0], losses)
        return {"loss": losses.mean(), "logits": torch.stack([sums, hidden.sum(dim=1)], dim=1)}

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, T] each, padded on the right -> [B, T, d], as the head reads it."""
        if self.gates is None:
            return self.model.alberta(input_ids, attention_mask).last_hidden_state
        return self.engine.run(Inputs(input_ids, attention_mask, None), self.gates, GATED).logits


class Headless(Alberta):
    """The encoder alone, which returns the state of every token."""

    def __init__(self, model: AlbertaForMaskedLM) -> None:
        super().__init__(model)
        self.n_labels = self.d

    def make_head(self) -> Head:
        return EveryRow(nn.Identity())


def untie(learner: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """safetensors refuses to write one tensor under two names: the second one gets a copy."""
    assert isinstance(learner, Learner)
    for name in learner.model.all_tied_weights_keys:
        state[f"{prefix}model.{name}"] = state[f"{prefix}model.{name}"].clone()


class PretrainingTrainer(Trainer):
    """`Trainer` with an order of its own, which depends on the seed and the epoch alone."""

    train_dataset: HiddenWords
    loss_is_scaled_for_ga = False

    def _get_train_sampler(self, train_dataset: Any = None) -> Order:
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return Order(self.train_dataset.windows, batch, self.args.seed, lambda: int(self.state.epoch or 0))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def perplexity(prediction: EvalPrediction) -> dict[str, float]:
    """From the sums and counts of all sequences ([n, 2])."""
    total, count = torch.as_tensor(prediction.predictions).double().sum(dim=0).tolist()
    loss = total / count
    if not loss < MOST_LOSS:
        raise StrettoError(
            f"Expected a loss on masked words of at most {MOST_LOSS:g}, got {loss:g}: training has "
            "diverged. Lower --learning-rate, or raise --warmup-steps."
        )
    return {"perplexity": math.exp(loss)}


def save(
    model: AlbertaForMaskedLM, tokenizer: Any, gates: Method | None, summary: Summary, path: Path, plan: str
) -> None:
    """Write a Hugging Face folder with its summary, and the gates for fine-tuning, in one step."""
    with replacing_folder(path) as temporary:
        tokenizer.model_max_length = model.config.max_position_embeddings
        with quiet_transformers():
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        if gates is not None:
            how = {"pretraining": f"{summary.texts} texts, {summary.epochs:g} epochs"}
            write_method(temporary, Folder(gates.name, asdict(gates.config), GATED, [], how), gates)
        written = {**asdict(summary), "plan": plan, "versions": versions()}
        write_json(temporary / SUMMARY, written)
        write_text(temporary / "README.md", pretraining_card(model, summary))


def pretraining_card(model: Any, summary: Summary) -> str:
    """The model card of a folder without a task."""
    config = model.config
    return f"""---
library_name: stretto
tags: [stretto, {config.model_type}, fill-mask]
---

# {config.model_type}, pretrained with stretto

{counted(config.num_hidden_layers, "layer")} in {counted(config.num_hidden_groups, "group")}, \
{config.hidden_size} wide, {summary.parameters:,} parameters, {summary.vocabulary:,} tokens in its vocabulary.

Masked language model of {summary.texts:,} texts ({summary.tokens:,} tokens), {summary.epochs:g} epochs, \
{summary.steps:,} steps, seed {summary.seed}. Perplexity of masked words in {summary.held_out_texts:,} held-out texts: \
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
