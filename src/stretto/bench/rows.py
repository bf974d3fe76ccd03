"""From a recipe to a row: its data, its trained model, its operating points, how it answers.

Everything is kept in a work folder: a killed run resumes, also within a training.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from stretto.bench.baselines import BATCH, OnnxRuntime, hugging_face_scores, padded_flops
from stretto.bench.results import HF, HF_SORTED, ONNX_INT8, Point, Row
from stretto.bench.suite import DEFAULT_SEED, FULL_ROW, Recipe, SetSpec, Suite
from stretto.budget.search import SearchSettings, search
from stretto.budget.sweep import sweep
from stretto.budget.thresholds import search_thresholds
from stretto.data import Dataset, load, sample, split_off
from stretto.data.batches import batches
from stretto.data.tokenise import Encoded
from stretto.engine.cost import Cost, full_flops
from stretto.engine.written import TextTrace
from stretto.errors import StrettoError
from stretto.methods import METHODS
from stretto.methods.saliency import saliency
from stretto.model import AdaptiveModel
from stretto.saving.files import replacing_folder, write_json
from stretto.saving.folder import load_tokenizer, quiet_transformers
from stretto.saving.points import OperatingPoint
from stretto.saving.trust import as_data, refuse_code
from stretto.saving.versions import known_versions
from stretto.state import Trace
from stretto.tasks import TASKS
from stretto.training import SCRATCH
from stretto.training.bfloat16 import survives_bf16
from stretto.training.pretraining import SUMMARY
from stretto.training.run import train
from stretto.training.scratch import fresh_model
from stretto.view.rationales import agreement, load_rationales

#: Bins of the histogram of tokens that are left in the last layer run.
BINS = 10
#: Settings that a search writes.
SEARCHED = frozenset({"costs", "frontier", "thresholds"})


@dataclass(frozen=True)
class Places:
    """Where things are."""

    data: Path
    models: Path | None
    work: Path

    def encoder(self, name: str) -> str:
        """A folder of the models folder, or a hub name."""
        folder = self.models / name if self.models else None
        return str(folder) if folder is not None and folder.exists() else name

    def file(self, name: str) -> str:
        path = self.data / f"{name}.jsonl.gz"
        if not path.exists():
            raise StrettoError(
                f"Expected the data of the suite in '{path}', got no such file. Name the folder with --data."
            )
        return str(path)


@dataclass(frozen=True)
class Bench:
    """One set, encoder and seed: what its rows share."""

    suite: Suite
    places: Places
    set: str
    seed: int
    model: str

    @property
    def spec(self) -> SetSpec:
        return self.suite.sets[self.set]

    @property
    def folder(self) -> Path:
        return self.places.work / "models" / f"{self.set}-{Path(self.model).name}-{self.seed}"

    @cached_property
    def parts(self) -> dict[str, Dataset]:
        """'train', 'dev' (to train with), 'choosing' (dials are chosen on it) and 'test'."""
        spec = self.spec

        def part(name: str, labels: list[str] | None = None, limit: int | None = None) -> Dataset:
            found = load(self.places.file(name), task=TASKS[spec.task], label_names=labels)
            return found if limit is None else sample(found, limit, self.seed)

        whole = part(spec.train)
        training = whole if spec.limit is None else sample(whole, spec.limit, self.seed)
        choosing = None if spec.chosen_on is None else sample(without(whole, training), spec.chosen_on, self.seed)
        if spec.test is None:
            training, test = split_off(training, spec.held_out, DEFAULT_SEED)  # the same for every seed
        else:
            test = part(spec.test, whole.label_names, spec.test_limit)
        if spec.dev is None:
            training, dev = split_off(training, 0.1, self.seed)
        else:
            dev = part(spec.dev, whole.label_names)
        return {"train": training, "dev": dev, "choosing": choosing or dev, "test": test}

    def recipe(self, row: str) -> Recipe:
        """As it is on this set. A row that starts from one that is not for the task starts from the full model."""
        found = self.suite.recipe(row, self.spec)
        start = found.start and self.suite.recipes[found.start]
        if start and not METHODS[start.method].needs.met_by(TASKS[self.spec.task]):
            return dataclasses.replace(found, start=FULL_ROW, skip=["backbone"])
        return found

    # ---- models

    def open(self, row: str, dtype: str = "float32") -> AdaptiveModel:
        """The model of a row: loaded, or trained now (and what it starts from, if need be)."""
        recipe = self.recipe(row)
        with quiet_transformers():
            if recipe.weights_of is not None:
                self.open(recipe.weights_of)
                weights = self.folder / recipe.weights_of
                return AdaptiveModel.from_pretrained(weights, recipe.method, dtype=dtype, **recipe.settings)
            if not (self.folder / row).exists():
                self.fit(row, recipe)
            model = AdaptiveModel.from_pretrained(self.folder / row, dtype=dtype)
        wanted = {name: value for name, value in recipe.settings.items() if name not in SEARCHED}
        trained = {name: getattr(model.method.config, name) for name in wanted}
        if plain(trained) != plain(wanted):
            raise StrettoError(
                f"Expected a model with the settings {wanted} in '{self.folder / row}', got one with {trained}. "
                "Choose another --output, or delete that folder."
            )
        return model

    def fit(self, row: str, recipe: Recipe) -> None:
        spec = self.spec
        if recipe.start is not None:
            self.open(recipe.start)
        torch.manual_seed(self.seed)
        if recipe.start is None:
            model = self.untrained(recipe)
        else:  # it knows the task
            start = self.folder / recipe.start
            model = AdaptiveModel.from_pretrained(start, recipe.method, max_length=spec.max_length, **recipe.settings)
        train(
            model, self.parts["train"], self.parts["dev"], self.folder / row, skip=recipe.skip, guarantee=False,
            progress=False, seed=self.seed, bf16=spec.bf16 and has_bf16(), attention_dropout=spec.attention_dropout,
            per_device_train_batch_size=spec.batch // spec.accumulate, gradient_accumulation_steps=spec.accumulate,
        )  # fmt: skip

    def untrained(self, recipe: Recipe) -> AdaptiveModel:
        """The encoder, or a model that starts from nothing, with a fresh method."""
        spec, data = self.spec, self.parts["train"]
        task = TASKS[spec.task].posed_by(data)
        if not self.model.startswith(SCRATCH):
            return AdaptiveModel.from_pretrained(
                self.encoder(recipe.layers), recipe.method, task=task, max_length=spec.max_length, **recipe.settings
            )
        sizes = {**self.suite.sizes, **recipe.sizes}
        return fresh_model(
            self.model, sizes, data, task, recipe.method, recipe.settings, self.seed, max_length=spec.max_length
        )

    def encoder(self, layers: int | None) -> str:
        """The encoder, or a folder with its first layers."""
        whole = self.places.encoder(self.model)
        if layers is None:
            return whole
        folder = self.folder / f"encoder-{layers}"
        if not folder.exists():
            refuse_code(whole)
            with replacing_folder(folder) as temporary:
                first = {"num_hidden_layers": layers, "dtype": torch.float32}
                AutoModel.from_pretrained(whole, **first, **as_data(whole)).save_pretrained(temporary)
                load_tokenizer(whole).save_pretrained(temporary)
        return str(folder)

    # ---- rows

    def make(self, row: str) -> tuple[Row, dict[str, Any]]:
        """Train, measure: the row, and how it answers each test input (for the comparison of methods)."""
        began = time.process_time()
        recipe = self.recipe(row)
        model = self.open(row)
        found = self.searched(row, recipe, model) if recipe.search else None
        if found is not None:
            model = self.open(row)
        points = self.points(recipe, model)
        dial = self.default_dial(points)
        answers = self.answers(model, dial)
        if self.suite.int8:
            points += self.int8_points(row, points)
        marked = recipe.rationales or {}
        summary = Path(self.places.encoder(self.model)) / SUMMARY
        made = Row(
            **self.identity(row, recipe.method), settings=plain(recipe.settings), epochs=self.spec.epochs,
            batch=self.spec.batch, layers=recipe.layers, sizes={**self.suite.sizes, **recipe.sizes}, points=points,
            search=found,
            pretraining=json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else None,
            rationales=self.rationales(model, marked) if self.set in marked.get("sets", []) else None,
            answers={"dial": dial, **histograms(answers, model.backbone.n_layers)},
            hours=round((time.process_time() - began) / 3600, 4),
        )  # fmt: skip
        return made, answers

    def identity(self, row: str, method: str) -> dict[str, Any]:
        task = TASKS[self.spec.task].posed_by(self.parts["train"])
        other = "" if self.model == (self.spec.model or self.suite.model) else f" --model {Path(self.model).name}"
        only = f"set={self.set},method={row},seed={self.seed}"
        return {
            "set": self.set, "model": Path(self.model).name, "name": row, "method": method, "seed": self.seed,
            "command": f"stretto compare benchmarks/suites/{self.suite.name}.yaml --only {only}{other}",
            "versions": known_versions(),
            "task": self.spec.task, "metric": task.main_metric, "n_train": len(self.parts["train"]),
            "n_dev": len(self.parts["choosing"]), "n_test": len(self.parts["test"]), "machine": platform.machine(),
        }  # fmt: skip

    def searched(self, row: str, recipe: Recipe, model: AdaptiveModel) -> dict[str, Any]:
        """Search for lengths, or thresholds, on dev data; they go to the model folder, what it took beside it."""
        note = self.folder / f"{row}.search.json"
        if not note.exists() and model.task.answers == "text":
            wanted = {"seed": self.seed, **(recipe.search or {})}
            search_thresholds(model, self.parts["dev"], **wanted)
            model.save_pretrained(self.folder / row)
            write_json(note, {"examples": len(self.parts["dev"]), **wanted})
        elif not note.exists():
            settings = SearchSettings(**{"seed": self.seed, **(recipe.search or {})})
            found = search(model, self.parts["dev"], self.folder / row, settings, progress=False)
            area, tried = ([getattr(step, name) for step in found.iterations] for name in ("area", "tried"))
            write_json(note, {"examples": found.examples, "area": area, "tried": tried})
        return json.loads(note.read_text(encoding="utf-8"))

    def points(self, recipe: Recipe, model: AdaptiveModel) -> list[Point]:
        """Along the dial on the data dials are chosen on, and on the test data; layers per token where reported."""
        trained = getattr(model.method.config, "training_strength", None)
        wanted = [*recipe.reported, *([] if trained is None or not recipe.reported else [trained])]
        reported = [dial for dial in dict.fromkeys(wanted) if recipe.dials is None or dial in recipe.dials]
        points: list[Point] = []
        for split, part in (("dev", self.parts["choosing"]), ("test", self.parts["test"])):
            encoded = self.encoded(model, part)
            dials = list(model.method.dial.sweep if recipe.dials is None else recipe.dials)
            missing = [dial for dial in reported if split == "test" and dial not in dials]
            for point in sweep(model, part, [*dials, *missing], progress=False, encoded=encoded):
                per_token = None
                if split == "test" and point.dial in reported:
                    trace = model.run_features(encoded.features, point.dial, BATCH)[1]
                    if isinstance(trace, Trace):
                        per_token = float(renewed(trace).sum() / trace.lengths.sum())
                points.append(point_of(point, split, layers_per_token=per_token))
        return points

    def encoded(self, model: AdaptiveModel, data: Dataset) -> Encoded:
        """The features; for a selection by saliency with that of each token, of the right answer in the full model."""
        encoded = model.encode(data.texts)
        if getattr(model.method.config, "select", None) != "saliency":
            return encoded
        labels, features = torch.tensor(data.labels), []
        for start in range(0, len(encoded.features), BATCH):
            part = encoded.features[start : start + BATCH]
            (inputs,) = batches(part, model.tokenizer.pad_token_id, BATCH)
            scores = saliency(model.reference, model.task, inputs, labels[start : start + BATCH]).tolist()
            features += [
                {**feature, "saliency": row[: len(feature["input_ids"])]}
                for feature, row in zip(part, scores, strict=True)
            ]
        return dataclasses.replace(encoded, features=features)

    def default_dial(self, points: Sequence[Point]) -> float:
        """The cheapest within a point of the first on the dev data."""
        dev = [point for point in points if point.split == "dev"]
        good = [point for point in dev if 100 * point.score >= 100 * dev[0].score - 1]
        return min(good, key=lambda point: point.cost).dial

    def int8_points(self, row: str, points: Sequence[Point]) -> list[Point]:
        """The same weights in int8, on the test data: off, and at the default dial."""
        model = self.open(row, "int8")
        dials = list(dict.fromkeys((model.method.dial.off, self.default_dial(points))))
        encoded = self.encoded(model, self.parts["test"])
        found = [sweep(model, self.parts["test"], [dial], progress=False, encoded=encoded)[0] for dial in dials]
        return [point_of(point, "test", dtype="int8") for point in found]

    def answers(self, model: AdaptiveModel, dial: float) -> dict[str, Any]:
        """Of each test input: the answer, whether it is right (if it can be), layers run, tokens left at the end."""
        data = self.parts["test"]
        encoded = self.encoded(model, data)
        logits, trace = model.run_features(encoded.features, dial, BATCH)
        of = torch.tensor(encoded.example_of)
        cost = Cost.of(trace, model.backbone).per_example(of, len(data))
        found = [str(answer.summary) for answer in model.task.decode(logits, encoded)]
        right = None
        if model.task.right_or_wrong and model.task.one_of_labels:
            right = model.task.correct(torch.as_tensor(logits), torch.tensor(data.labels)).tolist()
            found = [data.label_names[int(k)] for k in torch.as_tensor(logits).argmax(dim=1)]  # type: ignore[index]
        left = torch.zeros(len(data)).scatter_reduce(0, of, tokens_left(trace), "amax")
        return {
            "dial": dial,
            "answer": found,
            "right": right,
            "depth": cost.depth.tolist(),
            "cost": [round(share, 4) for share in cost.per_sequence.tolist()],
            "left": [round(share, 4) for share in left.tolist()],
        }

    def rationales(self, model: AdaptiveModel, marked: dict[str, Any]) -> dict[str, Any]:
        examples = load_rationales(self.places.file(marked["data"]), model, None)
        found = agreement(model, examples, marked["dial"], progress=False)
        return {"data": marked["data"], "dial": float(marked["dial"]), **found.to_json()}

    # ---- baselines: the full model's weights in other engines

    def baseline(self, name: str) -> Row:
        model, data = self.open(FULL_ROW), self.parts["test"]
        features = model.encode(data.texts).features
        in_order = sorted(features, key=lambda f: len(f["input_ids"])) if name == HF_SORTED else features
        lengths = torch.tensor([len(feature["input_ids"]) for feature in features])
        pool = list(batches(in_order, model.tokenizer.pad_token_id, BATCH))
        cost = padded_flops(pool, model.backbone) / float(full_flops(lengths, model.backbone).sum())
        dtype = "int8" if name == ONNX_INT8 else "float32"
        if name in (HF, HF_SORTED):
            metrics = hugging_face_scores(model, data)
        else:
            metrics = self.onnx(model).scores(model, data, dtype)
        depth = float(model.backbone.n_layers)
        point = Point(0.0, metrics[model.task.main_metric], cost, depth, metrics, dtype=dtype)
        return Row(**self.identity(name, name), epochs=self.spec.epochs, points=[point])

    def onnx(self, model: AdaptiveModel) -> OnnxRuntime:
        folder = self.folder / "onnx"
        folder.mkdir(parents=True, exist_ok=True)
        return OnnxRuntime(model.encoder, folder, torch.get_num_threads())


def without(dataset: Dataset, part: Dataset) -> Dataset:
    """What is left of a dataset without some of its examples."""
    taken = set(part.where)
    rest = [index for index, where in enumerate(dataset.where) if where not in taken]
    labels = None if dataset.labels is None else [dataset.labels[index] for index in rest]
    return dataclasses.replace(
        dataset, texts=[dataset.texts[index] for index in rest], labels=labels,
        where=[dataset.where[index] for index in rest],
    )  # fmt: skip


def has_bf16() -> bool:
    """Without bfloat16 in the processor, oneDNN emulates it, several times slower than float32."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16")) and survives_bf16()


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON will give them back."""
    return json.loads(json.dumps(settings))


def point_of(point: OperatingPoint, split: str, **more: Any) -> Point:
    return Point(point.dial, point.score, point.cost, point.depth, dict(point.metrics), split=split, **more)


def tokens_left(trace: Trace | TextTrace) -> torch.Tensor:
    """[B] share of a sequence's tokens that are updated in the last layer it runs; of texts in their encoder's."""
    trace = trace if isinstance(trace, Trace) else trace.encoder
    last = (trace.depth - 1).clamp(min=0).long().unsqueeze(1)
    return renewed(trace).gather(1, last).squeeze(1) / trace.lengths


def renewed(trace: Trace) -> torch.Tensor:
    """[B, L] tokens that each layer updated. If it is one in the last layer, that which the head reads, those that
    reached it: the others were left out because they are not read, not because of a decision."""
    reached, last = trace.n_key[:, -1], trace.n_ffn[:, -1]
    if trace.n_ffn.shape[1] > 1:
        reached = torch.minimum(reached, trace.n_ffn[:, -2])
    return torch.cat([trace.n_ffn[:, :-1], torch.where(last == 1, reached, last).unsqueeze(1)], dim=1)


def histograms(answers: dict[str, Any], n_layers: int) -> dict[str, list[int]]:
    """How many test inputs ran 1, 2, … layers; how many had 0–10 %, 10–20 %, … of their tokens left."""
    depth = torch.bincount(torch.tensor(answers["depth"]).long(), minlength=n_layers + 1)[1:].tolist()
    places = (torch.tensor(answers["left"]) * BINS).long().clamp(max=BINS - 1)
    return {"depth": depth, "left": torch.bincount(places, minlength=BINS).tolist()}
