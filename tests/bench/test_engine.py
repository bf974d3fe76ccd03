"""`stretto bench engine`: what it runs, what it writes, how it goes on. Nothing depends on how long things take."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import random_inputs, tiny_encoder

from stretto.backbones import backbone_for
from stretto.backbones.spec import LayerMacs
from stretto.bench import engine as bench
from stretto.bench.baselines import GemmLimit, OnnxRuntime, hugging_face
from stretto.bench.engine import bench_engine
from stretto.bench.pool import MIXES, SHAPES, Pool, random_model
from stretto.bench.report.engine import cells, engine_table
from stretto.bench.results import FULL, HF, HF_SORTED, Results
from stretto.bench.script import ScriptedDrop, ScriptedExit, drop_schedule, scheduled_flops
from stretto.bench.timing import Contender, Timed, interleaved, ratio, shuffled
from stretto.deploy.onnx import require_onnx
from stretto.engine.cost import flops, full_flops
from stretto.engine.packed import PackedEngine
from stretto.errors import StrettoError
from stretto.methods.exits import ExitHeads
from stretto.state import Trace

# One thread: on a busy machine a second one only waits, and these matrices are tiny.
QUICK: dict[str, Any] = {
    "shapes": ("tiny",),
    "batches": (1, 2),
    "rounds": 2,
    "threads": 1,
    "onnx": False,
    "progress": False,
}
PACKED = ["full", "drop_2x", "drop_4x", "drop_10x", "exit"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("bench") / "new" / "engine.json"
    found = bench_engine(path, mixes=("sst", "ag_news"), **QUICK)
    assert Results.load(path).rows == found.rows
    assert [file.name for file in path.parent.iterdir()] == ["engine.json"]
    return found


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_results_say_where_they_come_from(results: Results) -> None:
    for row in results.rows:
        assert row.seed == 0
        assert {"torch", "transformers", "stretto"} <= set(row.versions)
        for clock in row.clock:
            assert clock.threads == 1
            assert clock.cpu
            assert clock.date is not None and clock.date.startswith("20")
            assert clock.statistic == "median of ratios"


def test_every_combination_has_every_contender(results: Results) -> None:
    found = cells(results.rows)
    assert [key[1:] for key in found] == [
        (mix, batch, dtype) for mix in ("sst", "ag_news") for batch in (1, 2) for dtype in ("float32", "int8")
    ]
    for (_, mix, batch, _), contenders in found.items():
        assert set(contenders) == {HF, *([HF_SORTED] if batch > 1 else []), "gemm", *PACKED}
        for _, clock in contenders.values():
            assert clock.rounds == (2 if mix == "ag_news" else 1)
            assert clock.tokens is not None and clock.padded_tokens is not None
            assert clock.tokens <= clock.padded_tokens


def test_clocks_hold_consistent_ratios(results: Results) -> None:
    for (_, mix, _, _), found in cells(results.rows).items():
        clocks = {name: clock for name, (_, clock) in found.items()}
        full = clocks[FULL]
        for clock in clocks.values():
            assert 0 < clock.fastest_ms <= clock.ms_per_text <= clock.slowest_ms  # type: ignore[operator]
            assert clock.flops_ratio == pytest.approx(full.gflop / clock.gflop, rel=0.02)  # type: ignore[operator]
            if clock.rounds == 1:  # one ratio is its own median
                for other, faster in clock.ratios.items():
                    assert faster == pytest.approx(clocks[other].ms_per_text / clock.ms_per_text)  # type: ignore[operator]
            assert clock.tracking == clock.ratios[FULL] / clock.flops_ratio
        assert full.flops_ratio == full.ratios[FULL] == 1
        assert clocks[HF].flops_ratio <= 1
        assert clocks["gemm"].flops_ratio > 1
        for factor in (2, 4, 10) if mix == "ag_news" else (2, 4):
            assert clocks[f"drop_{factor}x"].flops_ratio == pytest.approx(factor, rel=0.03)


def test_faster_is_the_median_of_the_ratios_in_each_round() -> None:
    def timed(*times: float) -> Timed:
        return Timed(Contender("a", "float32", [], 1.0), list(times))

    slow, fast = timed(2.0, 9.0, 40.0), timed(1.0, 3.0, 10.0)  # 2, 3, 4 in the rounds; of the medians: 3
    assert ratio(slow, fast) == 3
    assert ratio(timed(4.0, 9.0, 2.0), timed(1.0, 3.0, 10.0)) == 3  # of the medians: 4 / 3


def test_the_gemm_limit_makes_the_products_of_a_trace_and_no_others() -> None:
    backbone = backbone_for(random_model("tiny", 0))
    limit, (d, _, f) = GemmLimit(PackedEngine(backbone)), backbone.specs[0].widths
    rows = [(5, 5, 5), (3, 5, 2), (0, 4, 0), *[(0, 0, 0)] * (backbone.n_layers - 3)]  # all; frozen and dropped; gone
    n_query, n_key, n_ffn = (torch.tensor(column).unsqueeze(0) for column in zip(*rows, strict=True))
    trace = Trace(torch.tensor([5]), n_query, n_key, n_ffn, torch.zeros(1), torch.zeros_like(n_key))
    made: list[int] = []

    def counted(reads: int, writes: int) -> Any:
        def run(x: torch.Tensor) -> None:
            assert x.shape[1] == reads
            made.append(len(x) * reads * writes)

        return run

    layer: Any = SimpleNamespace(
        spec=backbone.specs[0], qkv=counted(d, 3 * d), query=counted(d, d), key_value=counted(d, 2 * d),
        attention_output=counted(d, d), ffn=SimpleNamespace(out=counted(f, d)),
    )  # fmt: skip
    limit.layers = [(layer, counted(d, f))] * backbone.n_layers
    (step,) = limit.steps([trace])
    step()
    attention = d * (5 * (5 + 5) + 5 * (3 + 2))
    assert 2 * sum(made) == limit.flops([trace]) == float(flops(trace, backbone)) - 2 * attention
    assert len(made) == 4 + 5 + 2


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.json"
    measure, calls = bench.ShapeBench.measure, []

    def killed(self: bench.ShapeBench, mix: str, batch: int, *rest: Any) -> Any:
        calls.append((mix, batch))
        if batch == 2 and len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, mix, batch, *rest)

    monkeypatch.setattr(bench.ShapeBench, "measure", killed)
    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        bench_engine(path, mixes=("sst",), dtypes=("float32",), **QUICK)
    assert torch.get_num_threads() == threads
    begun = Results.load(path).rows
    assert {clock.batch for row in begun for clock in row.clock} == {1}
    finished = bench_engine(path, mixes=("sst",), dtypes=("float32",), **QUICK)
    assert calls == [("sst", 1), ("sst", 2), ("sst", 2)]
    assert [row.clock[0] for row in finished.rows[: len(begun)]] == [row.clock[0] for row in begun]
    assert {clock.batch for row in finished.rows for clock in row.clock} == {1, 2}
    assert Results.load(path).rows == finished.rows
    assert bench_engine(path, mixes=("sst",), dtypes=("float32",), **QUICK) == finished  # nothing left to do


def test_results_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    bench_engine(path, mixes=(), **QUICK)
    path.write_text("{}")
    with pytest.raises(StrettoError, match=r"Expected results of format 1 in .*engine.json"):
        bench_engine(path, mixes=(), **QUICK)
    path.unlink()
    bench_engine(path, mixes=("sst",), dtypes=("float32",), **{**QUICK, "batches": (1,)})
    with pytest.raises(StrettoError, match=r"got another seed: 1, before 0"):
        bench_engine(path, mixes=("sst",), seed=1, **QUICK)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shapes": ("bert-bas",)}, "Did you mean 'bert-base'"),
        ({"mixes": ("imbd",)}, "Did you mean 'imdb'"),
        ({"dtypes": ("int4",)}, "got 'int4'"),
        ({"batches": (0,)}, "at least 1"),
        ({"rounds": 0}, "at least 1"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        bench_engine(None, **{**QUICK, **wrong})


def test_missing_onnx_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StrettoError, match=r"onnxruntime.*pip install 'stretto\[onnx\]'"):
        require_onnx()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("factor", [2, 4, 10])
def test_drop_schedules_hit_their_factor(shape: str, mix: str, batch: int, factor: int) -> None:
    sizes = SHAPES[shape]
    d, f, n_layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    spec = SimpleNamespace(macs=LayerMacs(query=d * d, key=2 * d * d, ffn=d * d + 2 * d * f, pair=d))
    head = SimpleNamespace(first_row=True, macs_of=lambda lengths: torch.full_like(lengths, d * d + 2 * d))
    backbone: Any = SimpleNamespace(n_layers=n_layers, specs=[spec] * n_layers, embedding_macs=0, head=head)
    lengths = Pool.of(mix, batch, 200, seed=0).lengths
    keep = drop_schedule(factor, lengths, backbone)
    assert list(keep) == sorted(keep, reverse=True)
    assert keep[-1] > 0
    assert (keep[0] == 1) == (backbone.n_layers / factor >= 1.4)
    ratio = float(full_flops(lengths, backbone).sum() / scheduled_flops(keep, lengths, backbone))
    assert ratio == pytest.approx(factor, rel=0.03)


@pytest.mark.usefixtures("one_thread")
def test_the_engine_does_what_the_schedule_says() -> None:
    backbone = backbone_for(random_model("tiny", 0))
    pool = Pool.of("ag_news", 8, 200, seed=3)
    keep = drop_schedule(4, pool.lengths, backbone)
    traces = [PackedEngine(backbone).run(inputs, ScriptedDrop(keep), 0.0).trace for inputs in pool.mixed]
    assert sum(float(flops(trace, backbone).sum()) for trace in traces) == float(
        scheduled_flops(keep, pool.lengths, backbone)
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.usefixtures("one_thread")
def test_half_of_the_sequences_exit(batch: int) -> None:
    backbone = backbone_for(random_model("tiny", 0))
    exits = ExitHeads(backbone.d, backbone.n_layers - 1, 2, "mean", 0.0)
    pool = Pool.of("sst", batch, 200, seed=0)
    depths, spent = [], []
    for index, inputs in enumerate(pool.mixed):
        trace = PackedEngine(backbone).run(inputs, ScriptedExit(2, exits, index * batch), 0.0).trace
        depths += trace.depth.tolist()
        spent += trace.decider_macs.tolist()
    assert depths == [2, 6] * (len(depths) // 2)
    assert spent == [exits.macs, exits.macs + backbone.head.macs] * (
        len(spent) // 2
    )  # those who stay have asked the exit too


@pytest.mark.parametrize(("mix", "mean", "deviation"), [("sst", 25, 11), ("ag_news", 53, 18), ("imdb", 265, 145)])
def test_length_mixes(mix: str, mean: float, deviation: float) -> None:
    lengths = MIXES[mix].sample(3000, random.Random(0))
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.05)
    assert statistics.stdev(lengths) == pytest.approx(deviation, rel=0.1)
    assert MIXES[mix].shortest <= min(lengths) < max(lengths) <= MIXES[mix].longest
    assert lengths == MIXES[mix].sample(3000, random.Random(0))
    few = MIXES[mix].sample(16, random.Random(1))
    assert statistics.mean(few) == pytest.approx(mean, rel=0.15)  # a small pool is like the mix too


def test_a_sorted_pool_has_the_same_texts_and_less_padding() -> None:
    pool = Pool.of("ag_news", 8, 200, seed=0)

    def texts(batches: list[Any]) -> list[list[int]]:
        return sorted([i for i in row if i] for inputs in batches for row in inputs.input_ids.tolist())

    assert texts(pool.mixed) == texts(pool.sorted)
    assert sum(b.input_ids.numel() for b in pool.sorted) < sum(b.input_ids.numel() for b in pool.mixed)


def test_rounds_interleave_and_warm_up_when_the_library_changes() -> None:
    calls: list[str] = []
    contenders = [
        Contender(name, "float32", [lambda name=name: calls.append(name)] * 2, 1.0, library)  # type: ignore[misc]
        for name, library in (("a", "torch"), ("b", "onnx"), ("c", "torch"))
    ]
    timed = interleaved(contenders, 4, random.Random(0))
    assert [(t.contender.name, len(t.times)) for t in timed] == [("a", 4), ("b", 4), ("c", 4)]
    assert calls.count("a") + calls.count("c") > 16  # two calls a round each, and the warm-ups
    orders = {tuple(shuffled(contenders, random.Random(seed))) for seed in range(50)}
    assert orders == {(0, 2, 1), (2, 0, 1), (1, 0, 2), (1, 2, 0)}  # never b between a and c


def test_the_table_has_a_line_per_timing(results: Results) -> None:
    lines = engine_table(results.rows)
    assert len(lines) == sum(len(row.clock) for row in results.rows)
    assert len({tuple(line) for line in lines}) == 1
    assert all(isinstance(value, str) for line in lines for value in line.values())


@pytest.mark.usefixtures("one_thread")
def test_onnx_runtime_computes_the_same(tmp_path: Path) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    model = random_model("tiny", 0)
    runtime = OnnxRuntime(model, tmp_path, threads=1)
    for batch in (3, 1):  # any shape, though exported with one
        pool = Pool.of("sst", batch, 200, seed=0)
        expected = hugging_face(model, pool.mixed)[0]().logits.numpy()  # type: ignore[attr-defined]
        for dtype, tolerance in (("float32", 1e-6), ("int8", 5e-3)):
            got = runtime.steps(pool.mixed, dtype)[0]()[0]  # type: ignore[index]
            assert got == pytest.approx(expected, abs=tolerance)


@pytest.mark.usefixtures("one_thread")
def test_onnx_runtime_takes_a_model_without_types_that_answers_questions(tmp_path: Path) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    model = tiny_encoder("mpnet", 2, 2, "QuestionAnswering")
    inputs = random_inputs([7, 4], types=False)
    expected = hugging_face(model, [inputs])[0]()
    got = OnnxRuntime(model, tmp_path, threads=1).steps([inputs], "float32")[0]()[0]  # type: ignore[index]
    for place, name in enumerate(("start_logits", "end_logits")):
        wanted = getattr(expected, name).numpy()
        assert got[0, :, place] == pytest.approx(wanted[0], abs=1e-5)
        assert got[1, :4, place] == pytest.approx(wanted[1, :4], abs=1e-5)
