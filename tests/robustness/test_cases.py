"""A table of bad inputs: each ends with one line that says what to do, and leaves nothing behind.

A case is (command, files that are there, exit code, part of the message). In a command M, A and E are a model, one that
can be searched and a plain encoder; D and T are labelled texts. Files are written to the folder the command runs in.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from safetensors.torch import load_file, save_file
from sources import write

Files = dict[str, str | bytes]
CSV = "text,label\na good film,good\na dull film,bad\n"
PAIRS = "text_a,text_b,label\na,b,good\nc,d,bad\n"
TAGS = '{"tokens": ["a", "b"], "tags": ["O", "B-x"]}\n'
TRAIN = "train d.csv --model E --output out"
SUITE = "name: s\nabout: a\nmodel: m\nsets: {a: {train: a.train, test: a.test, epochs: 1}}\nrecipes: {full: {}}\n"
TAGGER = "train d.jsonl --model E --output out --method full --task"

#: What is read.
DATA: list[tuple[str, Files, int, str]] = [
    ("predict M nowhere.csv", {}, 1, "got 'nowhere.csv': file not found"),
    ("predict M d.cvs", {"d.csv": CSV}, 1, "Did you mean 'd.csv'?"),
    ("predict M no/such/file.csv", {}, 1, "There is no folder 'no/such' either"),
    ("predict M .", {}, 1, "expected a folder made by save_to_disk"),
    ("predict M d.md", {"d.md": CSV}, 1, "expected a name ending in .csv"),
    ("predict M d.csv", {"d.csv": ""}, 1, "expected at least one row of data, got none"),
    ("predict M d.csv", {"d.csv": "text,label\n"}, 1, "expected at least one row of data, got none"),
    ("predict M d.csv", {"d.csv": "body,stars\na,1\n"}, 1, "Name it with --text"),
    ("predict M d.csv --text title", {"d.csv": CSV}, 1, "expected a column 'title', got the columns 'text', 'label'"),
    ("predict M d.csv --text-b label", {"d.csv": CSV}, 1, "Expected --text together with --text-b"),
    ("predict M d.csv", {"d.csv": "text,text\na,b\n"}, 1, "expected different column names"),
    ("predict M d.csv", {"d.csv": CSV + "one,two,three\n"}, 1, "d.csv:4: expected 2 fields"),
    ("predict M d.csv", {"d.csv": CSV + '"open\n'}, 1, "expected closed quotes"),
    ("predict M d.csv", {"d.csv": "text;label\na;b\n"}, 1, "Add --delimiter ';'"),
    ("predict M d.csv", {"d.csv": "text|label\na|b\n"}, 1, "Add --delimiter '|'"),
    ("predict M d.csv", {"d.csv": "text\tlabel\na\tb\n"}, 1, "Add --delimiter tab"),
    ("predict M d.tsv", {"d.tsv": CSV}, 1, "Add --delimiter ','"),
    ("predict M d.csv --delimiter ab", {"d.csv": CSV}, 1, "Expected one character or 'tab' as the delimiter"),
    ("predict M d.jsonl --delimiter ;", {"d.jsonl": "{}"}, 1, "Expected a .csv or .tsv file with --delimiter"),
    ("predict M d.csv", {"d.csv": gzip.compress(CSV.encode(), mtime=0)}, 1, "got a gzip file. Rename it to end in .gz"),
    ("predict M d.csv.gz", {"d.csv.gz": CSV}, 1, "got another kind of file. Remove .gz from its name"),
    ("predict M d.csv.gz", {"d.csv.gz": gzip.compress(CSV.encode() * 99, mtime=0)[:80]}, 1, "got a truncated or"),
    ("predict M d.csv", {"d.csv": b"PK\x03\x04\0\0"}, 1, "got a zip archive"),
    ("predict M d.csv", {"d.csv": CSV.encode("utf-16")}, 1, "got text in UTF-16"),
    ("predict M d.csv", {"d.csv": CSV.encode("utf-16-le")}, 1, "got text in UTF-16"),
    ("predict M d.csv", {"d.csv": CSV.encode() + b"caf\xe9,good\n"}, 1, "d.csv:4: expected UTF-8, got the byte 0xe9"),
    ("predict M d.txt", {"d.txt": b"PAR1\0\0"}, 1, "got a parquet file"),
    ("predict M d.parquet", {"d.parquet": CSV}, 1, "expected a parquet file"),
    ("predict M d.parquet", {"d.parquet": ""}, 1, "expected a parquet file"),
    ("predict M d.jsonl", {"d.jsonl": '{"text": "a"}\n{"text":\n'}, 1, "d.jsonl:2: expected one JSON object per line"),
    ("predict M d.jsonl", {"d.jsonl": '["a"]\n'}, 1, "got a JSON list"),
    ("predict M d.jsonl", {"d.jsonl": "3\n"}, 1, "got a JSON int"),
    ("predict M d.jsonl", {"d.jsonl": "[" * 9999}, 1, "got bad JSON"),
    ("predict M d.jsonl", {"d.jsonl": '{"text": null}\n'}, 1, "expected a text in 'text', got null"),
    ("predict M d.jsonl", {"d.jsonl": '{"text": 3}\n'}, 1, "expected a text in 'text', got 3 (int)"),
    ("predict M d.jsonl", {"d.jsonl": '{"text": "\\ud83d"}\n'}, 1, "got half a surrogate pair"),
    ("predict M d.jsonl", {"d.jsonl": '{"text": "a"}\n{"txt": "a"}\n'}, 1, "d.jsonl:2: expected a text in 'text'"),
    ("predict M d.json", {"d.json": '[{"text": "a"}, 3]'}, 1, "expected a JSON list of objects, got 3"),
    ("predict M d.json", {"d.json": '[{"text": "a"}'}, 1, "expected a JSON list of objects, got bad JSON"),
    ("predict M d.csv --split test", {"d.csv": CSV}, 1, "Expected a hub dataset to split"),
    ("predict M d.csv --keep id", {"d.csv": CSV}, 1, "expected the column 'id' to keep"),
    ("predict M d.csv --keep score", {"d.csv": "text,score\na,1\n"}, 1, "do not --keep it"),
    ("evaluate M d.csv", {"d.csv": "text\na\n"}, 1, "Name it with --label"),
    ("evaluate M d.csv", {"d.csv": CSV + "a,great\n"}, 1, "d.csv:4: expected one of the labels 'bad', 'good', got"),
    ("evaluate M d.csv", {"d.csv": CSV + "a,\n"}, 1, "d.csv:4: expected a label in 'label', got none"),
    ("evaluate M d.csv --label stars", {"d.csv": CSV}, 1, "expected a column 'stars'"),
    ("evaluate M d.jsonl", {"d.jsonl": '{"text": "a", "label": [1]}\n'}, 1, "expected a word or a number in 'label'"),
    ("evaluate M d.jsonl", {"d.jsonl": '{"text": "a", "label": NaN}\n'}, 1, "expected a label in 'label', got none"),
    ("evaluate M d.csv", {"d.csv": "text,category,class\na,b,c\n"}, 1, "got category and class among"),
    ("bench model M d.csv", {"d.csv": "body\na\n"}, 1, "Name it with --text"),
    ("search A d.csv --objective score", {"d.csv": CSV + "a,great\n"}, 1, "expected one of the labels"),
    ("rationales M d.jsonl", {"d.jsonl": '{"text": "a", "label": "x"}\n'}, 1, "expected a list of words in 'tokens'"),
    ("calibrate M d.csv --cost 0.5", {"d.csv": ""}, 1, "expected at least one row of data, got none"),
    ("calibrate M d.csv --cost 0.5", {"d.csv": "body,stars\na,1\n"}, 1, "Name it with --text"),
    ("calibrate M d.csv --max-loss 1", {"d.csv": "text\na\n"}, 1, "Name it with --label"),
    ("calibrate M d.csv --max-loss 1", {"d.csv": CSV + "a,great\n"}, 1, "expected one of the labels"),
    ("calibrate M d.csv --max-loss 1", {"d.csv": CSV}, 1, "Expected at least"),
    ("compare s.yaml", {"s.yaml": "name: a\n"}, 1, "expected"),
    ("compare s.yaml", {"s.yaml": ""}, 1, "s.yaml"),
    ("compare s.yaml", {"s.yaml": b"\xff\xfe"}, 1, "Name a YAML file"),
    ("compare s.yaml", {"s.yaml": "a: ["}, 1, "Name a YAML file"),
    ("compare nowhere.yaml", {}, 1, "Expected a suite in 'nowhere.yaml'"),
    ("compare s.yaml --data no", {"s.yaml": SUITE}, 1, "no"),
    ("rationales M d.jsonl", {"d.jsonl": "{"}, 1, "expected one JSON object per line"),
    (TRAIN, {"d.csv": "text,label\na,good\nb,good\n"}, 1, "expected two different labels or more"),
    (TRAIN, {"d.csv": "text,label\na,0.5\nb,0.7\n"}, 1, "Use the regression task"),
    (TRAIN, {"d.csv": "text,label\na,x\nb,y\n"}, 1, "Expected two examples or more to split"),
    (f"{TRAIN} --dev e.csv", {"d.csv": CSV, "e.csv": "text,label\na,great\n"}, 1, "expected one of the labels"),
    (f"{TRAIN} --task regression --method full", {"d.csv": CSV}, 1, "expected a finite number as the label"),
    (f"{TRAIN} --task tokens --method full", {"d.csv": CSV}, 1, "hold the words"),
    (f"{TAGGER} tokens", {"d.jsonl": TAGS.replace(', "b"', "")}, 1, "expected a tag for each"),
    (f"{TAGGER} span", {"d.jsonl": TAGS}, 1, "expected a column 'question'"),
    ("pretrain d.txt out --vocab-size 60", {"d.txt": "\n\n"}, 1, "got blank lines only"),
    ("pretrain d.txt out --vocab-size 60", {"d.txt": ""}, 1, "expected at least one row"),
    ("pretrain d.txt out --vocab-size 60", {"d.txt": "one\n"}, 1, "two examples or more to split"),
]  # fmt: skip

#: What is asked for.
FLAGS: list[tuple[str, Files, int, str]] = [
    ("predict", {}, 2, "Missing argument"),
    ("predict M d.csv --dail 1", {}, 2, "No such option"),
    ("predict M d.csv --dial high", {}, 2, "should be a valid number"),
    ("predict M d.csv --batch-size 0", {}, 2, "should be greater than or equal to 1"),
    ("predict M d.csv --batch-size many", {}, 2, "should be a valid integer"),
    ("predict M d.csv --dial 7", {"d.csv": CSV}, 1, "Expected the dial 'entropy' between 0 and 1, got 7"),
    ("predict M d.csv --dial nan", {"d.csv": CSV}, 1, "Expected the dial 'entropy'"),
    ("predict M d.csv --dtype float16", {"d.csv": CSV}, 1, "float16"),
    ("predict M d.csv --output out.xml", {"d.csv": CSV}, 1, "Expected an output name ending in .jsonl"),
    ("predict M d.csv --output no/out.csv", {"d.csv": CSV}, 1, "No such file or directory"),
    ("predict M d.csv --output M", {"d.csv": CSV}, 1, "Is a directory"),
    ("evaluate M d.csv --dials 0,x", {"d.csv": CSV}, 1, "Expected numbers separated by commas after --dials"),
    ("evaluate M d.csv --dials 9", {"d.csv": CSV}, 1, "Expected the dial 'entropy'"),
    ("evaluate M d.csv --plot curve.txt", {"d.csv": CSV}, 1, "curve.txt"),
    ("evaluate M d.csv --json no/such.json", {"d.csv": CSV}, 1, "No such file or directory"),
    ("explain M", {}, 2, "Missing argument"),
    ("explain M text --dial -1", {}, 1, "Expected the dial 'entropy'"),
    ("explain M text --html no/such.html", {}, 1, "No such file or directory"),
    ("search M T", {}, 1, "length_adaptive"),
    ("search A T --limit 0", {}, 2, "should be greater than or equal to 1"),
    ("search A T --output out --population 1", {}, 2, "should be greater than or equal to 2"),
    ("search A T --output taken", {"taken": "a file"}, 1, "got the file 'taken'"),
    ("search A T --output taken", {"taken/thesis.txt": "years"}, 1, "so that nothing is lost"),
    ("depths M", {}, 1, "Expected a model with a table of depths"),
    ("bench model M T --batch-sizes 0", {}, 1, "Expected whole numbers from 1 after --batch-sizes"),
    ("bench model M T --batch-sizes 1.5", {}, 1, "Expected whole numbers from 1"),
    ("bench model M T --rounds 0", {}, 2, "should be greater than or equal to 1"),
    ("bench engine --shapes huge", {}, 1, "huge"),
    ("bench engine --mixes none", {}, 1, "none"),
    ("bench", {}, 2, "Usage"),
    ("methods nothing", {}, 1, "Expected a method among"),
    ("trian", {}, 2, "No such command"),
    ("train", {}, 2, "Missing DATA, --model, --output"),
    ("train D --model E", {}, 2, "Missing --output"),
    ("train D --model E --output out --method magic", {}, 1, "Expected a method among"),
    ("train D --model E --output out --task magic", {}, 1, "Expected a task among"),
    ("train D --model E --output out --skip magic", {}, 1, "Expected stages of deebert"),
    ("train D --model E --output out --exit-epoch 1", {}, 1, "Did you mean --exit-epochs?"),
    ("train D --model E --output out --exit-epochs -1", {}, 1, "exit_epochs"),
    ("train D --model E --output out --exit-epochs one", {}, 1, "Expected a number for --exit-epochs"),
    ("train D --model E --output out --seed -1", {}, 1, "Expected a --seed from 0"),
    ("train D --model E --output out --learning-rate fast", {}, 1, "Expected a number for --learning-rate"),
    ("train D --model E --output out --per-device-train-batch-size 0", {}, 1, "of at least 1"),
    ("train D --model E --output out --optim adam", {}, 1, "adam is not a valid"),
    ("train D --model E --output out --max-length 2", {}, 1, "max_length"),
    ("train D --model E --output out --stride 3", {}, 1, "Expected --stride only for a new task with windows"),
    ("train D --model E --output out --attention-dropout 2", {}, 2, "should be less than or equal to 1"),
    ("train D --model E --output out --dtype float8", {}, 1, "float8"),
    ("train D --model E --output taken", {"taken": "a file"}, 1, "taken"),
    ("train D --model E --output taken", {"taken/thesis.txt": "years"}, 1, "so that nothing is lost"),
    ("train --config run.yaml", {"run.yaml": "- a\n"}, 1, "expected lines such as"),
    ("train --config run.yaml", {"run.yaml": "a: [\n"}, 1, "Expected a YAML file"),
    ("train --config run.yaml", {"run.yaml": b"\xff\xfe"}, 1, "Expected a YAML file"),
    ("train --config run.yaml", {"run.yaml": "model: 3\noutput: o\ndata: d\n"}, 1, "Expected text for 'model', got 3"),
    ("train --config nowhere.yaml", {}, 1, "Expected a YAML file after --config"),
    ("pretrain D out", {}, 1, "Expected either --tokenizer or --vocab-size, got neither"),
    ("pretrain D out --vocab-size 60 --tokenizer E", {}, 1, "got both"),
    ("pretrain D out --vocab-size 3", {}, 2, "should be greater than or equal to 6"),
    ("pretrain D out --vocab-size 60 --hidden-size 7", {}, 1, "hidden_size"),
    ("pretrain D out --vocab-size 60 --held-out 2", {}, 1, "fraction"),
    ("pretrain D out --vocab-size 60 --no-gates --no-revpc", {}, 1, "with --no-gates"),
    ("pretrain D taken --vocab-size 60", {"taken/thesis.txt": "years"}, 1, "which has other content"),
    ("calibrate M T", {}, 1, "Expected one of --cost, --latency-ms, --max-loss, --agreement, got none"),
    ("calibrate M T --cost 1 --max-loss 1", {}, 1, "got --cost and --max-loss"),
    ("calibrate M T --cost 1 --batch 2", {}, 1, "Expected --batch together with --latency-ms"),
    ("calibrate M T --cost 0.0001", {}, 1, "Expected a cost that a dial of deebert can reach"),
    ("calibrate M T --latency-ms 0", {}, 1, "Expected milliseconds above 0"),
    ("calibrate M T --cost high", {}, 2, "should be a valid number"),
    ("calibrate M T --cost 1 --json no/such.json", {}, 1, "No such file or directory"),
    ("calibrate nowhere T --cost 1", {}, 1, "neither a folder here nor"),
    ("export M", {}, 2, "Missing option"),
    ("export M --onnx taken", {"taken": "a file"}, 1, "taken"),
    ("export M --onnx taken", {"taken/thesis.txt": "years"}, 1, "Expected a new or empty folder"),
    ("export M --onnx M", {}, 1, "Expected a new or empty folder"),
    ("export M --onnx out --dial 7", {}, 1, "Expected the dial 'entropy'"),
    ("export M --onnx out --stages 99", {}, 1, "Expected 1 to 4 stages, got 99"),
    ("export M --onnx out --stages 2 --whole", {}, 1, "Expected either --stages or --whole"),
    ("export M --onnx out --dtype float16", {}, 1, "float16"),
    ("export nowhere --onnx out", {}, 1, "neither a folder here nor"),
    ("compare", {}, 2, "Missing argument"),
    ("compare s.yaml --only magic=1", {"s.yaml": SUITE}, 1, "Expected --only with parts such as"),
    ("compare s.yaml --only set=b", {"s.yaml": SUITE}, 1, "Expected set among a; got b"),
    ("compare s.yaml --results s.yaml", {"s.yaml": SUITE}, 1, "Expected an output that is not the input"),
    ("compare s.yaml --results no/such.json", {"s.yaml": SUITE}, 1, "No such file or directory"),
    ("demo --text body", {}, 1, "Expected --data together with --text"),
    ("demo --task tokens --data D", {}, 1, "Expected a task that answers whole texts"),
]  # fmt: skip

#: What helps.
HELP: list[tuple[str, Files, int, str]] = [
    ("-h", {}, 0, "Usage: root"),
    ("predict -h", {}, 0, "Usage: root predict"),
    ("train -h", {}, 0, "Usage: root train"),
    ("bench model -h", {}, 0, "Usage: root bench model"),
    ("train D --model E --exit-epochs 3 --help", {}, 0, "Usage: root train"),
    ("train --exit-epochs 3 -h", {}, 0, "Usage: root train"),
    ("pretrain D out --max-steps 3 --help", {}, 0, "Usage: root pretrain"),
    ("predict M d.csv --delimiter ;", {"d.csv": "text;label\na;b\n"}, 0, '"text": "a"'),
    ("predict M d.json", {"d.json": '[{"text": "a"}, {"text": "b"}]'}, 0, '"text": "b"'),
]  # fmt: skip


def check(command: str, files: Files, code: int, message: str, shared: Path, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_as_is(folder / name, content)
    before = contents(folder)
    names = {
        "M": shared / "model", "A": shared / "adaptive", "E": shared / "encoder", "D": shared / "train.jsonl",
        "T": shared / "test.jsonl",
    }  # fmt: skip
    result = run(*(names.get(word, word) for word in command.split()))
    told = result.stderr if code else result.stdout
    assert result.exit_code == code, result.output
    assert message in told
    assert "Traceback" not in result.output
    if code:
        assert result.stdout == ""
    if code == 1:
        *_, last = result.stderr.splitlines()
        assert last.startswith("error: ")
        assert message in last
        assert last.endswith((".", "?"))
    assert contents(folder) == before


def write_as_is(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "files", "code", "message"), [*DATA, *FLAGS, *HELP])
def test_a_case(
    command: str, files: Files, code: int, message: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check(command, files, code, message, shared, tmp_path)


# ---- damaged models ----------------------------------------------------------------------------------------


def reshaped(path: Path) -> None:
    weights = load_file(path)
    name = next(name for name in sorted(weights) if weights[name].dim() == 2)
    weights[name] = torch.zeros(3, 5)
    save_file(weights, path, metadata={"format": "pt"})


def lacking(path: Path) -> None:
    weights = load_file(path)
    del weights[max(weights)]
    save_file(weights, path, metadata={"format": "pt"})


#: An operating point of a stretto.json.
POINT = {"dial": 0.5, "score": 0.9, "cost": 0.5, "depth": 2.0, "metrics": {"accuracy": 0.9}}


def changed(**settings: Any) -> Any:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def text(content: str | bytes) -> Any:
    return lambda path: write(path, content)


#: (file of a model folder, what happens to it, part of the message)
DAMAGE: list[tuple[str, Any, str]] = [
    ("config.json", Path.unlink, "Expected a model folder with a config.json"),
    ("config.json", text("{"), "Expected a readable Hugging Face config"),
    ("config.json", text(b"\xff"), "Expected a readable Hugging Face config"),
    ("config.json", text("[]"), "Expected a readable Hugging Face config"),
    ("config.json", changed(model_type="gpt2"), "gpt2"),
    ("config.json", changed(model_type="unheard-of"), "unheard-of"),
    ("config.json", changed(hidden_size=48), "of shape"),
    ("config.json", changed(num_hidden_layers=9), "got none for bert.encoder.layer.4"),
    ("config.json", changed(vocab_size=7), "bert.embeddings.word_embeddings.weight of shape (7, 32)"),
    ("config.json", changed(num_attention_heads=5), "multiple of the number of attention heads"),
    ("config.json", changed(id2label={"0": "a", "1": "b", "2": "c"}), "classifier.bias of shape (3,)"),
    ("config.json", changed(num_hidden_layers=10**9), "got num_hidden_layers 1000000000"),
    ("config.json", changed(hidden_size=10**9), "got hidden_size 1000000000"),
    ("config.json", changed(num_labels=10**9), "got num_labels 1000000000"),
    ("config.json", changed(num_hidden_layers=60), "parameters for"),
    ("config.json", changed(intermediate_size=20_000), "parameters for"),
    ("config.json", changed(num_hidden_layers=0), "got num_hidden_layers 0"),
    ("config.json", changed(num_attention_heads=-1), "got num_attention_heads -1"),
    ("config.json", changed(hidden_size=-32), "got RuntimeError"),
    ("config.json", changed(num_hidden_layers=2.5), "num_hidden_layers"),
    ("config.json", changed(hidden_size="32"), "hidden_size"),
    ("config.json", changed(problem_type="multi_label_classification"), ""),
    ("model.safetensors", Path.unlink, "no file named model.safetensors"),
    ("model.safetensors", text(""), "Expected readable weights"),
    ("model.safetensors", text(b"\xff" * 64), "Expected readable weights"),
    ("model.safetensors", lacking, "which has no trained head"),
    ("model.safetensors", reshaped, "of shape (70, 32), as config.json in"),
    ("stretto.json", text("{"), "Expected a complete stretto.json"),
    ("stretto.json", text(b"\xff"), "Expected a complete stretto.json"),
    ("stretto.json", changed(method="magic"), "Expected a method among"),
    ("stretto.json", changed(config={"magic": 1}), "magic"),
    ("stretto.json", changed(dial="high"), "Expected a number as 'dial'"),
    ("stretto.json", changed(dial=9), "dial"),
    ("stretto.json", changed(points=[3]), "Expected a complete stretto.json"),
    ("stretto.json", changed(points=[{**POINT, "cost": "low"}]), "'low' as the cost of an operating point"),
    ("stretto.json", changed(points=[{**POINT, "name": 3}]), "operating point"),
    ("stretto.json", changed(points=[{**POINT, "latency": [1]}]), "operating point"),
    ("stretto.json", changed(points=[{**POINT, "needs": "many"}]), "'many' as the needs of an operating point"),
    ("stretto.json", changed(points=[{**POINT, "certificate": {"risk": 1}}]), "operating point"),
    ("stretto.json", changed(points=[{**POINT, "certificate": "yes"}]), "operating point"),
    ("stretto.json", changed(task={"name": "magic"}), "Expected a task among"),
    ("stretto.json", changed(task={"name": "classification", "n_texts": 7}), "Expected 1 (texts) or 2 (pairs)"),
    ("stretto.safetensors", Path.unlink, "got none for exits."),
    ("stretto.safetensors", text(b"\xff" * 64), "Expected stretto.safetensors to hold the weights of deebert"),
    ("stretto.safetensors", lacking, "Expected stretto.safetensors to fit deebert, got none for exits."),
    ("stretto.safetensors", reshaped, "of shape (3, 5) in place of ("),
    ("tokenizer.json", text("{"), "Expected a readable tokenizer in"),
    ("tokenizer.json", text(b"\xff"), "Expected a readable tokenizer in"),
    ("tokenizer.json", Path.unlink, "got none of tokenizer.json"),
    ("tokenizer_config.json", text("["), "Expected a readable tokenizer in"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGE)
def test_a_damaged_model(file: str, damage: Any, message: str, shared: Path, tmp_path: Path) -> None:
    shutil.copytree(shared / "model", tmp_path / "m")
    damage(tmp_path / "m" / file)
    result = run("predict", tmp_path / "m", shared / "test.jsonl", "--output", tmp_path / "out.jsonl")
    if not message:  # it is answered all the same
        assert result.exit_code == 0, result.stderr
        return
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
