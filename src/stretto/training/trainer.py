"""One stage of training: `transformers.Trainer`, extended for methods."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from transformers import EvalPrediction, Trainer

from stretto.budget.choose import saving
from stretto.budget.sweep import sweep
from stretto.data import Dataset
from stretto.data.tokenise import Encoded
from stretto.model import AdaptiveModel

#: No learning rate is raised above this.
FASTEST = 0.02


class StageTrainer(Trainer):
    """`Trainer` with the method's own learning rates, the step passed to the learner, and dev scores of real decisions.

    A stage that reads exits is scored by `Trainer` itself, on all answers it reads; any other one by a sweep on the
    packed engine, at the dials the stage names."""

    model: Any  # a Learner
    loss_is_scaled_for_ga = False

    def __init__(self, dev_data: Dataset, dev_encoded: Encoded, full_score: float, **settings: Any) -> None:
        """`full_score`: the full model's on the dev data, which the rule "saving" compares with."""
        super().__init__(**settings)
        self.dev_data, self.dev_encoded, self.full_score = dev_data, dev_encoded, full_score

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            learner, stage = self.model, self.model.stage
            decayed = set(self.get_decay_parameter_names(learner))
            least = rate_to_reach(stage.reach, self.state.max_steps)
            rates = {f"model.method.{name}": max(rate, least) for name, rate in stage.rates}
            grouped: dict[tuple[float, bool, bool], list[Any]] = {}
            for name, parameter in learner.named_parameters():
                if parameter.requires_grad:
                    special = next((rate for prefix, rate in rates.items() if name.startswith(prefix)), None)
                    usual = stage.learning_rate if name.startswith("model.encoder.") else stage.method_learning_rate
                    apart = special is not None
                    key = (usual if special is None else special, name in decayed and not apart, apart)
                    grouped.setdefault(key, []).append(parameter)
            groups = [
                {"params": each, "lr": rate, "weight_decay": self.args.weight_decay if decay else 0.0, "apart": apart}
                for (rate, decay, apart), each in grouped.items()
            ]
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, learner)
            self.optimizer = kind(groups, **settings)
            if (after_step := stage.after_step) is not None:
                self.optimizer.register_step_post_hook(lambda *_: after_step())
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the gradients of parameters with a learning rate of their own apart from all others: both objectives
        of AdapLeR have their own scale."""
        if not self.model.stage.rates:
            return super()._clip_grad_norm(model)
        assert self.optimizer is not None
        self.accelerator.unscale_gradients()
        norms = []
        for apart in (False, True):
            groups = [group["params"] for group in self.optimizer.param_groups if group["apart"] == apart]
            norms.append(torch.nn.utils.clip_grad_norm_(chain.from_iterable(groups), self.args.max_grad_norm))
        return norms[0]  # that of the weights is logged

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
        metrics = {"eval_score": score, "eval_cost": cost, "eval_saving": saving(score, cost, self.full_score)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def score(self, dials: tuple[float, ...]) -> tuple[float, float]:
        """Mean dev score and mean cost at these dials."""
        model = self.model.model.eval()
        points = sweep(model, self.dev_data, dials, progress=False, encoded=self.dev_encoded)
        return sum(p.score for p in points) / len(points), sum(p.cost for p in points) / len(points)


def rate_to_reach(distance: float, steps: int) -> float:
    """The learning rate with which a parameter can move that far: Adam moves it by at most the rate in each step, and
    the rate decays linearly."""
    return min(2 * distance / steps, FASTEST) if steps else 0.0


def mean_score(model: AdaptiveModel, encoded: Encoded, prediction: EvalPrediction) -> float:
    """The task's main metric, averaged over all answers a stage reads ([n, E + 1, C])."""
    task = model.task
    answers, labels = torch.as_tensor(prediction.predictions).unbind(dim=1), list(prediction.label_ids)
    scores = [task.scores(logits, encoded, labels)[task.main_metric] for logits in answers]
    return sum(scores) / len(scores)
