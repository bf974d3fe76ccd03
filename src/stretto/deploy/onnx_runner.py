"""Run exported graphs with ONNX Runtime. This file needs numpy and onnxruntime only.

It implements the contract of docs/exporting.md, and is short enough to be ported to another language.
Arrays are [B, T]: B sequences, T columns of tokens, padded on the right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CONTRACT = "stretto-onnx.json"


class OnnxModel:
    """A folder written by `stretto export`."""

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        """`threads` of ONNX Runtime; 0: as it chooses."""
        import onnxruntime

        self.folder = Path(folder)
        self.contract: dict[str, Any] = json.loads((self.folder / CONTRACT).read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.sessions = [
            onnxruntime.InferenceSession(str(self.folder / graph["file"]), options, providers=["CPUExecutionProvider"])
            for graph in self.contract["graphs"]
        ]

    def run(
        self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None, dial: float | None = None
    ) -> tuple[Any, Any]:
        """[B, C] logits ([B, T, C] where every token is answered) and [B] the depth of each sequence."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        feed = {name: np.asarray(value, np.int64) for name, value in given.items() if value is not None}
        feed.setdefault("token_type_ids", np.zeros_like(feed["input_ids"]))
        count = len(feed["input_ids"])
        if self.contract["form"] == "whole":
            (logits,) = self._call(0, feed)[:1]
            return logits, np.full(count, self.contract["graphs"][0]["last"])
        dials = self.contract["dial"] if dial is None else dial
        feed["dial"] = np.broadcast_to(np.asarray(dials, np.float64), (count,))
        answers, depths = np.zeros((count, self.contract["n_labels"]), np.float32), np.zeros(count, np.int64)
        who = np.arange(count)  # the sequences that have not left
        for stage in range(len(self.sessions)):
            names = self.contract["graphs"][stage]["outputs"]
            out = dict(zip(names, self._call(stage, feed), strict=True))
            left = out["depth"] > 0
            answers[who[left]], depths[who[left]] = out["logits"][left], out["depth"][left]
            if left.all():
                break
            stay = ~left
            who = who[stay]
            # the inputs of the next stage: the rows of sequences that stay, without columns that are padding in all
            carried = {name.removeprefix("next_"): value for name, value in out.items() if name.startswith("next_")}
            feed = {name: value[stay] for name, value in {**feed, **carried}.items()}
            longest = int(feed["attention_mask"].sum(axis=1).max())
            feed["hidden"], feed["attention_mask"] = feed["hidden"][:, :longest], feed["attention_mask"][:, :longest]
        return answers, depths

    def _call(self, graph: int, feed: dict[str, Any]) -> list[Any]:
        wanted = self.contract["graphs"][graph]["inputs"]
        return self.sessions[graph].run(None, {name: np.ascontiguousarray(feed[name]) for name in wanted})
