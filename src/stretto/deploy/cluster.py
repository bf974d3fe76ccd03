"""Answer the blocks of a job with a pool of Ray actors, on this machine or on a cluster (extra `bulk`).

One task per input reads its blocks; actors with one thread each answer and write them. Reading needs a CPU too: if the
actors reserved all of them, the job would hang. `shares` leaves enough for reading.
The inputs, the model folder and the output folder must have the same names on all machines.

If an actor is killed, Ray restarts it and gives its block to another one. A part gets its name in one atomic step, so a
block that is answered twice is still written once.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from stretto.deploy.bulk import Done, Job, Key, Stamp, blocks_of
from stretto.deploy.processes import one_thread
from stretto.errors import StrettoError

#: Instead of an address: a cluster on this machine alone, for the time of the job.
LOCAL = "local"


def on_ray(job: Job, finished: Mapping[Key, Stamp], address: str, workers: int | None) -> Iterator[Done]:
    """The finished blocks, in order. Default for `workers`: the number of CPUs, minus one."""
    ray = connect(address)
    try:
        cpus = float(ray.cluster_resources().get("CPU", 1))
        workers = workers or max(1, int(cpus) - 1)
        reading, answering = shares(cpus, workers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the copy reads deprecated settings of Ray
            context = ray.data.DataContext.get_current().copy()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.target_max_block_size = 1  # one of our blocks is one of Ray's, so that all actors get some
        with ray.data.DataContext.current(context):
            inputs = ray.data.from_items(
                [{"input": number} for number in range(len(job.sources))], override_num_blocks=len(job.sources)
            )
            blocks = inputs.map_batches(
                read_input, batch_size=1, num_cpus=reading, fn_kwargs={"job": job, "finished": dict(finished)}
            )
            pool = ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=2)
            answered = blocks.map_batches(
                RayWorker, batch_size=1, compute=pool, num_cpus=answering, fn_constructor_args=(job,)
            )
        for row in answered.iter_rows():
            found = json.loads(row["done"])
            yield Done(**{**found, "key": tuple(found["key"])})
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, StrettoError) else error from None
    finally:
        ray.shutdown()


def read_input(batch: Mapping[str, Any], job: Job, finished: Mapping[Key, Stamp]) -> Iterator[dict[str, list[bytes]]]:
    """In a task: the blocks of one input, one after another."""
    for block in blocks_of(job, int(batch["input"][0]), finished):
        yield {"block": [pickle.dumps(block)]}


class RayWorker:
    """In an actor: a model with one thread."""

    def __init__(self, job: Job) -> None:
        self.worker = one_thread(job)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        return {"done": [json.dumps(asdict(self.worker(pickle.loads(block)))) for block in batch["block"]]}


def shares(cpus: float, workers: int) -> tuple[float, float]:
    """CPUs for a task that reads, and for an actor: one each, or less so that all fit at the same time."""
    reading = min(1.0, cpus / 2)
    return reading, min(1.0, int(1000 * (cpus - reading) / workers) / 1000)


def connect(address: str) -> Any:
    """Ray's module, connected."""
    if importlib.util.find_spec("ray") is None:
        raise StrettoError("Expected the package ray, got none. Run `pip install 'stretto[bulk]'`.")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray advises, instead of a warning
    if address == LOCAL:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default workers yield to all other processes
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # else it reports every plan on stderr
    try:
        dashboard = False if address == LOCAL else None
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=dashboard)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StrettoError(
            f"Expected a Ray cluster at '{address}', got: {' '.join(str(error).split()):.200}. "
            "Start one (`ray start --head`), or write --ray local."
        ) from None
    return ray
