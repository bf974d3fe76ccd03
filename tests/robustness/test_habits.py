"""What commands say on the way: how to resume, how many, what looks odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import Terminal, run
from sources import write
from tqdm import tqdm

from stretto.cli import verbs
from stretto.data import hub
from stretto.data.labels import mixed_kinds
from stretto.errors import counted

#: A command, the function that Ctrl-C meets, and what is said of the place where its work is kept.
INTERRUPTED = {
    "bench engine --json OUT.json": ("stretto.bench.engine.bench_engine", "OUT.json"),
    "bench decoder --json OUT.json": ("stretto.bench.decoder.bench_decoder", "OUT.json"),
    "bench engine": ("stretto.bench.engine.bench_engine", ""),
    "compare SUITE --output OUT": ("stretto.bench.compare.Comparison.run", "OUT"),
    "demo --output OUT": ("stretto.bench.demo.run_demo", "OUT"),
    "search ADAPTIVE TEST --output OUT": ("stretto.budget.search.search", "OUT.search"),
    "evaluate MODEL TEST": ("stretto.budget.sweep.sweep", ""),
    "calibrate MODEL TEST --cost 0.5": ("stretto.budget.calibrate.calibrate", ""),
    "bench model MODEL TEST": ("stretto.bench.model.bench_model", ""),
    "export MODEL --onnx OUT": ("stretto.deploy.onnx.export_onnx", ""),
    "rationales MODEL RATIONALES": ("stretto.view.rationales.agreement", ""),
}
SUITE = Path(__file__).parents[2] / "benchmarks/suites/quick.yaml"


@pytest.mark.parametrize("command", INTERRUPTED)
def test_ctrl_c_says_how_to_resume(command: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, kept = INTERRUPTED[command]
    out = tmp_path / "out"
    place = kept.replace("OUT", str(out))

    def stop(*_: Any, **__: Any) -> Any:
        if kept.endswith(".json"):
            Path(place).write_text("{}")
        elif kept:
            Path(place).mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(function, stop)
    monkeypatch.setattr("stretto.bench.compare.Comparison.check", lambda _: None)
    monkeypatch.setattr("stretto.bench.compare.Comparison.plan", lambda _: [{"hours": 1.0}])
    names = {
        "SUITE": SUITE, "MODEL": shared / "model", "TEST": shared / "test.jsonl",
        "ADAPTIVE": shared / "adaptive", "RATIONALES": shared / "rationales.jsonl",
    }  # fmt: skip
    result = run(*(names.get(word, word.replace("OUT", str(out))) for word in command.split()))
    assert result.exit_code == 130, result.stderr
    told = f"The work so far is in '{place}': the same command resumes it"
    assert result.stderr.splitlines()[-1].startswith(
        f"interrupted. {told if kept else 'The same command starts from the beginning.'}"
    )


def test_labels_that_mix_numbers_and_words(shared: Path, tmp_path: Path) -> None:
    assert mixed_kinds(["bad", "good"]) == mixed_kinds(["0", "1"]) == ""
    write(tmp_path / "d.csv", "text,label\n" + "a,1\nb,2\nc,n/a\n" * 9)
    args = ["train", tmp_path / "d.csv", "--model", shared / "encoder", "--output", tmp_path / "out"]
    result = run(*args, "--max-length", 2)
    assert result.exit_code == 1
    assert "labels mix numbers ('1', '2') and words ('n/a'): each is a class of its own" in result.stderr


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is tried, so that a missing name is refused within seconds."""
    asked = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append((url, timeout))
            raise ConnectionError

    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", asked.append)
    hub._answers.cache_clear()
    for args in (["predict", "owner/name"], ["train", "owner/data", "--model", "owner/name", "--output", "out"]):
        result = run(*args)
        assert result.exit_code == 1
        assert result.stderr == (
            "error: Expected a model folder or a name on the hub, got 'owner/name', which is neither a folder here nor "
            "in the cache of hub models, and the hub cannot be reached. Check the path or the network.\n"
        )
    assert run("pretrain", "owner/data", "out", "--vocab-size", 60).stderr.count("no answer from the hub") == 1
    assert asked == [("https://huggingface.co", hub.PATIENCE)]
    hub._answers.cache_clear()


def test_one_and_many(shared: Path, tmp_path: Path) -> None:
    assert [counted(n, "text") for n in (0, 1, 2)] == ["0 texts", "1 text", "2 texts"]
    one = write(tmp_path / "one.csv", "text,label\na good film,good\n")
    assert "deebert on 1 example;" in run("evaluate", shared / "model", one, "--dials", 0).stdout
    assert "wrote 1 answer to" in run("predict", shared / "model", one, "--output", tmp_path / "a.jsonl").stderr
    long = write(tmp_path / "long.csv", f"text\n{'very ' * 100}\n")
    assert "truncated to 64 tokens: 1 of 1 text\n" in run("predict", shared / "model", long).stderr


def test_an_error_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a progress bar that it cut short."""
    stream = Terminal()
    bar = tqdm(total=9, file=stream)
    bar.update(4)
    monkeypatch.setattr("sys.stderr", stream)
    verbs._tell("error: no")
    assert stream.getvalue().endswith("\nerror: no\n")
    assert bar not in tqdm._instances
