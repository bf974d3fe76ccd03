"""Answer the blocks of a job with several processes on this machine, each with one thread."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from stretto.deploy.bulk import Block, Done, Job, Key, Stamp, Worker, unfinished
from stretto.errors import StrettoError
from stretto.model import AdaptiveModel
from stretto.saving.folder import quiet_transformers

#: The job gives up after so many kills without a finished block in between.
MOST_KILLED = 3
#: Processes are forked from a small server process without threads. A fork of this process could inherit locks that
#: its threads hold.
START = multiprocessing.get_context("forkserver")

_worker: Worker | None = None  # of a process of the pool


def in_processes(job: Job, finished: Mapping[Key, Stamp], workers: int) -> Iterator[Done]:
    """The finished blocks, in order. Two blocks for each worker are in memory.

    If a worker is killed, its pool breaks: a new pool gets the unfinished blocks."""
    killed = 0
    waiting: deque[tuple[Block, Future[Done]]] = deque()
    blocks = unfinished(job, finished)
    pool = start_pool(job, workers)
    try:
        while True:
            try:
                while len(waiting) < 2 * workers and (block := next(blocks, None)) is not None:
                    waiting.append((block, Future()))  # unfinished, also if the pool is broken already
                    waiting[-1] = block, pool.submit(answer, block)
                if not waiting:
                    return
                done = waiting[0][1].result()
            except BrokenProcessPool:
                killed += 1
                if killed == MOST_KILLED:
                    raise StrettoError(
                        f"Expected workers that run to the end, got {killed} killed one after another. "
                        "There may be too little memory: use fewer --workers or a smaller --batch-size."
                    ) from None
                pool.shutdown(cancel_futures=True)
                pool = start_pool(job, workers)
                waiting = deque((block, old if is_done(old) else pool.submit(answer, block)) for block, old in waiting)
                continue
            waiting.popleft()
            killed = 0
            yield done
    finally:
        pool.shutdown(cancel_futures=True)


def is_done(future: Future[Done]) -> bool:
    return future.done() and not future.cancelled() and not isinstance(future.exception(), BrokenProcessPool)


def start_pool(job: Job, workers: int) -> ProcessPoolExecutor:
    START.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(workers, START, begin, (job,))


def begin(job: Job) -> None:
    """In a process of the pool: load the model."""
    global _worker
    _worker = one_thread(job)


def one_thread(job: Job) -> Worker:
    import torch

    torch.set_num_threads(1)
    with quiet_transformers():
        model = AdaptiveModel.from_pretrained(job.model, dtype=job.dtype)
    model.generation.update(job.generation)
    return Worker(job, model)


def answer(block: Block) -> Done:
    assert _worker is not None
    return _worker(block)
