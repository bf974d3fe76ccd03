"""Training: the stages of a method, one after another, each a run of `transformers.Trainer`.

`train` is resumable. Its work folder (`OUTPUT.work`) keeps a checkpoint per epoch of the running stage and the end
result of each finished stage; started again with the same plan after a kill, it goes on from there to the same result.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from stretto.data import Dataset
from stretto.encoding import EncodedDataset, collate, encode
from stretto.errors import StrettoError
from stretto.evaluate import batches, cheapest_within, sweep
from stretto.methods.base import Pass, Stage
from stretto.model import AdaptiveModel
from stretto.recording import record
from stretto.state import Inputs
from stretto.view.progress import StageProgress

#: A frozen backbone's pooled states are kept in memory up to this size; beyond it they are computed at each step.
RECORDING_LIMIT_BYTES = 4e9

#: What we set differently from `TrainingArguments`; anything the caller names wins.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "warmup_steps": 0.06,
    "weight_decay": 0.01,
    "optim": "adamw_torch_fused",
    "train_sampling_strategy": "group_by_length",
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_strategy": "epoch",
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "report_to": "none",
    "seed": 42,
}


class Learner(nn.Module):
    """A model in one stage of its training: batches in, loss and answers out."""

    def __init__(self, model: AdaptiveModel, stage: Stage) -> None:
        super().__init__()
        self.model, self.stage = model, stage
        self.step = 0  # optimizer steps taken, told by the trainer
        for parameter in model.encoder.parameters():
            parameter.requires_grad_(stage.trains_backbone)

    def train(self, mode: bool = True) -> Learner:
        super().train(mode)
        if not self.stage.trains_backbone:
            self.model.encoder.eval()  # frozen means frozen: no dropout either
        return self

    def forward(
        self,
        labels: Tensor,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        pooled: Tensor | None = None,
        first: Tensor | None = None,
        example_id: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """From tokens, or from a recording of the frozen backbone (`pooled` [B, L - 1, d], `first` [B, d])."""
        exits, layers = self.model.method.exits, self.stage.layers
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.stage.trains_backbone):
            if pooled is None:
                assert input_ids is not None
                assert attention_mask is not None
                inputs = Inputs(input_ids, attention_mask, token_type_ids)
                states = self.model.reference.hidden_states(inputs, None if self.stage.final else max(layers))
                first = states[-1][torch.arange(len(labels), device=labels.device), attention_mask.argmax(dim=1)]
                read = [exits.pool_padded(states[layer], attention_mask) for layer in layers] if exits else []
            else:
                read = [pooled[:, layer - 1] for layer in layers]
            assert first is not None
            final = [self.model.backbone.classify(first)] if self.stage.final else []
        answers = [exits(layer, x) for layer, x in zip(layers, read, strict=True)] if exits else []
        logits = torch.stack(answers + final)  # [E + 1, B, C]
        seen = torch.stack(read) if read else first.new_zeros(0, *first.shape)
        loss = self.model.method.loss(self.stage, Pass(layers, logits, seen, self.step), labels)
        return {"loss": loss, "logits": logits.transpose(0, 1)}  # [B, E + 1, C], as Trainer gathers by row


class StageTrainer(Trainer):
    """`Trainer` with the method's own learning rate, and the step told to the learner."""

    model: Any  # a Learner
    loss_is_scaled_for_ga = False

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            learner, stage = self.model, self.model.stage
            decayed = set(self.get_decay_parameter_names(learner))
            groups = []
            for prefix, rate in (
                ("model.encoder.", stage.learning_rate),
                ("model.method.", stage.method_learning_rate),
            ):
                named = [(n, p) for n, p in learner.named_parameters() if n.startswith(prefix) and p.requires_grad]
                for decay in (True, False):
                    parameters = [p for n, p in named if (n in decayed) == decay]
                    if parameters:
                        weight_decay = self.args.weight_decay if decay else 0.0
                        groups.append({"params": parameters, "lr": rate, "weight_decay": weight_decay})
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, learner)
            self.optimizer = kind(groups, **settings)
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.model.step = self.state.global_step
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Recorded(torch.utils.data.Dataset[dict[str, Any]]):
    """The frozen backbone's states as training examples."""

    def __init__(self, pooled: Tensor, first: Tensor, labels: Tensor) -> None:
        self.pooled, self.first, self.labels = pooled, first, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pooled": self.pooled[index], "first": self.first[index], "labels": self.labels[index]}


def train(
    model: AdaptiveModel,
    train_data: Dataset,
    dev_data: Dataset,
    output: str | Path,
    *,
    skip: Sequence[str] = (),
    progress: bool = True,
    **arguments: Any,
) -> AdaptiveModel:
    """Train `model` through its method's stages, measure its operating points on `dev_data`, save it to `output`.

    `skip` names stages to leave out: 'backbone' if the encoder has already learned the task. `arguments` are
    `TrainingArguments` by their Hugging Face names and hold for every stage."""
    stages = model.method.stages()
    unknown = sorted(set(skip) - {stage.name for stage in stages})
    if unknown:
        raise StrettoError(
            f"Expected stages of {model.method.name} ({', '.join(stage.name for stage in stages)}) to skip, "
            f"got {', '.join(unknown)}. Name one of its stages."
        )
    stages = [stage for stage in stages if stage.name not in skip]
    work = Path(f"{output}.work")
    plan = Plan(model, stages, train_data, dev_data, arguments)
    plan.check(work)
    seed = plan.arguments["seed"]
    set_seed(seed)
    examples = {"train": plan.examples(train_data), "dev": plan.examples(dev_data)}
    for number, stage in enumerate(stages, start=1):
        if progress and is_main_process():
            tqdm.write(f"stage {number} of {len(stages)}: {stage.name}, {stage.epochs:g} epochs", file=sys.stderr)
        run_stage(model, stage, work / f"{number}-{stage.name}", examples, plan.arguments, progress)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if is_main_process():
        points = sweep(model, dev_data, progress=progress)
        model.operating_points = [point.to_json() for point in points]
        model.dial = cheapest_within(points).dial
        model.provenance = plan.provenance()
        model.save_pretrained(output)
        for finished in work.glob("[0-9]-*"):
            shutil.rmtree(finished)
        (work / "plan.json").unlink()
        if not any(work.iterdir()):
            work.rmdir()
    wait_for_all()
    return model


class Plan:
    """What is to be trained on what, and how: written down, so that a resumed run can be told from another one."""

    def __init__(
        self,
        model: AdaptiveModel,
        stages: list[Stage],
        train_data: Dataset,
        dev_data: Dataset,
        arguments: dict[str, Any],
    ) -> None:
        if train_data.labels is None or dev_data.labels is None:
            raise StrettoError("Expected labelled training and dev data, got unlabelled. Name the label column.")
        known = {field.name for field in dataclasses.fields(TrainingArguments)} - {"output_dir"}
        unknown = sorted(set(arguments) - known)
        if unknown:
            raise StrettoError(
                f"Expected names of transformers.TrainingArguments, got {', '.join(unknown)}. "
                "See the Hugging Face documentation for the list."
            )
        self.arguments = {**DEFAULTS, **arguments}
        self.model, self.stages = model, stages
        self.sizes = {"train": len(train_data), "dev": len(dev_data)}
        self.truncated = 0

    def examples(self, data: Dataset) -> EncodedDataset:
        encoded = encode(self.model.tokenizer, data.texts, self.model.max_length)
        self.truncated += encoded.truncated
        return EncodedDataset(encoded.features, data.labels)

    def written(self) -> dict[str, Any]:
        return {
            "method": self.model.method.name,
            "config": dataclasses.asdict(self.model.method.config),
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "arguments": self.arguments,
            "encoder": self.model.encoder.config.to_dict(),
            "examples": self.sizes,
            "labels": self.model.task.label_names,
        }

    def provenance(self) -> dict[str, Any]:
        """What the model card says of the training."""
        return {
            "stages": " → ".join(f"{stage.name} ({stage.epochs:g} epochs)" for stage in self.stages) or "none",
            "training examples": self.sizes["train"],
            "dev examples": self.sizes["dev"],
            "texts truncated": self.truncated,
            "seed": self.arguments["seed"],
            "operating points": "measured on the dev examples",
        }

    def check(self, work: Path) -> None:
        """Refuse to go on with the checkpoints of another plan."""
        path, text = work / "plan.json", json.dumps(self.written(), indent=2, default=str)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise StrettoError(
                f"Expected the unfinished training in '{work}' to follow the same plan, got other settings or data. "
                f"Delete '{work}' to start anew, or choose another output."
            )
        if is_main_process():
            work.mkdir(parents=True, exist_ok=True)
            unfinished = work / "plan.json.part"  # in one move: another process may be reading it
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)


def run_stage(
    model: AdaptiveModel,
    stage: Stage,
    folder: Path,
    examples: dict[str, EncodedDataset],
    arguments: dict[str, Any],
    progress: bool,
) -> None:
    """Train one stage, or load its end result if an earlier run finished it."""
    result = folder / "result.safetensors"
    if result.exists():
        model.load_state_dict(load_file(result))
        return
    learner = Learner(model, stage)
    datasets: dict[str, Any] = examples
    settings = {**arguments}
    recorded = not stage.trains_backbone and recording_fits(model, examples)
    if recorded:
        datasets = {name: record_examples(model, data, progress) for name, data in examples.items()}
        settings["train_sampling_strategy"] = "random"
    trainer = StageTrainer(
        model=learner,
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=stage.epochs,
            learning_rate=stage.learning_rate,
            metric_for_best_model=stage.best_by,
            greater_is_better=stage.best_by == "score",
            disable_tqdm=not progress,
            remove_unused_columns=False,
            use_cpu=model.encoder.device.type == "cpu",
            ddp_find_unused_parameters=True,
            **settings,
        ),
        train_dataset=datasets["train"],
        eval_dataset=datasets["dev"],
        data_collator=torch.utils.data.default_collate if recorded else collate(model.tokenizer.pad_token_id),
        compute_metrics=lambda prediction: {"score": mean_score(model, prediction)},
    )
    trainer.remove_callback(ProgressCallback if progress else PrinterCallback)
    if progress:
        trainer.add_callback(StageProgress)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    if is_main_process():
        partial = folder / "partial.safetensors"
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, partial)
        partial.rename(result)
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    wait_for_all()


def mean_score(model: AdaptiveModel, prediction: EvalPrediction) -> float:
    """The task's main metric, averaged over all answers a stage reads ([n, E + 1, C])."""
    answers = torch.as_tensor(prediction.predictions).unbind(dim=1)
    scores = [model.task.metrics(logits, prediction.label_ids)[model.task.main_metric] for logits in answers]
    return sum(scores) / len(scores)


def recording_fits(model: AdaptiveModel, examples: dict[str, EncodedDataset]) -> bool:
    per_example = 4 * model.backbone.d * model.backbone.n_layers
    return per_example * sum(map(len, examples.values())) <= RECORDING_LIMIT_BYTES


def record_examples(model: AdaptiveModel, data: EncodedDataset, progress: bool) -> Recorded:
    """Run the frozen backbone once over all examples."""
    assert model.method.exits is not None
    model.eval()
    pad = model.tokenizer.pad_token_id
    recording = record(model.packed, model.method.exits, batches(data.features, pad, 64, "reading" if progress else ""))
    dtype = torch.float32 if model.task.name == "regression" else torch.long
    return Recorded(recording.pooled.cpu(), recording.first.cpu(), torch.tensor(data.labels, dtype=dtype))


def is_main_process() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def wait_for_all() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
