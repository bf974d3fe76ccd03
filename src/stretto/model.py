"""`AdaptiveModel`: a Hugging Face encoder, a method and a task that load, save and predict as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from stretto.backbones import backbone_for
from stretto.backbones.decoder import EncoderDecoder
from stretto.data.batches import WINDOW, as_they_come, windows
from stretto.data.tokenise import Encoded, Feature, mask_id_of, max_length_of
from stretto.engine.cost import Cost
from stretto.engine.decider import Decider
from stretto.engine.linear import check_dtype
from stretto.engine.packed import PackedEngine, stamp
from stretto.engine.parts import check_batch_size
from stretto.engine.reference import ReferenceEngine
from stretto.engine.seq2seq import Seq2SeqEngine
from stretto.engine.written import Text as WrittenText
from stretto.engine.written import TextTrace, Written
from stretto.errors import StrettoError
from stretto.methods import METHODS, Combined, Method, Shape
from stretto.methods.scores import KeepsBest
from stretto.saving.folder import (
    Folder,
    load_config,
    load_encoder,
    load_task,
    load_tokenizer,
    read_folder,
    write_folder,
    write_points,
)
from stretto.saving.points import OperatingPoint, as_estimates, budget_named, promise, promise_at, standing
from stretto.state import Inputs, Trace
from stretto.tasks import Logits, Prediction, Task

__all__ = ["AdaptiveModel", "Prediction", "Text", "make_config"]

#: One input: a text, or a tuple of a pair's texts, of a question and its context, or of words.
Text = str | tuple[str, ...]


class AdaptiveModel(nn.Module):
    """A Hugging Face encoder whose `method` decides, at each layer, what is still computed for the `task`.

    `from_pretrained` loads or makes one, `predict` answers, `save_pretrained` writes a folder. `dial` is the
    default dial; `operating_points` are the measured dials with their scores and costs."""

    def __init__(self, encoder: Any, tokenizer: Any, method: Method, task: Task, dtype: str = "float32") -> None:
        super().__init__()
        check_dtype(dtype)
        self.encoder, self.method = encoder, method  # what is trained and saved
        self.tokenizer, self.task, self.dtype = tokenizer, task, dtype
        self.backbone = backbone_for(encoder)
        self.max_length = max_length_of(tokenizer, encoder.config)
        self.dial: float = method.dial.off
        self.operating_points: list[OperatingPoint] = []
        self.provenance: dict[str, Any] = {}
        self.reference = ReferenceEngine(self.backbone)
        self._weights = tuple(encoder.parameters())  # listed once: walking the modules takes a millisecond
        self.generation: dict[str, Any] = {}
        """How an encoder–decoder writes: settings of Hugging Face's `generate`, such as num_beams."""
        self._packed: tuple[int, PackedEngine | Seq2SeqEngine] | None = None

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

        A stretto folder may also be opened with another method: its exits are reused if the new method has exits of
        the same form, and so is what ranks tokens; all else starts new. `settings` are fields of the method's Config.
        `task` replaces the head's labels (for training). `dtype='int8'` quantises the packed engine's matrix products.
        `max_length` truncates inputs (or sets the size of windows) below the encoder's limit, and is saved with the
        tokenizer. Where these differ from the folder's, nothing that it guarantees holds: its points are estimates."""
        if task is not None and not isinstance(task, Task):
            raise StrettoError(
                f"Expected a task such as stretto.tasks.Classification(['bad', 'good']), got {task!r:.60}. "
                "Make one with the names of its labels."
            )
        folder = read_folder(str(name_or_path))
        same_method = folder is not None and method in (None, folder.method)
        if folder is not None and same_method:
            method, settings = folder.method, {**folder.config, **settings}
        method_class = METHODS[method or "full"]
        config = make_config(method_class, settings)
        hf_config, new_labels = load_config(str(name_or_path)), task is not None
        task = task or load_task(str(name_or_path), hf_config, folder)
        encoder = load_encoder(
            str(name_or_path), hf_config, task, new_labels=new_labels, safetensors_only=folder is not None
        )
        tokenizer = load_tokenizer(str(name_or_path), task)
        saved_length = max_length_of(tokenizer, encoder.config)
        model = cls.put_together(encoder, tokenizer, method_class, config, task, dtype, max_length)
        built = model.method
        if folder is not None and same_method:
            folder.load_weights(built, new_labels=new_labels)
            model.dial, model.operating_points, model.provenance = folder.dial, folder.points, folder.provenance
            unchanged = config == make_config(method_class, folder.config) and model.max_length == saved_length
            if new_labels or not unchanged:
                model.operating_points = as_estimates(folder.points)
        elif folder is not None:
            carry_over(folder, built, new_labels=new_labels)
        check_weights(model, str(name_or_path))
        return model.eval()

    @classmethod
    def put_together(
        cls, encoder: Any, tokenizer: Any, method: type[Method], config: Any, task: Task, dtype: str = "float32",
        max_length: int | None = None,
    ) -> AdaptiveModel:  # fmt: skip
        """A Hugging Face model and its tokenizer with a fresh method; the arguments are those of `from_pretrained`."""
        backbone = backbone_for(encoder)
        shape = Shape(backbone.d, backbone.n_layers, backbone.n_labels, mask_id_of(tokenizer))
        built = method(config, shape, task)
        if built.exits is not None:
            built.exits.start_from(backbone.pooler())
        if max_length is not None:
            tokenizer.model_max_length = min(max_length, max_length_of(tokenizer, encoder.config))
        built.attach(backbone)
        return cls(encoder, tokenizer, built, task, dtype)

    def save_pretrained(self, path: str | Path) -> None:
        """Write a folder, in one step, that plain transformers loads too (by `task.auto_class`)."""
        write_folder(Path(path), self.folder(), self.encoder, self.tokenizer, self.method, self.task)

    def save_points(self, path: str | Path) -> None:
        """Write the dial, the operating points and the card to the folder of this model."""
        write_points(Path(path), self.folder(), self.encoder.config, self.task)

    def folder(self) -> Folder:
        """The content of stretto.json."""
        return Folder(
            method=self.method.name,
            config=dataclasses.asdict(self.method.config),
            dial=self.dials_of(None, 1).item(),
            points=self.operating_points,
            provenance=self.provenance,
            task={"name": self.task.name, **self.task.settings()},
        )

    def promise(self, dial: float | None = None, budget: str | None = None) -> str:
        """What may be relied on with a budget, or at a dial (default: the model's own): a guarantee or an estimate, in
        words."""
        if budget is not None:
            return promise(budget_named(self.operating_points, budget, self.dtype))
        dial = self.dial if dial is None else dial
        return promise_at(self.operating_points, dial, self.dtype, off=self.method.dial.off)

    def standing(self) -> str:
        """The same of the model's own dial, in a word or two: 'guaranteed', 'estimate', 'full model'."""
        return standing(self.operating_points, self.dial, self.dtype, off=self.method.dial.off)

    def acting(self, method: Method | None) -> AdaptiveModel:
        """The same model with one part of its method alone (None: itself); weights are shared."""
        if method is None:
            return self
        part = AdaptiveModel(self.encoder, self.tokenizer, method, self.task, self.dtype)
        part.max_length = self.max_length
        return part.train(self.training)

    def train(self, mode: bool = True) -> AdaptiveModel:
        if mode:
            self._packed = None  # fused optimizers change weights without raising their version
        super().train(mode)
        return self

    @property
    def packed(self) -> Any:
        """The fast engine (`PackedEngine`, or `Seq2SeqEngine` of an encoder–decoder), rebuilt after any weight has
        changed."""
        now = stamp(self._weights)
        if self._packed is None or self._packed[0] != now:
            if isinstance(self.backbone, EncoderDecoder):
                self._packed = (now, Seq2SeqEngine(self.backbone, self.dtype, self.generation))
            else:
                self._packed = (now, PackedEngine(self.backbone, self.dtype))
        return self._packed[1]

    def run(
        self, inputs: Inputs, dial: float | Tensor | None = None, *,
        batch_size: int | None = None, decider: Decider | None = None, context: Any = None,
    ) -> Any:  # fmt: skip
        """Logits and trace (`Output`) of tokenised sequences; texts and trace (`Written`) of an encoder–decoder.

        `dial` may be one number or one per sequence ([B]).

        `batch_size` is how many of them are computed at once (default: all); in float32 answers do not depend on it.
        `decider` may replace the model's method, for example to record it (see `stretto.view.explain`). `context` is
        passed to the method as `State.context`."""
        if self.training:
            raise StrettoError("Expected a model in eval mode, got one in training mode. Call model.eval() first.")
        dials = self.dials_of(dial, len(inputs.input_ids))
        return self.packed.run(
            inputs.to(self.encoder.device), decider or self.method, dials, batch_size=batch_size, context=context
        )

    def run_features(
        self, features: Sequence[Feature], dial: float | Tensor | None, batch_size: int, progress: str = "",
        context: Any = None, decider: Decider | None = None,
    ) -> tuple[Logits, Trace | TextTrace]:  # fmt: skip
        """Logits and trace of all features, in order, several batches at a time. `dial` may be one per feature. Another
        `decider` may take the place of the method."""
        check_batch_size(batch_size)
        dials = self.dials_of(dial, len(features))
        logits: list[Any] = []
        traces: list[Any] = []
        done = 0
        for inputs in windows(features, self.tokenizer.pad_token_id, batch_size, progress):
            count = len(inputs.input_ids)
            output = self.run(
                inputs, dials[done : done + count], batch_size=batch_size, context=context, decider=decider
            )
            done += count
            traces.append(output.trace)
            if isinstance(output, Written):
                logits += self.read_texts(output.texts)
            elif (
                self.task.answers == "token"
            ):  # [B, T, C]: column = position, so padding is on the right, and is not kept
                lengths = output.trace.lengths.tolist()
                logits += [row[:length].clone() for row, length in zip(output.logits, lengths, strict=True)]
            else:
                logits.append(output.logits)
        trace = type(traces[0]).concatenate(traces)
        return torch.cat(logits) if self.task.answers == "sequence" else logits, trace

    def read_texts(self, texts: Sequence[WrittenText]) -> list[WrittenText]:
        """Texts with their tokens spelled out."""
        spelled = self.tokenizer.batch_decode([text.tokens for text in texts], skip_special_tokens=True)
        return [dataclasses.replace(text, text=words.strip()) for text, words in zip(texts, spelled, strict=True)]

    def dials_of(self, dial: float | Tensor | None, count: int) -> Tensor:
        """[count] the dial of each input: given for each, given for all, or the model's own (None)."""
        dial = self.dial if dial is None else dial
        try:
            dials = torch.as_tensor(dial, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise StrettoError(
                f"Expected a number as the dial, or one for each input, got {dial!r:.60}. Convert it to a float first."
            ) from error
        if dials.shape not in ((), (count,)):
            raise StrettoError(
                f"Expected one dial, or one for each of {count} inputs, got dials of shape {tuple(dials.shape)}. "
                "Pass a float, or a tensor with a dial for each."
            )
        self.method.dial.check(dial)
        return dials.expand(count)

    def dials_for(self, dial: float | Tensor | None, budget: str | Sequence[str] | None, count: int) -> Tensor:
        """[count] the dial of each input, by dials or by the names of budgets that the model has."""
        if budget is None:
            return self.dials_of(dial, count)
        if dial is not None:
            raise StrettoError(f"Expected a dial or a budget, got both ({dial}, {budget!r:.60}). Leave one out.")
        names = [budget] * count if isinstance(budget, str) else list(budget)
        if len(names) != count:
            raise StrettoError(
                f"Expected one budget, or one for each of {count} inputs, got {len(names)}. Name one for each."
            )
        dials = {name: budget_named(self.operating_points, name, self.dtype).dial for name in dict.fromkeys(names)}
        return self.dials_of(torch.tensor([dials[name] for name in names], dtype=torch.float64), count)

    @overload
    def predict(
        self, texts: Text, dial: float | Tensor | None = None, batch_size: int = 32, *, budget: str | None = None
    ) -> Any: ...
    @overload
    def predict(
        self, texts: Sequence[Text | list[str]], dial: float | Tensor | None = None, batch_size: int = 32, *,
        budget: str | Sequence[str] | None = None,
    ) -> list[Any]: ...  # fmt: skip

    def predict(
        self, texts: Text | Sequence[Text | list[str]], dial: float | Tensor | None = None, batch_size: int = 32, *,
        budget: str | Sequence[str] | None = None,
    ) -> Any:  # fmt: skip
        """Answer one input (a string or a tuple: see `Text`) or a list of them, in order, `batch_size` at once.

        `dial`, or a `budget` by its name, may be one for all or one for each. The answers are `Prediction`s of the
        task's own kind, such as `LabelPrediction`."""
        if isinstance(texts, (str, tuple)):
            return self.predict([texts], dial, batch_size, budget=budget)[0]
        if isinstance(texts, (Mapping, Set)) or not isinstance(texts, Iterable):
            raise StrettoError(
                f"Expected one input (such as {self.task.example}) or a list of them, got {texts!r:.60}. "
                "Pass the texts alone."
            )
        inputs = [self.task.check_input(text) for text in texts]
        dials = self.dials_for(dial, budget, len(inputs))
        return [answer for group in self.stream(inputs, dials, batch_size) for answer in group.answers]

    def stream(
        self, inputs: Iterable[tuple[str, ...]], dial: float | Tensor | None = None, batch_size: int = 32, *,
        ready: Callable[[], bool] = lambda: True,
    ) -> Iterator[Answered]:  # fmt: skip
        """Answer any number of inputs, in order, a few batches at a time; no more than these are in memory.

        If the next input is not `ready`, those that have arrived are answered first. `dial` may be one for
        each of a known number of inputs ([n])."""
        check_batch_size(batch_size)
        done = 0
        for group in as_they_come(inputs, WINDOW * batch_size, ready):
            here = dial[done : done + len(group)] if isinstance(dial, Tensor) and dial.dim() else dial
            yield self.answer(self.encode(group), here, batch_size)
            done += len(group)

    def encode(self, texts: Sequence[tuple[str, ...]], labels: Sequence[Any] | None = None) -> Encoded:
        """Tokenise inputs (and labels, one per input, as in a `Dataset`) as the task wants them."""
        return self.task.encode(self.tokenizer, texts, self.max_length, labels, words=self.method.reads_words)

    def answer(self, encoded: Encoded, dial: float | Tensor | None = None, batch_size: int = 32) -> Answered:
        """Answer what `encode` has tokenised. A dial per input ([n]) holds for all its windows."""
        dials = self.dials_of(dial, len(encoded.texts))
        of = torch.tensor(encoded.example_of)
        logits, trace = self.run_features(encoded.features, dials[of], batch_size)
        return self.decode(encoded, logits, trace)

    def decode(self, encoded: Encoded, logits: Logits, trace: Trace | TextTrace) -> Answered:
        """The answers that the `logits` of all features give, and what they cost; `trace` has a row per feature."""
        of = torch.tensor(encoded.example_of)
        cost = Cost.of(trace, self.backbone).per_example(of, len(encoded.texts))
        answers = [
            dataclasses.replace(answer, depth=depth, cost=share)
            for answer, depth, share in zip(
                self.task.decode(logits, encoded), cost.depth.tolist(), cost.per_sequence.tolist(), strict=True
            )
        ]
        return Answered(encoded, answers, cost)


@dataclasses.dataclass(frozen=True)
class Answered:
    """Inputs, tokenised, with their answers in the same order and what these cost together."""

    encoded: Encoded
    answers: list[Any]
    cost: Cost


def carry_over(folder: Folder, built: Method, *, new_labels: bool) -> None:
    """What a method can use of the weights of another one: exits of the same form, and what tokens are ranked by."""
    if built.exits is not None and METHODS[folder.method].uses_exits and folder.config.get("pool") == built.exits.pool:
        folder.load_weights(built.exits, prefix="exits.", new_labels=new_labels)
    ranking = built.first if isinstance(built, Combined) else built
    if not isinstance(ranking, KeepsBest):
        return
    scores = ranking.scores
    if scores.form.items() <= folder.config.items():
        folder.load_weights(scores, prefix="scores.")
    elif folder.config.get("select") == "auto" and folder.config.get("predictor_size") == scores.form["predictor_size"]:
        for name, part in scores.named_children():  # a model that could choose has all of them
            folder.load_weights(part, prefix=f"scores.{name}.")


def check_weights(model: nn.Module, name_or_path: str) -> None:
    """Refuse weights that are NaN or infinite, also of exits: comparisons with NaN give wrong decisions silently."""
    for name, weight in model.named_parameters():
        if not bool(weight.sum().isfinite()) and not bool(
            weight.isfinite().all()
        ):  # the sum is quick, but may overflow
            odd = weight.flatten()[~weight.flatten().isfinite()][0].item()
            raise StrettoError(
                f"Expected finite weights in '{name_or_path}', got {odd} in {name.removeprefix('encoder.')}. "
                "The file is damaged or training has diverged: copy the model again, or train with a lower learning "
                "rate."
            )


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
