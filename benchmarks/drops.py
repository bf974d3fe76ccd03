"""Real results of the methods that drop tokens: score over cost, and what is left of it in wall-clock time.

    python benchmarks/drops.py DATA MODEL sst2            # one set, all its rows
    python benchmarks/drops.py DATA MODEL ag_news --only adapler

DATA is a folder with <set>.<split>.jsonl.gz, MODEL an encoder. Results go to
benchmarks/results/drops-<model>-<set>.json, each row as soon as it is done; a second start goes on where the first
stopped. Trained models go to --runs.

Fine-tuning is shared by all rows of a set, and so is training with LengthDrop by those that select tokens in another
way. `curves.py` says how dials are chosen.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from curves import Curves, CurveSet
from experiment import main

from stretto import AdaptiveModel
from stretto.budget.search import SearchSettings, search
from stretto.data import Dataset
from stretto.data.batches import batches
from stretto.data.tokenise import Encoded
from stretto.methods.saliency import saliency


@dataclass(frozen=True)
class DropSet(CurveSet):
    searched_on: int = 200
    """Dev examples the search measures its candidates on."""
    generations: int = 10
    """Iterations of the search, with twenty candidates each."""


#: One random sub-model a step instead of two, for more steps in the same time.
DROP = {"drop_epochs": 2, "drop_learning_rate": 5e-5, "random_models": 1}
#: As published: two.
DROP_TWO = {**DROP, "random_models": 2}
#: Long texts.
DROP_ONCE = {**DROP, "drop_epochs": 1}
#: A few hundred steps instead of many thousands: the thresholds must move faster than published, and the weights need
#: more steps than that to get used to them, which are cheap on the tokens that are left.
ADAPTIVE = {
    "adaptive_epochs": 3, "threshold_learning_rate": 1e-2, "retrain_epochs": 8, "retrain_learning_rate": 5e-5,
}  # fmt: skip
SETS = {
    "sst2": DropSet(
        "sst2_sentence.train", "sst2_sentence.dev", "sst2_sentence.test", 2, bf16=False,
        rows={
            "length_adaptive": DROP_TWO, "constant_ratio": DROP_TWO,
            "constant_ratio-random": {**DROP_TWO, "select": "random"},
            "constant_ratio-saliency": {**DROP_TWO, "select": "saliency"},
            "adapler": {"gamma": 5e-3, "phi": 5e-4, **ADAPTIVE},
            "power_bert": {},
        },
        searched_on=300, generations=20,
    ),
    "ag_news": DropSet(
        "ag_news.train", None, "ag_news.test", 2, limit=4000, test_limit=2000, chosen_on=1000, accumulate=2,
        rows={"adapler": {"gamma": 1e-1, "phi": 1e-1, **ADAPTIVE}, "length_adaptive": DROP_ONCE},
        generations=5,
    ),
    "imdb": DropSet(
        "imdb.train", None, "imdb.test", 2, limit=2000, test_limit=1000, chosen_on=1000, max_length=256, accumulate=4,
        rows={
            "adapler": {"gamma": 5e-3, "phi": 5e-4, **ADAPTIVE, "adaptive_epochs": 2, "retrain_epochs": 4},
            "length_adaptive": DROP_ONCE,
        },
        searched_on=150, generations=5,
    ),
    "mrpc": DropSet(
        "glue_mrpc.train", "glue_mrpc.dev", "glue_mrpc.test", 3,
        rows={
            # with thresholds as fast as elsewhere too little was left of the pairs, and of the score
            "adapler": {
                "gamma": 3e-2, "phi": 5e-2, "adaptive_epochs": 2, "threshold_learning_rate": 1e-3, "retrain_epochs": 1,
            },
            "length_adaptive": DROP,
        },
    ),
    "wnut17": DropSet(
        "wnut17.train", "wnut17.dev", "wnut17.test", 4, task="tokens", rows={"length_adaptive": DROP},
    ),
    "squad": DropSet(
        "squad11_sub.train", None, "squad11_sub.dev", 2, task="span", limit=2000, test_limit=500, max_length=256,
        accumulate=4, rows={"length_adaptive": DROP_ONCE}, searched_on=100, generations=5,
    ),
}  # fmt: skip

#: Rows that use the model of another one: its tokens are selected in another way.
BORROWED = dict.fromkeys(("constant_ratio", "constant_ratio-random", "constant_ratio-saliency"), "length_adaptive")


class Drops(Curves):
    kind = "drops"
    spec: DropSet

    def open(self, key: str) -> AdaptiveModel:
        """Trained now, loaded, or that of another row with other settings."""
        if key in BORROWED:
            return AdaptiveModel.from_pretrained(self.runs / BORROWED[key], key.split("-")[0], **self.spec.rows[key])
        return super().open(key)

    def prepare(self, key: str, model: AdaptiveModel) -> None:
        if key == "length_adaptive" and "search" not in self.rows:
            self.write("search", self.searched(model))

    def searched(self, model: AdaptiveModel) -> dict[str, Any]:
        """Search on dev data; the frontier goes to the model folder."""
        settings = SearchSettings(
            limit=self.spec.searched_on, iterations=self.spec.generations, mutations=10, crossovers=10
        )
        found = search(model, self.dev, self.runs / "length_adaptive", settings, progress=False)
        return {
            "examples": found.examples,
            "area": [iteration.area for iteration in found.iterations],
            "tried": [iteration.tried for iteration in found.iterations],
        }

    def encoded(self, model: AdaptiveModel, data: Dataset) -> Encoded:
        """The features; for a selection by saliency with that of each token, of the right answer in the full model."""
        encoded = super().encoded(model, data)
        if getattr(model.method.config, "select", None) != "saliency":
            return encoded
        labels, size, features = torch.tensor(data.labels), 32, []
        for start in range(0, len(encoded.features), size):
            part = encoded.features[start : start + size]
            (inputs,) = batches(part, model.tokenizer.pad_token_id, size)
            scores = saliency(model.reference, model.task, inputs, labels[start : start + size]).tolist()
            features += [
                {**feature, "saliency": row[: len(feature["input_ids"])]}
                for feature, row in zip(part, scores, strict=True)
            ]
        return dataclasses.replace(encoded, features=features)

    def has_time(self, key: str) -> bool:
        return key != "constant_ratio-saliency"  # it takes a gradient first: no method to time


if __name__ == "__main__":
    main(Drops, SETS, __doc__)
