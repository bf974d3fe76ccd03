"""At which block each token of a written text left: the exit over every token, in a terminal or as an HTML page."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from html import escape
from typing import IO, Any

from stretto.data.batches import batches
from stretto.model import AdaptiveModel
from stretto.tasks import TextPrediction
from stretto.view.explain import visible
from stretto.view.explain_terminal import FEW_SHADES, SHADES
from stretto.view.tables import plain_table


@dataclass(frozen=True)
class TextExplanation:
    """A text of T tokens from a decoder of N blocks."""

    source: str
    tokens: list[str]
    """[T] as the tokenizer spells them; the end token is the last, if it came."""
    exits: list[int]
    """[T] the block each left at, from 1."""
    n_blocks: int
    prediction: TextPrediction
    method: str
    dial: float
    truncated: bool

    @property
    def not_shown(self) -> str:
        return "the text was longer than the model takes and was truncated" if self.truncated else ""

    def to_json(self) -> dict[str, Any]:
        answer = asdict(self.prediction)
        return {
            "method": self.method, "dial": self.dial, "source": self.source, **answer, "truncated": self.truncated,
            "blocks": self.n_blocks, "tokens": self.tokens, "exits": self.exits,
        }  # fmt: skip


def explain_text(model: AdaptiveModel, text: Any, dial: float | None = None) -> TextExplanation:
    """Answer one text and report where each token of the answer left the decoder."""
    parts = model.task.check_input(text)
    dial = model.dial if dial is None else dial
    encoded = model.encode([parts])
    (inputs,) = batches(encoded.features, model.tokenizer.pad_token_id, 1)
    (written,) = model.run(inputs, dial).texts
    names = model.tokenizer.convert_ids_to_tokens(written.tokens)
    spelled = [model.tokenizer.convert_tokens_to_string([name]) or name for name in names]
    (prediction,) = model.predict([parts], dial)
    return TextExplanation(
        source=parts[0], tokens=spelled, exits=written.exits, n_blocks=model.backbone.n_blocks,  # type: ignore[attr-defined]
        prediction=prediction, method=model.method.name, dial=float(dial), truncated=encoded.truncated > 0,
    )  # fmt: skip


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
        rows = [
            {
                "token": visible(token.strip() or token),
                "exit": exit,
                "blocks": "#" * exit + "." * (explanation.n_blocks - exit),
            }
            for token, exit in zip(explanation.tokens, explanation.exits, strict=True)
        ]
        print(plain_table(rows), file=stream)


def _show_exits(explanation: TextExplanation, stream: IO[str]) -> bool:
    """False if the terminal has no colours, and nothing was shown."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    if console.color_system is None or console.no_color:
        return False
    shades = FEW_SHADES if console.color_system in ("standard", "windows") else SHADES
    line, above, below = 0, Text(), Text()
    for token, exit in zip(explanation.tokens, explanation.exits, strict=True):
        word = visible(token.strip() or token)
        width = max(len(word), len(str(exit))) + 1
        if line + width > console.width and line:
            console.print(above, below, sep="\n")
            line, above, below = 0, Text(), Text()
        shade = shades[exit * (len(shades) - 1) // explanation.n_blocks]
        above.append(str(exit).ljust(width))
        below.append(word, style=shade)
        below.append(" " * (width - len(word)))
        line += width
    console.print(above, below, sep="\n")
    console.print("over each token: the decoder block it left at")
    return True


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
.text { display: flex; flex-wrap: wrap; align-items: flex-end; gap: .15rem; margin: 1rem 0; }
.token { text-align: center; }
.token b { display: block; font-weight: 400; font-size: .8rem; color: #555; }
.token i { display: block; width: 100%; min-width: .8rem; background: #1565c0; height: calc(var(--depth) * 4rem); }
.token span { padding: 0 .2rem; white-space: pre; }
small { color: #555; }
"""


def text_page(explanation: TextExplanation) -> str:
    """One page that needs nothing else: a bar over each token."""
    title = "At which block each token left"
    tokens = "\n".join(
        f'<div class="token" style="--depth: {exit / explanation.n_blocks:.3f}"><b>{exit}</b><i></i>'
        f"<span><bdi>{escape(visible(token.strip() or token))}</bdi></span></div>"
        for token, exit in zip(explanation.tokens, explanation.exits, strict=True)
    )
    note = f"<p>Note: {explanation.not_shown}.</p>" if explanation.not_shown else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>
<h1>{title}</h1>
<p>{escape(visible(explanation.source))}</p>
<p>{escape(headline(explanation))}</p>{note}
<div class="text">
{tokens}
</div>
<p><small>Over each token of the answer: the decoder block it left at, of {explanation.n_blocks}.</small></p>
</body></html>
"""
