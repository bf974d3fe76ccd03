"""`stretto export`: a model as ONNX graphs."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from stretto.cli.options import Dtype, Json, ModelFolder
from stretto.cli.output import STDOUT, open_model, say, write_json
from stretto.errors import counted

EXAMPLES = """
stretto export reviews-model --onnx reviews-onnx                  # exits: one graph per layer
stretto export reviews-model --onnx reviews-onnx --stages 3 --dtype int8
stretto export adaptive-model --onnx adaptive-onnx --dial 0.5     # fewer tokens per layer: one graph
stretto export reviews-model --onnx full-onnx --dial 0 --whole    # the full model as one graph
"""


def export(
    model: ModelFolder,
    onnx: Annotated[str, Option(metavar="FOLDER", help="A new folder for the graphs, tokenizer and contract.")],
    dial: Annotated[float | None, Option(help="The operating point; default: the model's own dial.")] = None,
    stages: Annotated[
        int | None, Option(min=1, help="Number of graphs for a model with exits; default: one per layer.")
    ] = None,
    whole: Annotated[bool, Option("--whole", help="Write a single graph (for a fixed depth).")] = False,
    dtype: Dtype = "float32",
    json: Json = None,
) -> None:
    """Write ONNX graphs for ONNX Runtime in any language, and check their answers against the model's."""
    from stretto.deploy.onnx import export_onnx

    contract = export_onnx(open_model(model), onnx, dial=dial, dtype=dtype, stages=stages, whole=whole)
    write_json(json, contract)
    if json != STDOUT:
        say(f"wrote {counted(len(contract['graphs']), 'graph')} and the tokenizer to {onnx}; largest difference of "
            f"a logit from stretto's own: {contract['largest_difference']:.1e}; "
            f"{contract['same_depth']:.0%} of random texts left at the same layer")  # fmt: skip
