"""Real results of ALBERTa's own architecture: an encoder pretrained here, fine-tuned with its gates.

    python benchmarks/pretraining.py DATA runs/pretraining/alberta sst2 imdb

The encoder is a folder that `stretto pretrain` made; benchmarks/README.md has the commands, those of the ablations
too. Results go to benchmarks/results/pretraining-<folder>-<set>.json, each set as soon as it is done. `curves.py` says
how dials are chosen; a loss is counted from the same model without early exit (dial 0), and so is time.
"""

from __future__ import annotations

import json
from pathlib import Path

from curves import Curves, CurveSet
from experiment import Timed, main

from stretto import AdaptiveModel
from stretto.methods.alberta import GATED
from stretto.saving.points import OperatingPoint
from stretto.training.pretraining import SUMMARY

ROW = "alberta"
EPOCHS = 3
DIALS = {ROW: (GATED, 0.3, 0.5, 0.7, 0.9, 0.95)}
SETS = {
    "sst2": CurveSet(
        "sst2_sentence.train", "sst2_sentence.dev", "sst2_sentence.test", EPOCHS, bf16=False,
        rows={ROW: {"gate_epochs": EPOCHS}}, dials=DIALS,
    ),
    "imdb": CurveSet(
        "imdb.train", None, "imdb.test", EPOCHS, limit=2222, test_limit=1000, chosen_on=1000, bf16=False,
        rows={ROW: {"gate_epochs": EPOCHS}}, dials=DIALS,
    ),
}  # fmt: skip


class Pretrained(Curves):
    kind = "pretraining"

    def run(self, only: list[str]) -> None:
        self.write("pretraining", json.loads((Path(self.encoder) / SUMMARY).read_text(encoding="utf-8")))
        if ROW not in self.rows and (not only or ROW in only):
            self.write(ROW, self.row(self.open(ROW)))
            print(self.name, ROW, json.dumps(self.rows[ROW]["chosen"]), flush=True)

    def open(self, key: str) -> AdaptiveModel:
        """From the encoder and the gates it learned with."""
        return self.fit(key, self.encoder, (), self.spec.rows[key])

    def score_of_all_layers(self, dev: list[OperatingPoint]) -> float:
        return next(point.score for point in dev if point.dial == GATED)

    def whole(self) -> Timed:
        return Timed("full", "", self.open(ROW), GATED)


if __name__ == "__main__":
    main(Pretrained, SETS, __doc__)
