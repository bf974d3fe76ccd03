"""The documentation is true: its snippets run, its links lead somewhere, its figures are those of the results.

Every fenced block of a page is one of

    python   executed; the blocks of a page share one namespace and one working folder
    bash     each line a command, run in this process: `stretto …`, `echo "…" | stretto …`, `stretto … > FILE`
    yaml     written to the file its first line names (`# run.yaml`)
    text     shown only: output, layouts, formulas

and one that cannot run here says why, on the line above it: `<!-- not run: reason -->`. Snippets run unchanged, in a
folder that holds what they name (`make_world`): a hub name in a snippet is a local folder of that name with a small
random model or a small dataset in it, and a local folder wins over the hub.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
from commands import question_rows, tagging_rows
from sources import jsonl
from tiny import tiny_encoder, tiny_model, tiny_questions, tiny_reviews, tiny_tagging, tiny_tokenizer
from typer.testing import CliRunner

from stretto import train
from stretto.bench.report.pages import Pages
from stretto.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCED = (
    r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$"
)
MAKES_MODEL = ("--output reviews-model", 'dev_data, "reviews-model")')
LANGUAGES = ("python", "bash", "yaml", "text")


@dataclass(frozen=True)
class Snippet:
    language: str
    code: str
    line: int
    not_run: str | None


def snippets(text: str) -> Iterator[Snippet]:
    """The fenced blocks of a page, in order."""
    for match in re.finditer(FENCED, text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, match.start("code")) + 1
        yield Snippet(match["language"], textwrap.dedent(match["code"]), line, match["reason"])


# ---- the folder snippets run in ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    make_world(folder)
    return folder


def make_world(folder: Path) -> None:
    reviews = [(text, ("bad", "good")[label]) for (text,), label in texts_and_labels(tiny_reviews(60))]
    write_rows(folder / "reviews.csv", ["text", "label"], reviews)
    write_rows(folder / "dev.csv", ["text", "label"], reviews[:20])
    write_rows(folder / "test.csv", ["text", "label"], reviews[20:40])
    pairs = [(reviews[i][0], reviews[i + 1 + i % 3][0], ("no", "yes")[i % 2]) for i in range(24)]
    write_rows(folder / "pairs.tsv", ["premise", "hypothesis", "gold"], pairs, "\t")
    write_rows(folder / "similarity.csv", ["text_a", "text_b", "score"], [(a, b, len(a) % 6) for a, b, _ in pairs])
    (folder / "corpus.txt").write_text("".join(f"{text}\n" for text, _ in reviews), encoding="utf-8")
    (folder / "names.jsonl").write_text(jsonl(*tagging_rows(tiny_tagging(24))))
    (folder / "questions.jsonl").write_text(jsonl(*question_rows(tiny_questions(24, no_answer=True))))
    encoders = {"bert-base-uncased": tiny_encoder("bert"), "roberta-base": tiny_encoder("roberta")}
    encoders["fine-tuned"] = tiny_model("full").encoder  # it knows the labels bad and good
    for name, encoder in encoders.items():
        encoder.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    rows = {"sentence": [text for text, _ in reviews], "label": [label == "good" for _, label in reviews]}
    data = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=data, validation=data.select(range(20))).save_to_disk(folder / "stanfordnlp" / "sst2")
    tiny_model("length_adaptive").save_pretrained(folder / "adaptive-model")
    marked = [text.split() for text, _ in reviews[:4]]
    rationales = [
        {"tokens": words, "rationale": [int(word in ("bad", "good")) for word in words], "label": "good"}
        for words in marked
    ]
    (folder / "rationales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rationales), encoding="utf-8")
    model = tiny_model("deebert", num_train_epochs=1, exit_epochs=1)
    train(model, tiny_reviews(40), tiny_reviews(20, seed=1), folder / "reviews-model", progress=False)


def texts_and_labels(data: Any) -> Iterator[Any]:
    return zip(data.texts, data.labels, strict=True)


def write_rows(path: Path, header: list[str], rows: list[Any], delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])


# ---- snippets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_snippet_runs(name: str, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(snippets((ROOT / name).read_text(encoding="utf-8")))
    if not any(snippet.not_run is None and snippet.language != "text" for snippet in found):
        return
    folder = shutil.copytree(world, tmp_path / "world")
    if any(made in snippet.code for made in MAKES_MODEL for snippet in found if snippet.not_run is None):
        shutil.rmtree(folder / "reviews-model")  # the page makes it itself
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "logs")
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for snippet in found:
        where = f"{name}:{snippet.line}"
        assert snippet.language in LANGUAGES, f"{where}: a block is one of {LANGUAGES}"
        if snippet.not_run is not None or snippet.language == "text":
            continue
        if snippet.language == "python":
            exec(compile(snippet.code, where, "exec"), vars(module))
        elif snippet.language == "yaml":
            file = re.match(r"# ([\w.-]+\.yaml)\n", snippet.code)
            assert file, f"{where}: expected the file's name in the first line, as '# run.yaml'"
            Path(file[1]).write_text(snippet.code, encoding="utf-8")
        else:
            for command in snippet.code.replace("\\\n", " ").splitlines():
                if command.strip() and not command.startswith("#"):
                    run_command(command, where)


def run_command(command: str, where: str) -> None:
    """One line of a shell, as far as the pages use it."""
    words = shlex.split(command, comments=True)
    stdin, target = "", None
    if words[0] == "echo":
        assert words[2] == "|", f"{where}: expected echo TEXT | stretto …, got: {command}"
        stdin, words = words[1] + "\n", words[3:]
    if len(words) > 2 and words[-2] == ">":
        words, target = words[:-2], words[-1]
    assert words[0] == "stretto", f"{where}: expected a stretto command or a 'not run' mark, got: {command}"
    assert not {"|", ">", "<", "&&"} & set(words), f"{where}: more shell than the test knows: {command}"
    result = CliRunner().invoke(app, words[1:], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, f"{where}: {command}\n{result.output}"
    if target is not None:
        Path(target).write_text(result.stdout, encoding="utf-8")


def test_blocks_without_reason_do_not_escape() -> None:
    page = "```bash\nmake demo\n```\n\n<!-- not run: an hour -->\n```bash\nstretto demo\n```\n"
    first, second = snippets(page)
    assert (first.not_run, first.line, second.not_run) == (None, 2, "an hour")
    with pytest.raises(AssertionError, match="expected a stretto command"):
        run_command(first.code, "page:2")


# ---- links, blocks, paths ----------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(page: Path) -> str:
    return re.sub(FENCED, "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name}: {target} leads nowhere"
        assert not anchor or anchor in anchors(linked), f"{name}: no heading {anchor} in {linked.name}"


def test_every_page_is_reachable_from_the_readme() -> None:
    seen, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)", prose(page)):
            if not target.startswith("https://"):
                queue.append((page.parent / target).resolve())
    assert set(PAGES) <= seen


def test_generated_blocks_are_up_to_date() -> None:
    assert Pages(ROOT).stale() == [], "Run: stretto bench report"


def test_no_path_of_some_machine() -> None:
    for page in [*PAGES, *(ROOT / "benchmarks" / "results").glob("*.json")]:
        found = re.search(r"(?<![\w.])/(home|root|tmp|work|Users|mnt)/\S*", page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(ROOT)}: {found and found[0]}"


def test_version_has_its_entry() -> None:
    from stretto import __version__

    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
