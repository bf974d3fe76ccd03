"""Real results of ALBERTa's own architecture: an encoder pretrained here, fine-tuned with its gates.

    stretto pretrain DATA/imdb_unsup.sub20k.jsonl.gz runs/pretraining/alberta --vocab-size 8000
    python benchmarks/pretraining.py DATA runs/pretraining/alberta sst2 imdb

MODEL is a folder that `stretto pretrain` made; benchmarks/README.md has the commands of the ablations. Results go to
benchmarks/results/pretraining-<folder>-<set>.json, each row as soon as it is done; a second start goes on where the
first stopped. The row `full` is the same encoder fine-tuned without gates. `curves.py` says how dials are chosen.
"""

from __future__ import annotations

import json
from pathlib import Path

from curves import Curves, CurveSet
from experiment import main

from stretto import AdaptiveModel
from stretto.pretraining import SUMMARY

GATES = {"alberta": {"gate_epochs": 4}}
SETS = {
    "sst2": CurveSet("sst2_sentence.train", "sst2_sentence.dev", "sst2_sentence.test", 4, bf16=False, rows=GATES),
    "imdb": CurveSet(
        "imdb.train", None, "imdb.test", 4, limit=4000, test_limit=2000, chosen_on=1000, bf16=False, rows=GATES
    ),
}


class Pretrained(Curves):
    kind = "pretraining"

    def run(self, only: list[str]) -> None:
        self.write("pretraining", json.loads((Path(self.encoder) / SUMMARY).read_text(encoding="utf-8")))
        super().run(only)

    def open(self, key: str) -> AdaptiveModel:
        """From the encoder and the gates it learned with, not from the model fine-tuned without."""
        return self.fit(key, self.encoder, (), self.spec.rows[key])


if __name__ == "__main__":
    main(Pretrained, SETS, __doc__)
