"""`stretto bench decoder`: how fast texts are written, and what tokens that leave early are worth in time.

Random weights, so that only the engines are compared. For every model shape and batch size the same sentences go
through all contenders in interleaved rounds; all write the same number of tokens, greedily, from ready tensors:

    huggingface    `generate` (fp32)
    ctranslate2    CTranslate2, where it is installed
    full           this engine, every token through all blocks
    exit_3, …      this engine, tokens leave by a script, after this many blocks on average

A contender is a row of the results, with a timing for each batch size and dtype.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import MarianConfig, MarianMTModel

from stretto.backbones.marian import Marian
from stretto.bench.ctranslate import MISSING, CTranslate2, is_installed
from stretto.bench.engine import add, check_same_run, warm
from stretto.bench.results import CT2, FULL, HF, Clock, Results, Row, now
from stretto.bench.timing import Contender, Timed, interleaved, ratio
from stretto.engine.cost import Cost
from stretto.engine.decider import Decider, Silent
from stretto.engine.linear import DTYPES
from stretto.engine.seq2seq import Seq2SeqEngine
from stretto.errors import Registry, StrettoError
from stretto.saving.versions import cpu_name, known_versions
from stretto.state import Decision, Inputs, Point, Stack, State

SUITE = "decoder"
SET = "random"
SOURCE, NEW = 20, 25
"""Tokens of a sentence, and of its text."""
TIMED = 4
"""Sentences that are timed at batch size 1. Of a larger size it is one batch."""
#: The blocks (of 6) that tokens leave at, in turn: 1.5 and 3 on average.
SCRIPTS = {"exit_1.5": (1, 2), "exit_3": (1, 5, 2, 4)}

SHAPES: Registry[dict[str, int]] = Registry(
    "model shape",
    {
        "opus-mt": {"d": 512, "ffn": 2048, "encoder": 6, "heads": 8, "vocabulary": 58101},
        "multi30k": {"d": 128, "ffn": 256, "encoder": 3, "heads": 4, "vocabulary": 3001},
        "tiny": {"d": 32, "ffn": 64, "encoder": 2, "heads": 4, "vocabulary": 300},
    },
)


def random_translator(shape: str, seed: int) -> Any:
    """A Marian with 6 decoder blocks; padding is the last token, as in every opus-mt model."""
    sizes = SHAPES[shape]
    torch.manual_seed(seed)
    pad = sizes["vocabulary"] - 1
    config = MarianConfig(
        vocab_size=sizes["vocabulary"], d_model=sizes["d"], encoder_layers=sizes["encoder"], decoder_layers=6,
        encoder_attention_heads=sizes["heads"], decoder_attention_heads=sizes["heads"], encoder_ffn_dim=sizes["ffn"],
        decoder_ffn_dim=sizes["ffn"], max_position_embeddings=512, scale_embedding=True, pad_token_id=pad,
        decoder_start_token_id=pad, eos_token_id=0, bos_token_id=0, forced_eos_token_id=None,
        activation_function="swish",
    )  # fmt: skip
    return MarianMTModel(config).eval()


class ScriptedBlocks(Silent):
    """Lets tokens leave at the blocks of a script, in turn, each sentence from another place in it."""

    points: frozenset[Point] = frozenset({"before"})
    stacks: frozenset[Stack] = frozenset({"decoder"})

    def __init__(self, script: Sequence[int]) -> None:
        super().__init__()
        self.script = torch.tensor(script)

    def decide(self, state: State) -> Decision:
        notes = state.notes_of(self).sequences
        if "exit" not in notes:  # once for each token, as a trained mechanism would
            notes["exit"] = self.block_of(state.ids, state.position)
        return Decision(freeze=notes["exit"] < state.layer)

    def block_of(self, sentence: Tensor, position: Tensor) -> Tensor:
        return self.script[(sentence + position) % len(self.script)]


def bench_decoder(
    output: Path | None, *, shapes: Sequence[str] = ("opus-mt", "multi30k"), batches: Sequence[int] = (1, 8, 32),
    dtypes: Sequence[str] = DTYPES, rounds: int = 5, seed: int = 0, threads: int = 2, progress: bool = True,
    say: Callable[[str], None] = print,
) -> Results:  # fmt: skip
    """Measure every combination that `output` does not hold yet; return all results, as written to `output`."""
    for shape in shapes:
        _ = SHAPES[shape]
    if rounds < 1 or any(batch < 1 for batch in batches):
        raise StrettoError(
            f"Expected rounds and batch sizes of at least 1, got {rounds} and {list(batches)}. Raise them."
        )
    if not is_installed():
        say(MISSING)
    results = Results.start(SUITE, output)
    check_same_run(results, seed, threads, lambda row: rounds)
    measured = {
        (row.model, clock.batch, clock.dtype) for row in results.rows for clock in row.clock if row.name == FULL
    }
    todo = [
        (shape, batch, missing)
        for shape, batch in itertools.product(shapes, batches)
        if (missing := [dtype for dtype in dtypes if (shape, batch, dtype) not in measured])
    ]
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with tqdm(total=rounds * len(todo), unit="round", disable=not progress) as bar:
            for shape, jobs in itertools.groupby(todo, key=lambda job: job[0]):
                with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
                    bench = DecoderBench(shape, seed, threads, Path(folder))
                    for _, batch, missing in jobs:
                        bar.set_description(f"{shape} batch {batch}")
                        for row in bench.measure(batch, missing, rounds, bar.update):
                            add(results, row)
                        results.write()
    finally:
        torch.set_num_threads(threads_before)
    return results


class DecoderBench:
    """One model shape: what is built once for all its measurements."""

    def __init__(self, shape: str, seed: int, threads: int, folder: Path) -> None:
        self.shape, self.seed, self.threads = shape, seed, threads
        self.model = random_translator(shape, seed)
        self.backbone = Marian(self.model)
        self.ctranslate2 = CTranslate2(self.model, folder, threads) if is_installed() else None
        settings = {"min_new_tokens": NEW, "max_new_tokens": NEW}
        self.engines = {dtype: Seq2SeqEngine(self.backbone, dtype, settings) for dtype in DTYPES}

    def pool(self, batch: int) -> list[Inputs]:
        """Sentences of one length, so that nothing is padded."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (max(1, TIMED // batch), batch, SOURCE)
        ids = torch.randint(2, self.model.config.pad_token_id, shape, generator=generator)
        ids[..., -1] = self.model.config.eos_token_id
        return [Inputs(part, torch.ones_like(part)) for part in ids]

    def measure(self, batch: int, dtypes: Sequence[str], rounds: int, after_round: Callable[[], object]) -> list[Row]:
        pool = self.pool(batch)
        contenders = [self.hugging_face(pool)]
        for dtype in dtypes:
            contenders += self.contenders(pool, dtype)
        timed = interleaved(contenders, rounds, random.Random(f"{self.seed}/{batch}"), after_round)
        texts = sum(len(inputs.input_ids) for inputs in pool)
        facts = {
            "batch": batch, "rounds": rounds, "threads": self.threads, "cpu": cpu_name(), "date": now(),
            "sequences": texts, "tokens": texts * NEW,
        }  # fmt: skip
        found: dict[str, list[Clock]] = {}
        for dtype in dtypes:
            for name, clock in clocks(timed, dtype, facts).items():
                found.setdefault(name, []).append(clock)
        return [
            Row(
                set=SET, model=self.shape, name=name, method=name, seed=self.seed, command="stretto bench decoder",
                versions=known_versions(), task="seq2seq", clock=entries,
            )
            for name, entries in found.items()
        ]  # fmt: skip

    def hugging_face(self, pool: Sequence[Inputs]) -> Contender:
        generate = torch.inference_mode()(self.model.generate)
        steps = [
            partial(
                generate, input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, min_new_tokens=NEW,
                max_new_tokens=NEW,
            )
            for inputs in pool
        ]  # fmt: skip
        return Contender(HF, "float32", steps, self.full_flops(pool))

    def contenders(self, pool: Sequence[Inputs], dtype: str) -> Iterator[Contender]:
        if self.ctranslate2 is not None:
            steps = self.ctranslate2.steps(pool, dtype, NEW)
            yield warm(Contender(CT2, dtype, steps, self.full_flops(pool), library=CT2))
        yield self.ours(FULL, dtype, pool, Silent())
        for name, script in SCRIPTS.items():
            yield self.ours(name, dtype, pool, ScriptedBlocks(script))

    def ours(self, name: str, dtype: str, pool: Sequence[Inputs], decider: Decider) -> Contender:
        """Counting the FLOPs runs a batch, and so warms up. All are of one shape and written to one length."""
        steps = [partial(self.engines[dtype].run, inputs, decider, 0.0, scored=False) for inputs in pool]
        work = float(Cost.of(steps[0]().trace, self.backbone).flops.sum()) * len(steps)
        return Contender(name, dtype, steps, work)

    def full_flops(self, pool: Sequence[Inputs]) -> float:
        trace = self.engines["float32"].run(pool[0], Silent(), 0.0).trace
        return float(Cost.of(trace, self.backbone).full.sum()) * len(pool)


def clocks(timed: Sequence[Timed], dtype: str, facts: dict[str, Any]) -> dict[str, Clock]:
    """A timing of each contender of this dtype, against the full decoder, `generate` and CTranslate2."""
    own = {each.contender.name: each for each in timed if each.contender.dtype == dtype or each.contender.name == HF}
    return {
        name: Clock(
            **facts,
            dtype=dtype,
            gflop=round(this.contender.flops / 1e9, 4),
            flops_ratio=round(own[FULL].contender.flops / this.contender.flops, 4),
            ratios={other: ratio(own[other], this) for other in (FULL, HF, CT2) if other in own},
            ms_per_text=1000 * this.median / facts["sequences"],
            fastest_ms=1000 * min(this.times) / facts["sequences"],
            slowest_ms=1000 * max(this.times) / facts["sequences"],
        )
        for name, this in own.items()
    }
