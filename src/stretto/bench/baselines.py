"""What the packed engine is compared with: Hugging Face, ONNX Runtime, and the bare matrix products."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.backbones import Backbone
from stretto.bench.timing import Step
from stretto.data import Dataset
from stretto.data.batches import batches
from stretto.deploy.onnx import quantise, quiet_exporter
from stretto.engine.cost import full_flops
from stretto.engine.linear import product
from stretto.engine.packed import PackedEngine
from stretto.model import AdaptiveModel
from stretto.saving.files import replacing_file
from stretto.state import Inputs, Trace

#: Texts that are scored at once.
BATCH = 32
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def padded_flops(batches: Sequence[Inputs], backbone: Backbone) -> float:
    """FLOPs of padded batches outside this engine: every sequence is as long as the longest of its batch, and the last
    layer updates every row."""
    columns = [torch.full((len(inputs.input_ids),), inputs.input_ids.shape[1]) for inputs in batches]
    return float(full_flops(torch.cat(columns), backbone, every_row=True).sum())


def known_names(model: nn.Module) -> list[str]:
    """The tensors that a model takes (some have no token types)."""
    known = inspect.signature(model.forward).parameters
    return [name for name in NAMES if name in known]


def tensor(inputs: Inputs, name: str) -> Tensor:
    """One of them; if the tokenizer gives no token types, all are 0."""
    found = getattr(inputs, name)
    return torch.zeros_like(inputs.input_ids) if found is None else found


def hugging_face(model: nn.Module, batches: Sequence[Inputs]) -> list[Step]:
    """The model as Hugging Face runs it, on padded batches; with only the tensors that it takes."""
    known = known_names(model)

    @torch.inference_mode()
    def run(arguments: dict[str, Tensor]) -> object:
        return model(**arguments)

    given = [{name: getattr(inputs, name) for name in known} for inputs in batches]
    return [partial(run, {name: value for name, value in each.items() if value is not None}) for each in given]


def hugging_face_scores(model: AdaptiveModel, data: Dataset) -> dict[str, float]:
    """Of the full model as Hugging Face runs it, on labelled data."""
    return engine_scores(model, data, partial(hugging_face, model.encoder), logits_of)


def engine_scores(
    model: AdaptiveModel,
    data: Dataset,
    steps_of: Callable[[Sequence[Inputs]], Sequence[Step]],
    logits_of: Callable[[Any], Tensor],
) -> dict[str, float]:
    """Of an engine that runs the full model on padded batches; its outputs hold logits [B, C] or [B, T, C]."""
    encoded = model.encode(data.texts)
    pool = list(batches(encoded.features, model.tokenizer.pad_token_id, BATCH))
    rows: list[Any] = []
    for inputs, step in zip(pool, steps_of(pool), strict=True):
        logits = logits_of(step())
        if logits.dim() == 2:
            rows.append(logits)
        else:  # an answer for every token: without padding
            rows += [part[:length] for part, length in zip(logits, inputs.attention_mask.sum(1), strict=True)]
    answered = rows if model.task.answers == "token" else torch.cat(rows)
    return model.task.scores(answered, encoded, data.labels or [])


def logits_of(output: Any) -> Tensor:
    """[B, C] or [B, T, C] of what Hugging Face's model returns; of an answer in a text [B, T, 2]."""
    return output.logits if "logits" in output else torch.stack((output.start_logits, output.end_logits), dim=-1)


class GemmLimit:
    """The engine's matrix products alone, on its own kernels: no attention, activation, norm, embedding or decision.

    The matrices have as many rows as the trace of a batch says; rows added by rounding up are not included."""

    def __init__(self, engine: PackedEngine) -> None:
        self.layers = [(layer, product(*layer.spec.ffn.inputs, dtype=engine.dtype)) for layer in engine.layers]

    def steps(self, traces: Sequence[Trace]) -> list[Step]:
        """One call per batch: the products that were made for it."""
        return [partial(self.run, self.rows(trace), self.matrices(trace)) for trace in traces]

    def matrices(self, trace: Trace) -> dict[int, Tensor]:
        """By width, [M, width]: what the products read, or the first rows of it."""
        most = int(trace.n_key.sum(dim=0).max())
        return {width: torch.rand(most, width) for layer, _ in self.layers for width in layer.spec.widths}

    def rows(self, trace: Trace) -> list[tuple[int, int, int]]:
        """For each layer the rows that are queries, keys, and go through the FFN, of all sequences together."""
        counts = [n.sum(dim=0).tolist() for n in (trace.n_query, trace.n_key, trace.n_ffn)]
        return list(zip(*counts, strict=True))

    @torch.inference_mode()
    def run(self, rows: list[tuple[int, int, int]], matrices: dict[int, Tensor]) -> None:
        for (queries, keys, renewed), (layer, ffn_in) in zip(rows, self.layers, strict=True):
            hidden, context, wide = (matrices[width] for width in layer.spec.widths)
            if queries < keys:  # some are frozen
                layer.query(hidden[:queries])
                layer.key_value(hidden[:keys])
            elif keys:
                layer.qkv(hidden[:keys])
            if renewed:
                layer.attention_output(context[:renewed])
                ffn_in(hidden[:renewed])
                layer.ffn.out(wide[:renewed])

    def flops(self, traces: Sequence[Trace]) -> float:
        total = 0
        for trace in traces:
            for (queries, keys, renewed), (layer, _) in zip(self.rows(trace), self.layers, strict=True):
                d, width, _ = layer.spec.widths
                total += d * width * (queries + 2 * keys + renewed) + layer.spec.ffn.macs * renewed
        return 2.0 * total


class OnnxRuntime:
    """A model exported once to a folder, in fp32 and (from that) in int8.

    The session's threads do not spin while they wait: on two cores spinning threads slow down everything that
    runs at the same time or directly after them."""

    def __init__(self, model: nn.Module, folder: Path, threads: int) -> None:
        self.model, self.folder, self.threads = model, folder, threads
        self.sessions: dict[str, Any] = {}

    def steps(self, batches: Sequence[Inputs], dtype: str) -> list[Step]:
        if dtype not in self.sessions:
            self.sessions[dtype] = self.session(self.exported() if dtype == "float32" else self.quantised())
        names = known_names(self.model)
        feeds = [{name: tensor(inputs, name).numpy() for name in names} for inputs in batches]
        return [partial(self.sessions[dtype].run, None, feed) for feed in feeds]

    def scores(self, model: AdaptiveModel, data: Dataset, dtype: str) -> dict[str, float]:
        """Of the exported full model on labelled data."""
        return engine_scores(model, data, lambda pool: self.steps(pool, dtype), lambda out: torch.from_numpy(out[0]))

    def session(self, path: Path) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def exported(self) -> Path:
        path = self.folder / "float32.onnx"
        if not path.exists():
            ids = torch.ones(2, 16, dtype=torch.long)
            names = known_names(self.model)
            example = (ids, ids.triu(), ids.clone())[: len(names)]  # each its own: one tensor would become one input
            dimensions = {0: torch.export.Dim("batch"), 1: torch.export.Dim("columns")}
            with quiet_exporter(), torch.no_grad(), replacing_file(path) as unfinished:
                torch.onnx.export(
                    LogitsAlone(self.model), example, unfinished, dynamo=True, verbose=False,
                    input_names=names, output_names=["logits"], dynamic_shapes=(dimensions,) * len(names),
                    external_data=False,
                )  # fmt: skip
        return path

    def quantised(self) -> Path:
        path = self.folder / "int8.onnx"
        if not path.exists():
            exported = self.exported()
            with replacing_file(path) as unfinished:
                shutil.copyfile(exported, unfinished)
                quantise(unfinished)
        return path


class LogitsAlone(nn.Module):
    """A graph has positional inputs and tensor outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Any:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return logits_of(self.model(input_ids=input_ids, attention_mask=attention_mask, **types))
