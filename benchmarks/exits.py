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

import argparse
import json
import os
import platform
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from stretto import AdaptiveModel, __version__, sweep, train
from stretto.bench.baselines import hugging_face, padded_flops
from stretto.bench.model import packed_contender
from stretto.bench.timing import Contender, interleaved
from stretto.data import Dataset, load, split_off
from stretto.encoding import encode
from stretto.evaluate import OperatingPoint, batches, within_budget
from stretto.methods import METHODS
from stretto.tasks import Classification, Regression

BUDGETS = (0.75, 0.5, 0.35)
NOT_METHODS = ("full", "about", "clock")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Task:
    train: str
    dev: str | None  # None: a tenth of train
    test: str
    epochs: float
    regression: bool = False


SETS = {
    "sst2": Task("sst2_sentence.train", "sst2_sentence.dev", "sst2_sentence.test", 2),
    "trec": Task("trec.train", None, "trec.test", 3),
    "mrpc": Task("glue_mrpc.train", "glue_mrpc.dev", "glue_mrpc.test", 3),
    "stsb": Task("glue_stsb.train", "glue_stsb.dev", "glue_stsb.test", 1, regression=True),
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
    return {f"static_depth-{k}": ("full", ("backbone",), {"depth": k, "shallow_epochs": 1})}


class Experiment:
    """One set, one encoder: a folder of trained models and a JSON of rows."""

    def __init__(self, data: Path, encoder: str, name: str, runs: Path, seed: int) -> None:
        self.encoder, self.name, self.spec, self.seed = encoder, name, SETS[name], seed
        self.runs = runs / f"{Path(encoder).name}-{name}"
        self.json = RESULTS / f"exits-{Path(encoder).name}-{name}.json"
        self.rows: dict[str, Any] = json.loads(self.json.read_text()) if self.json.exists() else {}

        def part(split: str, names: list[str] | None = None) -> Dataset:
            task = "regression" if self.spec.regression else "classification"
            return load(str(data / f"{split}.jsonl.gz"), task=task, label_names=names)

        self.train = part(self.spec.train)
        names = self.train.label_names
        if self.spec.dev is None:
            self.train, self.dev = split_off(self.train, 0.1, seed)
        else:
            self.dev = part(self.spec.dev, names)
        self.test = part(self.spec.test, names)
        self.task = Regression() if self.spec.regression else Classification(names or [])

    def write(self, key: str, value: Any) -> None:
        self.rows[key] = value
        self.rows["about"] = {
            "set": self.name,
            "encoder": Path(self.encoder).name,
            "main_metric": self.task.main_metric,
            "test_examples": len(self.test),
            "seed": self.seed,
            "stretto": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "command": f"python benchmarks/exits.py DATA {Path(self.encoder).name} {self.name}",
        }
        temporary = self.json.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.rows, indent=1) + "\n")
        os.replace(temporary, self.json)

    def fit(self, key: str, start: str, skip: tuple[str, ...], settings: dict[str, Any]) -> AdaptiveModel:
        """Train (or load) the model of one row."""
        folder = self.runs / key
        if not folder.exists():
            task = self.task if key == "full" else None
            torch.manual_seed(self.seed)
            model = AdaptiveModel.from_pretrained(start, key.split("-")[0], task=task, **settings)
            train(model, self.train, self.dev, folder, skip=skip, progress=False, seed=self.seed)
        return AdaptiveModel.from_pretrained(folder)

    def run(self, only: list[str]) -> None:
        full = self.fit("full", self.encoder, (), {"num_train_epochs": self.spec.epochs})
        if "full" not in self.rows:
            self.write("full", [point.to_json() for point in sweep(full, self.test, progress=False)])
        recipes = {**RECIPES, **static_recipes(full.backbone.n_layers)}
        for key, (start, skip, settings) in recipes.items():
            method = METHODS[key.split("-")[0]]
            wanted = not only or key.split("-")[0] in only
            if not wanted or key in self.rows or self.task.name not in method.tasks:
                continue
            if start == "deebert" and self.task.name not in METHODS["deebert"].tasks:
                start, skip = "full", ("backbone",)  # no DeeBERT for regression: the method trains its exits itself
            if key == "pabee" and self.spec.regression:
                settings = {**settings, "tolerance": 0.2}  # of a similarity between 0 and 5
            model = self.fit(key, str(self.runs / start), skip, settings)
            points = sweep(model, self.test, progress=False)
            self.write(key, self.row(points))
            print(self.name, key, json.dumps(self.rows[key]["budgets"]), flush=True)

    def row(self, points: list[OperatingPoint]) -> dict[str, Any]:
        chosen = {str(budget): within_budget(points, budget) for budget in BUDGETS}
        return {
            "budgets": {budget: point.to_json() for budget, point in chosen.items() if point is not None},
            "sweep": [point.to_json() for point in points],
        }

    def clock(self, sequences: int = 64, rounds: int = 3) -> None:
        """Wall-clock of every method at every budget against the full model, packed and as Hugging Face runs it."""
        full = AdaptiveModel.from_pretrained(self.runs / "full")
        sample = random.Random(self.seed).sample(self.test.texts, sequences)
        features = encode(full.tokenizer, sample, full.max_length).features
        models = {key: AdaptiveModel.from_pretrained(self.runs / key) for key in self.rows if key not in NOT_METHODS}
        found: dict[str, Any] = {}
        for size in (1, 8, 32):
            pool = list(batches(features, full.tokenizer.pad_token_id, size))
            contenders = [
                Contender(
                    "huggingface", "float32", hugging_face(full.encoder, pool), padded_flops(pool, full.backbone)
                ),
                packed_contender("full", full, full.method, full.method.dial.off, pool),
            ]
            for key, model in models.items():
                for budget, point in self.rows[key]["budgets"].items():
                    contenders.append(packed_contender(f"{key} {budget}", model, model.method, point["dial"], pool))
            timed = {result.contender.name: result for result in interleaved(contenders, rounds, random.Random(size))}
            reference, plain = timed.pop("full"), timed.pop("huggingface")
            found.setdefault("full", {})[str(size)] = {"time_gain_vs_huggingface": plain.median / reference.median}
            for name, result in timed.items():
                key, budget = name.rsplit(" ", 1)
                gain = reference.contender.flops / result.contender.flops
                cell = {
                    "flops_gain": gain,
                    "time_gain": reference.median / result.median,
                    "time_gain_vs_huggingface": plain.median / result.median,
                    "tracking": reference.median / result.median / gain,
                }
                found.setdefault(key, {}).setdefault(budget, {})[str(size)] = cell
        self.write("clock", {"sequences": sequences, "rounds": rounds, "methods": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model")
    parser.add_argument("sets", nargs="+", choices=SETS)
    parser.add_argument("--only", nargs="*", default=[], choices=list(METHODS), help="methods to run (default: all)")
    parser.add_argument("--no-clock", action="store_true", help="leave out the wall-clock part")
    parser.add_argument("--only-clock", action="store_true", help="measure what has been trained")
    parser.add_argument("--runs", type=Path, default=Path("runs/exits"), help="where trained models are kept")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.sets:
        experiment = Experiment(arguments.data, arguments.model, name, arguments.runs, arguments.seed)
        if not arguments.only_clock:
            experiment.run(arguments.only)
        if not arguments.no_clock:
            experiment.clock()


if __name__ == "__main__":
    main()
