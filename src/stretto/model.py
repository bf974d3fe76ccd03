"""`AdaptiveModel`: a Hugging Face encoder, a method and a task that load, save and predict as one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from stretto.backbones import backbone_for
from stretto.encoding import Feature, encode, max_length_of
from stretto.engine.packed import PackedEngine
from stretto.engine.reference import ReferenceEngine
from stretto.errors import StrettoError
from stretto.evaluate import batches
from stretto.folder import Folder, load_encoder, load_tokenizer, read_folder, write_folder
from stretto.measure import Cost
from stretto.methods import METHODS, Method, Shape
from stretto.state import Inputs, Output
from stretto.tasks import Task, task_from_config

Text = str | tuple[str, str]


@dataclass(frozen=True)
class Prediction:
    """An answer and what it took."""

    label: str | float
    score: float | None
    """Probability of the label; None for regression."""
    depth: int
    """Layers run."""
    cost: float
    """Fraction of the full model's FLOPs for this input."""
    probabilities: dict[str, float] | None = None


class AdaptiveModel(nn.Module):
    def __init__(self, encoder: Any, tokenizer: Any, method: Method, task: Task, dtype: str = "float32") -> None:
        super().__init__()
        self.encoder, self.method = encoder, method  # what is trained and saved
        self.tokenizer, self.task, self.dtype = tokenizer, task, dtype
        self.backbone = backbone_for(encoder)
        self.max_length = max_length_of(tokenizer, encoder.config)
        self.dial: float = method.dial.off
        self.operating_points: list[dict[str, Any]] = []
        self.provenance: dict[str, Any] = {}
        self.reference = ReferenceEngine(self.backbone)
        self._weights = tuple(encoder.parameters())  # listed once: walking the modules takes a millisecond
        self._packed: tuple[int, PackedEngine] | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        method: str | None = None,
        *,
        task: Task | None = None,
        dtype: str = "float32",
        max_length: int | None = None,
        **settings: Any,
    ) -> AdaptiveModel:
        """Load a stretto folder, or wrap a Hugging Face model with a fresh `method` (default 'full').

        A stretto folder may also be opened with another method: its exits carry over if the new method has exits of
        the same form, all else starts afresh. `settings` are fields of the method's Config. `task` replaces the
        head's labels (for training). `dtype='int8'` quantises the packed engine's matrix products. `max_length` cuts
        inputs to fewer tokens than the encoder takes; it is saved with the tokenizer."""
        folder = read_folder(str(name_or_path))
        same_method = folder is not None and method in (None, folder.method)
        if folder is not None and same_method:
            method, settings = folder.method, {**folder.config, **settings}
        method_class = METHODS[method or "full"]
        config = make_config(method_class, settings)
        encoder = load_encoder(str(name_or_path), task)
        task = task or task_from_config(encoder.config)
        backbone = backbone_for(encoder)
        built = method_class(config, Shape(backbone.d, backbone.n_layers, backbone.n_labels), task)
        if built.exits is not None:
            built.exits.start_from(backbone.pooler())
        model = cls(encoder, load_tokenizer(str(name_or_path), max_length), built, task, dtype)
        if folder is not None and same_method:
            folder.load_weights(built)
            model.dial, model.operating_points, model.provenance = folder.dial, folder.points, folder.provenance
        elif folder is not None and built.exits is not None and folder.config.get("pool") == built.exits.pool:
            folder.load_weights(built.exits, prefix="exits.")
        return model.eval()

    def save_pretrained(self, path: str | Path) -> None:
        """Write a folder that plain `AutoModelForSequenceClassification` loads too. All of it appears, or nothing."""
        folder = Folder(
            method=self.method.name,
            config=dataclasses.asdict(self.method.config),
            dial=self.dial,
            points=self.operating_points,
            provenance=self.provenance,
        )
        write_folder(Path(path), folder, self.encoder, self.tokenizer, self.method, self.task)

    def train(self, mode: bool = True) -> AdaptiveModel:
        if mode:
            self._packed = None  # fused optimizers change weights without raising their version
        super().train(mode)
        return self

    @property
    def packed(self) -> PackedEngine:
        """The fast engine, laid out anew whenever a weight has changed since."""
        stamp = hash(tuple((p.data_ptr(), p._version) for p in self._weights))
        if self._packed is None or self._packed[0] != stamp:
            self._packed = (stamp, PackedEngine(self.backbone, self.dtype))
        return self._packed[1]

    def run(self, inputs: Inputs, dial: float | Tensor | None = None, *, method: Method | None = None) -> Output:
        """Logits and trace of a tokenised batch. `dial` may be one number or one per sequence ([B]).

        `method` may stand in for the model's own, to watch it (see `stretto.explain`)."""
        if self.training:
            raise StrettoError("Expected a model in eval mode, got one in training mode. Call model.eval() first.")
        dial = self.dial if dial is None else dial
        self.method.dial.check(dial)
        return self.packed.run(inputs.to(self.encoder.device), method or self.method, dial)

    @overload
    def predict(self, texts: Text, dial: float | Tensor | None = None, batch_size: int = 32) -> Prediction: ...
    @overload
    def predict(
        self, texts: list[Text], dial: float | Tensor | None = None, batch_size: int = 32
    ) -> list[Prediction]: ...

    def predict(
        self, texts: Text | list[Text], dial: float | Tensor | None = None, batch_size: int = 32
    ) -> Prediction | list[Prediction]:
        """Answer one text (or one pair, a tuple of two) or a list of them, in order."""
        if isinstance(texts, (str, tuple)):
            return self.predict([texts], dial, batch_size)[0]
        pairs = [check_text(text) for text in texts]
        if not pairs:
            return []
        return self.answer(encode(self.tokenizer, pairs, self.max_length).features, dial, batch_size)

    def answer(
        self, features: list[Feature], dial: float | Tensor | None = None, batch_size: int = 32
    ) -> list[Prediction]:
        """Answer tokenised inputs, in order; `predict` for those who tokenise themselves (see `stretto.encoding`)."""
        dial = self.dial if dial is None else dial
        dials = torch.as_tensor(dial, dtype=torch.float64).expand(len(features))
        predictions: list[Prediction] = []
        for inputs in batches(features, self.tokenizer.pad_token_id, batch_size):
            done = len(predictions)
            output = self.run(inputs, dials[done : done + len(inputs.input_ids)])
            cost = Cost.of(output.trace, self.backbone)
            answers = self.task.decode(output.logits)
            for answer, depth, share in zip(answers, cost.depth.tolist(), cost.per_sequence.tolist(), strict=True):
                predictions.append(Prediction(answer.label, answer.score, depth, share, answer.probabilities))
        return predictions


def check_text(text: Any) -> tuple[str, ...]:
    """One text as the tuple of its parts."""
    parts = (text,) if isinstance(text, str) else tuple(text) if isinstance(text, (tuple, list)) else ()
    if len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
        raise StrettoError(
            f"Expected a string or a pair of strings, got {text!r:.80}. Convert each input to text first."
        )
    return parts


def make_config(method: type[Method], settings: dict[str, Any]) -> Any:
    """A method's Config from loose settings; an unknown name is an error that lists the known ones."""
    known = {field.name: field for field in dataclasses.fields(method.Config)}
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise StrettoError(
            f"Expected settings of {method.name} among {', '.join(known)}; got {', '.join(unknown)}. "
            f"`stretto methods {method.name}` describes them."
        )
    return method.Config(**{name: as_tuples(value) for name, value in settings.items()})


def as_tuples(value: Any) -> Any:
    """JSON's lists, nested ones too, as the tuples that a frozen Config holds."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
