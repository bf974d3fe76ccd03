"""Real results of the exit methods: score at cost ≤ 0.75, 0.5, 0.35 and what is left of it in wall-clock time.

    python benchmarks/exits.py DATA MODEL trec            # one set, all methods
    python benchmarks/exits.py DATA MODEL sst2 --only deebert

DATA is a folder with <set>.<split>.jsonl.gz, MODEL an encoder. Results go to
benchmarks/results/exits-<model>-<set>.json, each method's row as soon as it is done; a second start goes on where the
first stopped. Trained models go to --runs.

The first stage (fine-tuning) is shared by all methods, the second (exits on the frozen backbone) by those that have it
(lte goes through it once more, for its predictor); shallow_deep takes PABEE's model: their training objectives are the
same. The dial for a budget is chosen by cost alone, never by score.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from experiment import Experiment, Set, Timed, main

from stretto import AdaptiveModel, sweep
from stretto.budget.choose import within_cost
from stretto.methods import METHODS
from stretto.saving.points import OperatingPoint

BUDGETS = (0.75, 0.5, 0.35)
NOT_METHODS = ("full", "about", "clock")

SETS = {
    "sst2": Set("sst2_sentence.train", "sst2_sentence.dev", "sst2_sentence.test", 2),
    "trec": Set("trec.train", None, "trec.test", 3),
    "mrpc": Set("glue_mrpc.train", "glue_mrpc.dev", "glue_mrpc.test", 3),
    "stsb": Set("glue_stsb.train", "glue_stsb.dev", "glue_stsb.test", 3, task="regression"),
}

#: method -> (whose model it starts from, stages already done there, its settings)
JOINT = {"joint_epochs": 0.5}
RECIPES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "deebert": ("full", ("backbone",), {}),
    "deebert-cls": ("full", ("backbone",), {"pool": "cls"}),  # as published
    "halting": ("deebert", ("backbone", "exits"), {}),
    "pabee": ("deebert", ("backbone", "exits"), JOINT),
    "shallow_deep": ("pabee", ("backbone", "exits", "joint"), JOINT),
    "branchynet": ("deebert", ("backbone", "exits"), JOINT),
    "lte": ("deebert", ("backbone",), JOINT),
}


def static_recipes(n_layers: int) -> dict[str, tuple[str, tuple[str, ...], dict[str, Any]]]:
    """Static depth is another model for every depth: the deepest within the middle budget."""
    k = (n_layers - 1) // 2
    return {f"static_depth-{k}": ("deebert", ("backbone", "exits"), {"depth": k, "shallow_epochs": 1})}


class Exits(Experiment):
    kind = "exits"

    def run(self, only: list[str]) -> None:
        full = self.fit("full", self.encoder, (), {"num_train_epochs": self.spec.epochs})
        if "full" not in self.rows:
            self.write("full", [point.to_json() for point in sweep(full, self.test, progress=False)])
        recipes = {**RECIPES, **static_recipes(full.backbone.n_layers)}
        for key, (start, skip, settings) in recipes.items():
            method = METHODS[key.split("-")[0]]
            wanted = not only or key.split("-")[0] in only
            if not wanted or key in self.rows or not method.needs.met_by(self.task):
                continue
            if start == "deebert" and not METHODS["deebert"].needs.met_by(self.task):
                start, skip = "full", ("backbone",)  # no DeeBERT for regression: the method trains its exits itself
            if key == "pabee" and self.task.name == "regression":
                settings = {**settings, "tolerance": 0.2}  # of a similarity between 0 and 5
            model = self.fit(key, str(self.runs / start), skip, settings)
            points = sweep(model, self.test, progress=False)
            self.write(key, self.row(points))
            print(self.name, key, json.dumps(self.rows[key]["budgets"]), flush=True)

    def row(self, points: list[OperatingPoint]) -> dict[str, Any]:
        chosen = {str(budget): within_cost(points, budget) for budget in BUDGETS}
        return {
            "budgets": {budget: point.to_json() for budget, point in chosen.items() if point is not None},
            "sweep": [point.to_json() for point in points],
        }

    def timed(self) -> Iterator[Timed]:
        """Every method at every budget."""
        for key in self.rows:
            if key not in NOT_METHODS:
                model = AdaptiveModel.from_pretrained(self.runs / key)
                for budget, point in self.rows[key]["budgets"].items():
                    yield Timed(key, budget, model, point["dial"])


if __name__ == "__main__":
    main(Exits, SETS, __doc__)
