"""What people serve today, to compare with: FastAPI in front of a Hugging Face pipeline, or of ONNX Runtime in int8.

    python -m stretto.bench.plain_server huggingface|onnx DIR THREADS

One text per request, one after the other, in a thread of its own. It prints its address as `stretto serve` does.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from stretto.deploy.run import Process, listen

Scores = list[dict[str, Any]]


class Body(BaseModel):
    inputs: str


def hugging_face(folder: str) -> Callable[[str], Scores]:
    from transformers import pipeline

    answer: Any = pipeline("text-classification", model=folder, device="cpu")
    return lambda text: answer(text, truncation=True, top_k=None)


def onnx_runtime(folder: str, threads: int) -> Callable[[str], Scores]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from stretto.bench.baselines import OnnxRuntime, known_names

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as place:
        runtime = OnnxRuntime(model, Path(place), threads)
        session = runtime.session(runtime.quantised())
    names, labels = known_names(model), model.config.id2label

    def answer(text: str) -> Scores:
        tokens = tokenizer([text], truncation=True, return_tensors="np")
        ids = tokens["input_ids"]
        (logits,) = session.run(None, {name: tokens.get(name, 0 * ids) for name in names})
        scores = torch.from_numpy(logits[0]).softmax(dim=0).tolist()
        found = [{"label": labels[number], "score": score} for number, score in enumerate(scores)]
        return sorted(found, key=lambda each: each["score"], reverse=True)

    return answer


def create_app(answer: Callable[[str], Scores]) -> FastAPI:
    app = FastAPI()
    thread = ThreadPoolExecutor(1)

    @app.post("/predict")
    async def predict(body: Body) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, answer, body.inputs)

    return app


def main(kind: str, folder: str, threads: str) -> None:
    import torch

    torch.set_num_threads(int(threads))
    answer = hugging_face(folder) if kind == "huggingface" else onnx_runtime(folder, int(threads))
    answer("warm up")
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(create_app(answer), log_level="warning", access_log=False)
    line = f"serving {kind} at http://127.0.0.1:{listening.getsockname()[1]}/"
    Process(config, lambda: print(line, file=sys.stderr, flush=True)).run([listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
