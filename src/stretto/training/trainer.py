"""One stage of training: `transformers.Trainer`, and what it does not know of methods."""

from __future__ import annotations

from typing import Any

import torch
from transformers import EvalPrediction, Trainer

from stretto.budget.choose import saving
from stretto.budget.sweep import sweep
from stretto.data import Dataset
from stretto.data.tokenise import Encoded
from stretto.model import AdaptiveModel


class StageTrainer(Trainer):
    """`Trainer` with the method's own learning rates, the step told to the learner, and dev scores of the real thing.

    A stage that reads exits is scored by `Trainer` itself, on all answers it reads; any other one by a sweep on the
    packed engine, at the dials the stage names."""

    model: Any  # a Learner
    loss_is_scaled_for_ga = False

    def __init__(self, dev_data: Dataset, dev_encoded: Encoded, **settings: Any) -> None:
        super().__init__(**settings)
        self.dev_data, self.dev_encoded = dev_data, dev_encoded
        off = self.model.model.method.dial.off
        self.start_score = self.score((off,))[0] if self.model.stage.best_by == "saving" else 0.0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            learner, stage = self.model, self.model.stage
            decayed = set(self.get_decay_parameter_names(learner))
            rates = {f"model.method.{name}": rate for name, rate in stage.rates}
            by_rate: dict[tuple[float, bool], list[Any]] = {}
            for name, parameter in learner.named_parameters():
                if parameter.requires_grad:
                    special = next((rate for prefix, rate in rates.items() if name.startswith(prefix)), None)
                    usual = stage.learning_rate if name.startswith("model.encoder.") else stage.method_learning_rate
                    decay = name in decayed and special is None
                    by_rate.setdefault((usual if special is None else special, decay), []).append(parameter)
            groups = [
                {"params": parameters, "lr": rate, "weight_decay": self.args.weight_decay if decay else 0.0}
                for (rate, decay), parameters in by_rate.items()
            ]
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, learner)
            self.optimizer = kind(groups, **settings)
            if (after_step := stage.after_step) is not None:
                self.optimizer.register_step_post_hook(lambda *_: after_step())
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        learner, done, planned = self.model, self.state.global_step, self.state.max_steps
        learner.step, learner.epoch = done, learner.stage.epochs * done / planned if planned else 0.0
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        if self.model.stage.layers:
            return super().evaluate(*args, **named)
        method, stage = self.model.model.method, self.model.stage
        score, cost = self.score(stage.dials or (method.dial.off,))
        metrics = {"eval_score": score, "eval_cost": cost, "eval_saving": saving(score, cost, self.start_score)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def score(self, dials: tuple[float, ...]) -> tuple[float, float]:
        """Mean dev score and mean cost at these dials."""
        model = self.model.model.eval()
        points = sweep(model, self.dev_data, dials, progress=False, encoded=self.dev_encoded)
        return sum(p.score for p in points) / len(points), sum(p.cost for p in points) / len(points)


def mean_score(model: AdaptiveModel, encoded: Encoded, prediction: EvalPrediction) -> float:
    """The task's main metric, averaged over all answers a stage reads ([n, E + 1, C])."""
    task = model.task
    answers, labels = torch.as_tensor(prediction.predictions).unbind(dim=1), list(prediction.label_ids)
    scores = [task.scores(logits, encoded, labels)[task.main_metric] for logits in answers]
    return sum(scores) / len(scores)
