"""Training: the stages of a method, one after another, each a run of `transformers.Trainer`.

`train` is resumable. Its work folder (`OUTPUT.work`) keeps a checkpoint per epoch of the running stage and the end
result of each finished stage. Started again with the same plan after a kill, it resumes there and ends with the same
result.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainingArguments, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from stretto.backbones import Backbone
from stretto.budget.default import set_default
from stretto.budget.frontier import TEXTS, set_frontier
from stretto.budget.teacher import Teacher
from stretto.data import Dataset, sample
from stretto.data.tokenise import Encoded, EncodedDataset, collate
from stretto.engine.decider import Decider
from stretto.errors import StrettoError
from stretto.methods import Combined
from stretto.methods.base import Stage
from stretto.model import AdaptiveModel
from stretto.saving.files import write_errors, write_tensors
from stretto.saving.folder import check_place
from stretto.saving.place import locked
from stretto.training.bfloat16 import check_bf16
from stretto.training.frozen import record_examples, recording_fits
from stretto.training.learner import Learner
from stretto.training.material import BATCH, Material
from stretto.training.notes import BEST, LabelledBatches, above_beneath, with_notes
from stretto.training.plan import PLAN, Plan
from stretto.training.processes import is_main_process, wait_for_all
from stretto.training.progress import StageProgress
from stretto.training.trainer import StageTrainer, mean_score

LOGS = "TENSORBOARD_LOGGING_DIR"


def train(
    model: AdaptiveModel,
    train_data: Dataset,
    dev_data: Dataset,
    output: str | Path,
    *,
    skip: str | Sequence[str] = (),
    unlabelled: Dataset | None = None,
    attention_dropout: float | None = None,
    guarantee: bool = True,
    progress: bool = True,
    **arguments: Any,
) -> AdaptiveModel:
    """Train `model` through its method's stages, measure its operating points on `dev_data`, save it to `output`.

    `skip` names the stage or stages to leave out: 'backbone' if the encoder has already learned the task. On
    `unlabelled` texts, all stages after the fine-tuning learn the answers of the full model. `attention_dropout`
    replaces the encoder's own in training; on a CPU, 0 makes steps on long texts faster. `guarantee` keeps a part of
    the dev data, if there are enough, for a default dial with a guarantee (see `stretto.budget.default`). `arguments`
    are `TrainingArguments` by their Hugging Face names, for every stage."""
    skipped = [skip] if isinstance(skip, str) else skip
    with locked(output, main=is_main_process()), dropout_in_attention(model.backbone, attention_dropout):
        return train_stages(
            model, train_data, dev_data, unlabelled, Path(output), skipped, guarantee, progress, arguments
        )


def train_stages(
    model: AdaptiveModel,
    train_data: Dataset,
    dev_data: Dataset,
    unlabelled: Dataset | None,
    output: Path,
    skip: Sequence[str],
    guarantee: bool,
    progress: bool,
    arguments: dict[str, Any],
) -> AdaptiveModel:
    stages = model.method.stages()
    unknown = sorted(set(skip) - {stage.name for stage in stages})
    if unknown:
        raise StrettoError(
            f"Expected stages of {model.method.name} ({', '.join(stage.name for stage in stages)}) to skip, "
            f"got {', '.join(unknown)}. Name one of its stages."
        )
    stages = [stage for stage in stages if stage.name not in skip]
    if unlabelled is not None and model.task.answers == "text":
        raise StrettoError(
            f"Expected a task whose answers have probabilities, to learn from texts without labels, got "
            f"{model.task.name}. Leave them out."
        )
    if unlabelled is not None and not any(stage.taught or not stage.needs_labels for stage in stages):
        raise StrettoError(
            f"Expected a method with a stage that can learn from texts without labels, got {model.method.name}: "
            "none follows the fine-tuning. Leave them out, or let one follow (exits: --joint-start finetuned)."
        )
    check_place(output)
    if arguments.get("bf16"):
        check_bf16(model.encoder.device.type)
    work = Path(f"{output}.work")
    model.task.learn_from(train_data)
    plan = Plan(model, stages, train_data, dev_data, unlabelled, arguments, guarantee=guarantee)
    encoded = {"train": plan.encode(train_data), "dev": plan.encode(plan.choosing)}
    if plan.fresh is not None:
        plan.encode(plan.fresh)
    material = Material(model, encoded["train"], unlabelled, work, progress)
    plan.check(work)  # inputs that cannot be encoded leave no plan behind
    for number, stage in enumerate(stages, start=1):
        if progress and is_main_process():
            tqdm.write(f"stage {number} of {len(stages)}: {stage.name}, {stage.epochs:g} epochs", file=sys.stderr)
        if stage.taught and any(each.best_by == "saving" for each in stages):
            material.full_score(plan.choosing, encoded["dev"])  # before the model becomes another one
        folder = f"{number}-{stage.name}"
        with logs_in(Path(os.environ.get(LOGS, f"{output}.logs")) / folder):
            run_stage(model, stage, work / folder, encoded, material, plan.choosing, plan.arguments, progress)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if isinstance(model.method, Combined):
        set_frontier(model, plan.choosing, seed=plan.arguments["seed"], progress=progress)
    if is_main_process():
        set_default(model, dev_data, plan.fresh, seed=plan.arguments["seed"], progress=progress)
        model.provenance = {**plan.provenance(), **model.method.found()}
        model.save_pretrained(output)
        for finished in work.glob("[0-9]-*"):
            shutil.rmtree(finished)
        material.remove()
        (work / PLAN).unlink()
        if not any(work.iterdir()):
            work.rmdir()
    wait_for_all()
    return model


@contextmanager
def logs_in(folder: Path) -> Iterator[None]:
    """Where TensorBoard's logs go (`report_to`), a folder per stage; the work folder goes in the end, logs stay."""
    before = os.environ.get(LOGS)
    os.environ[LOGS] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOGS]
        else:
            os.environ[LOGS] = before


@contextmanager
def dropout_in_attention(backbone: Backbone, probability: float | None) -> Iterator[None]:
    """Set the dropout of attention weights inside (None: unchanged)."""
    if probability is not None and not 0 <= probability < 1:
        raise StrettoError(f"Expected an attention_dropout from 0 to below 1, got {probability}. Try 0 or 0.1.")
    modules = [spec.attention.dropout for spec in backbone.specs]
    before = [module.p for module in modules]
    try:
        for module in modules:
            module.p = module.p if probability is None else float(probability)
        yield
    finally:
        for module, p in zip(modules, before, strict=True):
            module.p = p


@contextmanager
def unfused_where_dropped(backbone: Backbone) -> Iterator[None]:
    """Inside, attention with dropout is plain products on a CPU: torch's fused kernel has no dropout there, and what
    stands in for it is slower than they are."""
    encoder = backbone.model
    before = encoder.config._attn_implementation
    if encoder.device.type == "cpu" and backbone.specs[0].attention.dropout.p > 0:
        encoder.set_attn_implementation("eager")
    try:
        yield
    finally:
        encoder.set_attn_implementation(before)


def last_checkpoint(folder: Path) -> str | None:
    """The last complete checkpoint: a kill may leave an incomplete one. `Trainer` writes its state last."""
    whole = [state.parent for state in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*/trainer_state.json")]
    return str(max(whole, key=lambda checkpoint: int(checkpoint.name.rpartition("-")[2]))) if whole else None


def run_stage(
    model: AdaptiveModel,
    stage: Stage,
    folder: Path,
    encoded: dict[str, Encoded],
    material: Material,
    dev_data: Dataset,
    arguments: dict[str, Any],
    progress: bool,
) -> None:
    """Train one stage, or load its end result if an earlier run finished it."""
    result = folder / "result.safetensors"
    if result.exists():
        model.load_state_dict(load_file(result))
        return
    whole, model = model, model.acting(stage.method)
    set_seed(arguments["seed"])  # whether the stages before ran in this process or in one that was killed
    learner = Learner(model, stage)
    dev = EncodedDataset(encoded["dev"].features, encoded["dev"].labels)
    examples = {"train": material.examples(stage), "dev": dev}
    datasets: dict[str, Any] = {**examples, "train": with_notes(model, stage, examples["train"], folder, progress)}
    if stage.choose is not None:
        stage.choose(distance_on(model.eval(), sample(dev_data, TEXTS, arguments["seed"])))
    settings = {**arguments}
    if stage.best_by == "last":
        settings["load_best_model_at_end"] = False
    if stage.keeps_best > 1:
        settings["save_total_limit"] = None
    recorded = not stage.trains_backbone and not stage.decides and recording_fits(model, examples)
    if recorded:
        datasets = {name: record_examples(model, data, stage.beneath, progress) for name, data in datasets.items()}
        settings["train_sampling_strategy"] = "random"
    trainer = StageTrainer(
        dev_data,
        encoded["dev"],
        material.full_score(dev_data, encoded["dev"]) if stage.best_by == "saving" else 0.0,
        model=learner,
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=stage.epochs,
            learning_rate=stage.learning_rate,
            metric_for_best_model=None if stage.best_by == "last" else stage.best_by,
            greater_is_better=stage.best_by != "loss",
            disable_tqdm=not progress,
            remove_unused_columns=False,
            use_cpu=model.encoder.device.type == "cpu",
            ddp_find_unused_parameters=True,
            **settings,
        ),
        train_dataset=datasets["train"],
        eval_dataset=datasets["dev"],
        data_collator=torch.utils.data.default_collate if recorded else collate(model.tokenizer.pad_token_id),
        compute_metrics=lambda prediction: {"score": mean_score(model, encoded["dev"], prediction)},
    )
    trainer.remove_callback(ProgressCallback if progress else PrinterCallback)
    if progress:
        trainer.add_callback(StageProgress)
    with unfused_where_dropped(model.backbone), write_errors(folder):  # checkpoints
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    if stage.keeps_best > 1 and is_main_process():
        keep_best(trainer, folder, stage.keeps_best)
    model.eval()
    if stage.finish is not None:
        shown = f"finishing {stage.name}" if progress else ""
        above_beneath(stage, stage.finish)(
            model.reference, LabelledBatches(examples["train"], model.tokenizer.pad_token_id, shown)
        )
    if is_main_process():
        write_tensors(result, whole.state_dict())
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    wait_for_all()


def distance_on(model: AdaptiveModel, data: Dataset) -> Callable[[Decider], float]:
    """A function that runs these texts with a decider: their mean divergence from the full model's answers."""
    encoded = model.encode(data.texts)
    teacher = Teacher(model, encoded)

    def distance(decider: Decider) -> float:
        logits, _ = model.run_features(encoded.features, model.method.dial.off, BATCH, decider=decider)
        return float(teacher.divergence(logits).mean())

    return distance


def keep_best(trainer: StageTrainer, folder: Path, count: int) -> None:
    """Keep the weights of the best checkpoints as best-1.safetensors, best-2.safetensors, …"""
    scores = {entry["step"]: entry["eval_score"] for entry in trainer.state.log_history if "eval_score" in entry}
    saved = {step: folder / f"{PREFIX_CHECKPOINT_DIR}-{step}" / "model.safetensors" for step in scores}
    ranked = sorted((step for step in scores if saved[step].exists()), key=lambda step: (-scores[step], step))
    for place, step in enumerate(ranked[:count], start=1):
        weights = load_file(saved[step])
        write_tensors(folder / BEST.format(place), {name.removeprefix("model."): v for name, v in weights.items()})
