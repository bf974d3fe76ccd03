"""Export a model as ONNX graphs, for ONNX Runtime in any language.

`whole`   one operating point as one graph: all layers, some of them (`static_depth`, `layer_drop`), or fewer tokens in
          each (`constant_ratio`, `length_adaptive`, `power_bert`).
`stages`  a few layers per graph with their exits. After each stage the caller removes the sequences that have left.

The folder holds the graphs, the tokenizer and `stretto-onnx.json`, the contract (docs/exporting.md). The graphs are run
and compared with the packed engine before the folder gets its name.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto import __version__
from stretto.deploy.onnx_graphs import StageGraph, WholeGraph
from stretto.deploy.onnx_runner import CONTRACT, OnnxModel
from stretto.engine.linear import check_dtype
from stretto.errors import StrettoError
from stretto.methods.layer_drop import LayerDrop
from stretto.methods.scores import KeepsBest
from stretto.methods.selection import KeepsTokens
from stretto.model import AdaptiveModel
from stretto.saving.files import replacing_folder
from stretto.state import Inputs

FORMAT = 1
#: The largest allowed difference of a logit from the packed engine's, in float32.
TOLERANCE = 1e-4
#: A graph of more bytes keeps its weights in a file beside it: one file can hold 2 GB at most.
LARGE = 2**30
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def export_onnx(
    model: AdaptiveModel, folder: str | Path, *, dial: float | None = None, dtype: str = "float32",
    stages: int | None = None, whole: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write the graphs of `model` to a new `folder`; returns its contract.

    Methods that only exit become `stages` graphs (default: one per layer), unless `whole` asks for a single one.
    `dial` is the operating point of a single graph, and the default of stages. `dtype='int8'` quantises the weights."""
    require_onnx()
    check_dtype(dtype)
    if Path(folder).exists() and (not Path(folder).is_dir() or any(Path(folder).iterdir())):
        raise StrettoError(f"Expected a new or empty folder, got '{folder}', which has content. Choose another name.")
    dial = float(model.dials_of(dial, 1)[0])
    form = form_of(model, dial, stages=stages, whole=whole)
    contract: dict[str, Any] = {
        "format": FORMAT, "form": form, "method": model.method.name, "dial": dial, "dtype": dtype,
        "task": {"name": model.task.name, **model.task.settings()}, "labels": model.task.label_names,
        "n_labels": model.backbone.n_labels, "n_layers": model.backbone.n_layers, "max_length": model.max_length,
        "pad_token_id": model.tokenizer.pad_token_id, "stretto": __version__, "torch": torch.__version__,
    }  # fmt: skip
    with replacing_folder(folder) as temporary, torch.no_grad():
        if form == "whole":
            graphs = [write_whole(model, dial, temporary)]
        else:
            graphs = list(write_stages(model, stages or model.backbone.n_layers, temporary))
        if dtype == "int8":
            for graph in graphs:
                quantise(temporary / graph["file"])
        contract["graphs"] = graphs
        (temporary / CONTRACT).write_text(json.dumps(contract, indent=2) + "\n", encoding="utf-8")
        difference, same_depth = compare(model, OnnxModel(temporary, threads=1), dial)
        contract |= {"largest_difference": difference, "same_depth": same_depth}
        if dtype == "float32" and not (difference <= TOLERANCE and same_depth == 1):
            raise StrettoError(
                f"Expected graphs that answer as the packed engine within {TOLERANCE}, got a difference of "
                f"{difference:.2g} and {same_depth:.0%} equal depths from {model.backbone.config.model_type}. "
                "Nothing was written; this is a bug, please report it."
            )
        (temporary / CONTRACT).write_text(json.dumps(contract, indent=2) + "\n", encoding="utf-8")
        model.tokenizer.save_pretrained(temporary)
    return contract


def form_of(model: AdaptiveModel, dial: float, *, stages: int | None, whole: bool) -> str:
    """'whole' or 'stages'; raises an error that says why if the model cannot be exported."""
    method = model.method
    if model.task.answers == "text":
        raise StrettoError("Expected an encoder for ONNX graphs, got a model that writes texts. Use it with stretto.")
    if stages is not None and whole:
        raise StrettoError("Expected either --stages or --whole, got both. Choose one.")
    if stages is not None and not 1 <= stages <= model.backbone.n_layers:
        raise StrettoError(f"Expected 1 to {model.backbone.n_layers} stages, got {stages}. Choose another number.")
    exits = method.points == {"after"} and method.exits is not None
    counted = isinstance(method, KeepsTokens) and method.points == {"between"}
    looks_up = method.reads_words and not (isinstance(method, KeepsBest) and method.ranks_by != "attention+table")
    fixed = fixed_depth(model, dial) is not None or (counted and not looks_up)
    if stages is not None and not exits:
        raise StrettoError(
            f"Expected a method that only exits for --stages, got {method.name}. Leave --stages out for a single graph."
        )
    if exits and not whole and (stages is not None or fixed_depth(model, dial) is None):
        return "stages"
    if fixed:
        return "whole"
    if exits:
        why = "its depth differs from text to text, which a single graph cannot follow. Export it without --whole"
    elif counted:
        why = "it ranks tokens by a table of words, which a graph cannot look up. Train it with --select attention"
    else:
        why = "how many of its tokens a layer computes differs from text to text, which a graph of fixed form cannot "
        why += f"follow. Export the full model (--dial {method.dial.off:g}), or one trained with another method"
    raise StrettoError(f"Expected a model that fits into ONNX graphs, got {method.name} at the dial {dial:g}: {why}.")


def fixed_depth(model: AdaptiveModel, dial: float) -> int | None:
    """The last layer that all texts run with all their tokens, or None if this depends on the text."""
    method = model.method
    if dial == method.dial.off or isinstance(method, LayerDrop):
        return model.backbone.n_layers
    return int(dial) if method.name == "static_depth" else None


def write_whole(model: AdaptiveModel, dial: float, folder: Path) -> dict[str, Any]:
    depth = fixed_depth(model, dial) or model.backbone.n_layers
    example = example_of(model)
    names = [name for name in NAMES if name in example]
    write_graph(WholeGraph(model, dial, depth), [example[name] for name in names], names, ["logits"],
                folder / "model.onnx")  # fmt: skip
    return {"file": "model.onnx", "first": 1, "last": depth, "inputs": names, "outputs": ["logits"]}


def write_stages(model: AdaptiveModel, count: int, folder: Path) -> Iterator[dict[str, Any]]:
    example = example_of(model)
    n_layers = model.backbone.n_layers
    ends = [n_layers * (stage + 1) // count for stage in range(count)]
    given = {"dial": torch.tensor([0.5, 0.25], dtype=torch.float64), **example}
    carried: list[str] = []
    for stage, (first, last) in enumerate(zip([1, *(end + 1 for end in ends)], ends, strict=False)):
        own = ["input_ids", "token_type_ids"] if first == 1 else carried
        inputs = ["dial", "attention_mask", *(name for name in own if name in given)]
        graph = StageGraph(model, first, last, carried[1:])
        arguments = [given[name] for name in inputs]
        results = graph(*arguments)
        carried = [] if last == n_layers else ["hidden", *graph.notes_out]
        outputs = ["logits", "depth", *(f"next_{name}" for name in carried)]
        file = f"stage-{stage + 1:02}.onnx"
        write_graph(graph, arguments, inputs, outputs, folder / file)
        given.update(zip(carried, results[2:], strict=True))
        yield {"file": file, "first": first, "last": last, "inputs": inputs, "outputs": outputs}


def example_of(model: AdaptiveModel) -> dict[str, Tensor]:
    """A padded batch for the exporter to trace; with token types only if the tokenizer makes some."""
    lengths = [min(n, model.max_length) for n in (13, 6)]
    return dict(tensors_of(random_inputs(model, lengths)))


def random_inputs(model: AdaptiveModel, lengths: Sequence[int]) -> Inputs:
    """Random tokens, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.backbone.encoder.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()
    types = torch.zeros_like(ids) if "token_type_ids" in model.tokenizer.model_input_names else None
    return Inputs(torch.where(mask.bool(), ids, model.tokenizer.pad_token_id), mask, types)


def tensors_of(inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
    for name in NAMES:
        if getattr(inputs, name) is not None:
            yield name, getattr(inputs, name)


def compare(model: AdaptiveModel, exported: OnnxModel, dial: float) -> tuple[float, float]:
    """Random texts of several lengths, alone and padded, against the packed engine: the fraction that leave at the same
    layer, and before it the largest difference of a logit among these."""
    differences, same = [torch.zeros(1)], list[bool]()
    for lengths in ([3], [model.max_length], [2, 5, min(40, model.max_length), 9]):
        inputs = random_inputs(model, lengths)
        wanted = model.run(inputs, dial)
        logits, depth = exported.run(**{name: value.numpy() for name, value in tensors_of(inputs)}, dial=dial)
        equal = torch.as_tensor(depth) == wanted.trace.depth
        there = inputs.attention_mask.bool() & equal.unsqueeze(1) if wanted.logits.dim() == 3 else equal
        differences.append((wanted.logits - torch.as_tensor(logits))[there].abs().flatten())
        same += equal.tolist()
    return float(torch.cat(differences).max()), sum(same) / len(same)  # NaN stays NaN


def write_graph(
    graph: nn.Module, arguments: Sequence[Tensor], inputs: Sequence[str], outputs: Sequence[str], path: Path
) -> None:
    """One graph whose batch and columns may have any size. `arguments` are an example."""
    batch, columns = torch.export.Dim("batch"), torch.export.Dim("columns")
    of_columns = {*NAMES, "hidden"}
    shapes = tuple({0: batch, 1: columns} if name in of_columns else {0: batch} for name in inputs)
    size = sum(weight.numel() * weight.element_size() for weight in graph.parameters())
    rest = (shapes[2:],) if isinstance(graph, StageGraph) else shapes[2:]  # *rest is one argument
    with quiet_exporter():
        torch.onnx.export(
            graph.eval(), tuple(arguments), path, dynamo=True, verbose=False, input_names=list(inputs),
            output_names=list(outputs), dynamic_shapes=(*shapes[:2], *rest), external_data=size > LARGE,
        )  # fmt: skip


def quantise(path: Path) -> None:
    """Replace a graph by one with int8 weights; activations are quantised at run time."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model, prepared = onnx.load(path), path.with_suffix(".prepared")
    del model.graph.value_info[:]  # the exporter's shapes contradict the quantiser's
    with quiet_exporter():
        quant_pre_process(model, prepared, skip_symbolic_shape=True, skip_optimization=True)
        # one scale per channel: with one per matrix many texts leave at another layer
        quantize_dynamic(prepared, path, weight_type=QuantType.QInt8, per_channel=True)
    prepared.unlink()


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Hide the exporter's deprecations and its notes on packages that it does not need here."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "root")]
    levels = [log.level for log in loggers]
    for log in loggers:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)


def require_onnx() -> None:
    """Check the packages first: the export itself takes a minute."""
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise StrettoError(
            f"Expected the packages onnx, onnxruntime and onnxscript, got none called {', '.join(missing)}. "
            "Run `pip install 'stretto[onnx]'`."
        )
