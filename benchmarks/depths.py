"""Real results of the methods that give tokens or texts a depth: score over cost, and what is left of it in time.

    python benchmarks/depths.py DATA MODEL trec                    # one set, all its rows
    python benchmarks/depths.py DATA MODEL trec --seed 43          # once more, with another seed
    python benchmarks/depths.py DATA MODEL imdb --only depth_mi

DATA is a folder with <set>.<split>.jsonl.gz, MODEL an encoder. Results go to
benchmarks/results/depths-<model>-<set>[-seed<n>].json, each row as soon as it is done; a second start goes on where
the first stopped. Trained models go to --runs.

Fine-tuning is shared by all rows of a set. `curves.py` says how dials are chosen; besides, each row is reported at the
dials of `REPORTED`, where the papers measure (larger sets at some of them, `DIALS`), and where it was trained. The rows
`depth_mi-<n>` and `full-<n>` are those of the encoder's first n layers, fine-tuned by themselves, with the first seed
only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from curves import Curves, CurveSet
from experiment import DEFAULT_SEED, Timed, main
from transformers import AutoModel, AutoTokenizer

from stretto import AdaptiveModel, sweep
from stretto.data import Dataset
from stretto.data.batches import batches

#: method -> the dials its paper reports: the depths of the table; λ from none to much; an even chance of enough layers.
REPORTED: dict[str, tuple[float, ...]] = {
    "depth_mi": (1.0,),
    "depth_reconstruction": (0.001, 0.05, 0.1, 0.15, 0.2),
    "token_halting": (0.5,),
    "alberta": (0.0, 0.5, 0.9),
}
#: Two epochs at the depths instead of three, one of everything before: they start from a fine-tuned model.
WORDS: dict[str, dict[str, Any]] = {
    "depth_mi": {"depth_epochs": 2},
    "token_halting": {"anytime_epochs": 1, "depth_epochs": 2},
    "depth_reconstruction": {"reconstruction_epochs": 1, "depth_epochs": 2},
}
#: Long texts: the model's own head, which need not be learned anew from a few thousand texts; for what takes longest,
#: fewer epochs (long texts have more words to learn from) and a table of fewer texts (each is read seven times).
LONG: dict[str, dict[str, Any]] = {
    "depth_mi": {"head": "model", "depth_learning_rate": 5e-5, "depth_epochs": 2, "training_strength": 1.25},
    "token_halting": {"anytime_epochs": 0.5, "depth_epochs": 0.5},
    "depth_reconstruction": {
        "head": "model",
        "depth_learning_rate": 5e-5,
        "reconstruction_epochs": 0.25,
        "depth_epochs": 0.5,
        "table_texts": 200,
    },
}
#: Half of the encoder, which little is left to be saved of.
SHALLOW: dict[str, dict[str, Any]] = {"full-6": {}, "depth_mi-6": {**LONG["depth_mi"], "training_strength": 0.5}}
#: As by default.
GATES: dict[str, dict[str, Any]] = {"alberta": {}}
#: The loss of tags is small, most of them being no entity: beside it the usual penalty closes all gates.
TOKEN_GATES: dict[str, dict[str, Any]] = {"alberta": {"depth_penalty": 0.002}}
#: Larger sets are measured, and reported, at fewer dials.
DIALS = {
    "depth_mi": (0.0, 0.5, 0.8, 1.0, 1.1, 1.25),
    "token_halting": (1.0, 0.9, 0.7, 0.5, 0.3),
    "depth_reconstruction": (0.0, 0.001, 0.05, 0.1, 0.2),
    "alberta": (-1.0, 0.0, 0.3, 0.5, 0.7, 0.9, 0.95),
}
#: Long texts at still fewer.
LONG_DIALS = {
    "depth_mi": (0.0, 0.5, 0.8, 1.0, 1.25),
    "token_halting": (1.0, 0.9, 0.7, 0.5),
    "depth_reconstruction": (0.0, 0.05, 0.1, 0.2),
}
FIRST_LAYERS = (1, 2, 4, 6, 8, 10)
SETS = {
    "trec": CurveSet(
        "trec.train", None, "trec.test", 3,
        rows={
            **WORDS, **GATES,
            **{f"{row}-{n}": WORDS.get(row, {}) for n in FIRST_LAYERS for row in ("full", "depth_mi")},
        },
    ),
    "sst2": CurveSet(
        "sst2_sentence.train", "sst2_sentence.dev", "sst2_sentence.test", 2, rows=WORDS | GATES, dials=DIALS,
    ),
    "mr": CurveSet("mr.all", None, None, 2, rows=WORDS, dials=DIALS),
    "imdb": CurveSet(
        "imdb.train", None, "imdb.test", 2, limit=3333, test_limit=1000, chosen_on=1000, max_length=256, accumulate=2,
        attention_dropout=0.0, rows=LONG | SHALLOW, dials=LONG_DIALS, timed=32, rounds=3,
    ),
    "mrpc": CurveSet("glue_mrpc.train", "glue_mrpc.dev", "glue_mrpc.test", 3, rows=GATES, dials=DIALS),
    "wnut17": CurveSet(
        "wnut17.train", "wnut17.dev", "wnut17.test", 8, task="tokens", rows=TOKEN_GATES, dials=DIALS,
    ),
}  # fmt: skip


class Depths(Curves):
    kind = "depths"
    batch_sizes = (1, 8, 15, 32)  # 15 is the largest of the paper

    def __init__(self, data: Path, encoder: str, name: str, spec: CurveSet, runs: Path, seed: int) -> None:
        if seed != DEFAULT_SEED:  # the first layers alone are measured once
            spec = replace(spec, rows={key: settings for key, settings in spec.rows.items() if "-" not in key})
        super().__init__(data, encoder, name, spec, runs, seed)

    def open(self, key: str) -> AdaptiveModel:
        method, _, layers = key.partition("-")
        if not layers:
            return super().open(key)
        if method == "full":
            return self.fit(key, self.first_layers(int(layers)), (), {"num_train_epochs": self.spec.epochs})
        self.open(f"full-{layers}")  # is there from now on, if it was not
        return self.fit(key, str(self.runs / f"full-{layers}"), ("backbone",), self.spec.rows[key])

    def first_layers(self, count: int) -> str:
        """A folder with the encoder's first `count` layers."""
        folder = self.runs / f"encoder-{count}"
        if not folder.exists():
            encoder = AutoModel.from_pretrained(self.encoder, num_hidden_layers=count, dtype=torch.float32)
            encoder.save_pretrained(folder)
            AutoTokenizer.from_pretrained(self.encoder).save_pretrained(folder)
        return str(folder)

    def row(self, model: AdaptiveModel) -> dict[str, Any]:
        row = super().row(model)
        swept = {point["dial"]: point for point in row["test"]}
        reported = {}
        method = model.method.name
        trained = getattr(model.method.config, "training_strength", None)
        for dial in dict.fromkeys(REPORTED.get(method, ()) + (() if trained is None else (trained,))):
            if method not in self.spec.dials or dial in self.spec.dials[method]:
                point = swept.get(dial) or sweep(model, self.test, [dial], progress=False)[0].to_json()
                reported[f"{dial:g}"] = {**point, "token_depth": token_depth(model, self.test, dial)}
        return {**row, "reported": reported}

    def timed(self) -> Iterator[Timed]:
        """Besides, every dial reported. Models with fewer layers are not compared with the full one."""
        yield from super().timed()
        for key, row in self.rows.items():
            if key in REPORTED:
                model = self.open(key)
                for dial, point in row["reported"].items():
                    yield Timed(key, f"dial {dial}", model, point["dial"])

    def has_time(self, key: str) -> bool:
        return key in REPORTED


def token_depth(model: AdaptiveModel, data: Dataset, dial: float) -> float:
    """Layers that an average token is updated in."""
    layers = tokens = 0
    for inputs in batches(model.encode(data.texts).features, model.tokenizer.pad_token_id, 32):
        trace = model.packed.run(inputs, model.method, dial).trace
        layers += int(trace.n_ffn.sum())
        tokens += int(trace.lengths.sum())
    return layers / tokens


if __name__ == "__main__":
    main(Depths, SETS, __doc__)
