"""At which block each token of a written text left, in a terminal or as an HTML page: the exit over every token, and
the number that was compared with the dial. If the method works on the encoder: what happens to each token there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from typing import IO, Any

from stretto.data.batches import batches
from stretto.engine.decider import ask
from stretto.model import AdaptiveModel
from stretto.state import Decision, Stack, State
from stretto.tasks import Prediction, TextPrediction
from stretto.view.explain import Comparison, Explanation, Watcher, numbers, visible, watched
from stretto.view.explain_html import STYLE, html_page, token_grid
from stretto.view.explain_terminal import FEW_SHADES, SHADES, show_tokens
from stretto.view.tables import plain_table

#: What a method compared after each block it was asked about, by name and block (from 1), for one token.
Compares = dict[str, dict[int, Comparison]]


@dataclass(frozen=True)
class TextExplanation:
    """A text of T tokens from a decoder of N blocks."""

    source: str
    tokens: list[str]
    """[T] as the tokenizer spells them; the end token is the last, if it came."""
    exits: list[int]
    """[T] the block each left at, from 1."""
    compared: list[Compares]
    """[T] what the method compared for each."""
    n_blocks: int
    prediction: TextPrediction
    method: str
    dial: float
    truncated: bool
    encoder: Explanation | None = None
    """What happened to the tokens of the source, if the method works on the encoder."""

    @property
    def not_shown(self) -> str:
        return "the text was longer than the model takes and was truncated" if self.truncated else ""

    @property
    def what(self) -> str | None:
        """The name of what was compared; None if nothing was."""
        return next((what for token in self.compared for what in token), None)

    def rows(self) -> Iterator[tuple[str, int, Comparison | None]]:
        """Of each token: how it reads, the block it left at, and what was last compared."""
        for token, exit, compared in zip(self.tokens, self.exits, self.compared, strict=True):
            blocks = compared.get(self.what or "")
            yield visible(token.strip() or token), exit, blocks[max(blocks)] if blocks else None

    def to_json(self) -> dict[str, Any]:
        compared = [
            {what: {block: asdict(each) for block, each in blocks.items()} for what, blocks in token.items()}
            for token in self.compared
        ]
        return {
            "method": self.method, "dial": self.dial, "source": self.source, **asdict(self.prediction),
            "truncated": self.truncated, "blocks": self.n_blocks, "tokens": self.tokens, "exits": self.exits,
            "compared": compared, "encoder": None if self.encoder is None else self.encoder.to_json(),
        }  # fmt: skip


class TextWatcher(Watcher):
    """Decides as another decider, for one text that is written with one beam, and records what happens."""

    stacks: frozenset[Stack] = frozenset({"encoder", "decoder"})

    def __init__(self, model: AdaptiveModel, n_tokens: int) -> None:
        super().__init__(model.method, model.backbone.n_layers, n_tokens)
        self.by_token: dict[int, Compares] = {}

    def decide(self, state: State) -> Decision:
        if state.stack == "encoder":
            return super().decide(state)
        decision = ask(self.watched, state)
        if decision.compared is not None:
            (value,), bound = numbers(decision.compared)
            blocks = self.by_token.setdefault(state.step, {}).setdefault(decision.compared.what, {})
            blocks[state.layer - 1] = Comparison(value, bound)
        return decision


def explain_text(model: AdaptiveModel, text: Any, dial: float | None = None) -> TextExplanation:
    """Answer one text and report where each token of the answer left the decoder, and why.

    The text is written as the settings say, perhaps with beams, then once more with one beam that is watched."""
    parts = model.task.check_input(text)
    dial = model.dial if dial is None else dial
    encoded = model.encode([parts])
    (inputs,) = batches(encoded.features, model.tokenizer.pad_token_id, 1)
    (written,) = model.run(inputs, dial).texts
    watcher, engine = TextWatcher(model, inputs.input_ids.shape[1]), model.packed
    trace = engine.run(
        inputs.to(model.encoder.device), watcher, model.dials_of(dial, 1), scored=False,
        generation=engine.generation().following(written.tokens),
    ).trace  # fmt: skip
    names = model.tokenizer.convert_ids_to_tokens(written.tokens)
    (prediction,) = model.predict([parts], dial)
    source = None
    if model.method.points and "encoder" in model.method.stacks:
        end = Prediction(depth=int(trace.encoder.depth[0]), cost=prediction.cost)
        source = watched(model, encoded, watcher, end, dial, end="read by the decoder")
    return TextExplanation(
        source=parts[0],
        tokens=[model.tokenizer.convert_tokens_to_string([name]) or name for name in names],
        exits=written.exits,
        compared=[watcher.by_token.get(step, {}) for step in range(len(names))],
        n_blocks=model.backbone.n_blocks,  # type: ignore[attr-defined]
        prediction=prediction,
        method=model.method.name,
        dial=float(dial),
        truncated=encoded.truncated > 0,
        encoder=source,
    )


def headline(explanation: TextExplanation) -> str:
    answer = explanation.prediction
    return (
        f"{visible(answer.text)}\n{answer.depth:.2f} of {explanation.n_blocks} decoder blocks on average, cost "
        f"{answer.cost:.3f} ({explanation.method}, dial {explanation.dial:g})"
    )


def show_text_explanation(explanation: TextExplanation, file: IO[str] | None = None) -> None:
    """In a terminal the text with the exit over each token; in a pipe a line per token."""
    stream = sys.stdout if file is None else file
    print(headline(explanation) + "\n", file=stream)
    if not (stream.isatty() and _show_exits(explanation, stream)):
        rows = []
        for token, exit, compared in explanation.rows():
            row = {"token": token, "exit": exit, "blocks": "#" * exit + "." * (explanation.n_blocks - exit)}
            if explanation.what is not None:
                row[explanation.what] = compared.summary if compared else ""
            rows.append(row)
        print(plain_table(rows), file=stream)
    if explanation.encoder is not None:
        print("\nin the encoder:\n", file=stream)
        show_tokens(explanation.encoder, stream)


def _show_exits(explanation: TextExplanation, stream: IO[str]) -> bool:
    """False if the terminal has no colours, and nothing was shown."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    if console.color_system is None or console.no_color:
        return False
    shades = FEW_SHADES if console.color_system in ("standard", "windows") else SHADES
    used, lines = 0, [Text(), Text(), Text()]
    for token, exit, compared in explanation.rows():
        number = f"{compared.value:.2f}" if compared else ""
        width = max(len(token), len(str(exit)), len(number)) + 1
        if used + width > console.width and used:
            _print_lines(console, lines)
            used, lines = 0, [Text(), Text(), Text()]
        shade = shades[exit * (len(shades) - 1) // explanation.n_blocks]
        lines[0].append(str(exit).ljust(width))
        lines[1].append(number.ljust(width), style="bright_black")
        lines[2].append(token, style=shade)
        lines[2].append(" " * (width - len(token)))
        used += width
    _print_lines(console, lines)
    console.print("over each token: " + legend(explanation))
    return True


def _print_lines(console: Any, lines: list[Any]) -> None:
    console.print(*(line for line in lines if line.plain.strip()), sep="\n")


def legend(explanation: TextExplanation) -> str:
    """What stands over each token."""
    blocks = f"the decoder block it left at, of {explanation.n_blocks}"
    if explanation.what is None:
        return blocks
    bounds = [compared.bound for _, _, compared in explanation.rows() if compared]
    ends = dict.fromkeys(f"{bound:.4g}" for bound in (min(bounds), max(bounds)))
    return f"{blocks}; and its {explanation.what} there (bound {' to '.join(ends)})"


TEXT_STYLE = """
.text { display: flex; flex-wrap: wrap; align-items: flex-end; gap: .15rem; margin: 1rem 0; }
.token { text-align: center; }
.token b, .token em { display: block; font-weight: 400; font-style: normal; font-size: .8rem; color: #555; }
.token em { font-size: .7rem; }
.token i { display: block; width: 100%; min-width: .8rem; background: #1565c0; height: calc(var(--depth) * 4rem); }
.token span { padding: 0 .2rem; white-space: pre; }
"""


def text_page(explanation: TextExplanation) -> str:
    """One page that needs nothing else: a bar over each token."""
    tokens = "\n".join(_token(explanation, place) for place in range(len(explanation.tokens)))
    note = f"<p>Note: {explanation.not_shown}.</p>" if explanation.not_shown else ""
    hover = " Hover over a token for all blocks." if explanation.what else ""
    encoder = ""
    if explanation.encoder is not None:
        encoder = f"\n<h2>In the encoder</h2>\n{token_grid(explanation.encoder)}"
    body = f"""<p>{escape(visible(explanation.source))}</p>
<p>{escape(headline(explanation))}</p>{note}
<div class="text">
{tokens}
</div>
<p><small>Over each token of the answer: {escape(legend(explanation))}.{hover}</small></p>{encoder}"""
    return html_page("At which block each token left", STYLE + TEXT_STYLE, body)


def _token(explanation: TextExplanation, place: int) -> str:
    token, exit, compared = list(explanation.rows())[place]
    number = f"<em>{compared.value:.2f}</em>" if compared else ""
    blocks = [
        f"{what} after block {block}: {each.summary}"
        for what, found in explanation.compared[place].items()
        for block, each in found.items()
    ]
    title = f' title="{escape(", ".join(blocks))}"' if blocks else ""
    return (
        f'<div class="token" style="--depth: {exit / explanation.n_blocks:.3f}"{title}><b>{exit}</b>{number}<i></i>'
        f"<span><bdi>{escape(token)}</bdi></span></div>"
    )
