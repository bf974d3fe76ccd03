"""An explanation as one self-contained HTML page: a row per layer, a column per token."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from stretto.errors import counted
from stretto.view.explain import visible
from stretto.view.explain_terminal import exit_says, headline

if TYPE_CHECKING:
    from stretto.view.explain import Explanation

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff; }
.grid { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0 3px; }
th { position: sticky; left: 0; background: #fff; text-align: right; padding: .1rem .8rem; font-weight: 400;
     white-space: nowrap; color: #555; }
td { padding: .1rem .35rem; white-space: pre; text-align: center; border-left: 3px solid #fff; }
td.joined { border-left: 0; padding-left: 0; box-shadow: inset 0 -2px #777; }
td.opens { padding-right: 0; box-shadow: inset 0 -2px #777; }
td.live { background: #a8d8cf; background: color-mix(in srgb, #00897b calc(var(--score, .35) * 75%), #e8f4f1); }
td.gone { opacity: .25; }
td.depth { vertical-align: bottom; font-size: .8rem; color: #555; }
td.depth i { display: block; background: #1565c0; height: calc(var(--depth) * 4rem); }
td.frozen { outline: 2px dashed #1565c0; outline-offset: -2px; }
tr.exit th { color: #b23c00; font-weight: 700; }
tr.exit td { border-bottom: 3px solid #b23c00; }
td.says { text-align: left; color: #555; padding-left: 1rem; border: 0; background: none; }
.key td { min-width: 5rem; }
small { color: #555; }
"""

#: What the last row of a grid is, by what happens after it (`Explanation.end`).
LAST_ROW = {"answered here": "where the answer was given", "read by the decoder": "what the decoder reads"}
#: Entries of the legend.
SCORES = '<td class="live" style="--score: 1">high score</td><td class="live" style="--score: 0">low score</td>'
DROPPED, FROZEN = '<td class="gone">dropped</td>', '<td class="live frozen">frozen</td>'
WORD = '<td class="opens">one</td><td class="joined">word</td>'


def explanation_page(explanation: Explanation) -> str:
    """The whole page. Scores are shown relative to the highest of their layer."""
    cut = f"<p>Note: {explanation.not_shown}.</p>" if explanation.not_shown else ""
    body = f"<p>{escape(headline(explanation))}</p>{cut}\n{token_grid(explanation)}"
    return html_page("Up to which layer each token is used", STYLE, body)


def html_page(title: str, style: str, body: str) -> str:
    """One page that needs nothing else."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width"><style>{style}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def token_grid(explanation: Explanation) -> str:
    """A row per layer and a column per token, and what it shows."""
    rows = _depths(explanation) + "\n".join(_row(explanation, layer) for layer in range(explanation.answered_after + 1))
    never = len(explanation.scores) - explanation.answered_after
    after = f" The {counted(never, 'layer')} after it did not run." if never else ""
    after += " Hover over a token for its score." if has_scores(explanation) else ""
    return f"""<div class="grid"><table>
{rows}
</table></div>
<p><small>Each row shows the tokens after a layer; the last row is {LAST_ROW[explanation.end]}.{after}</small></p>
{_legend(explanation)}"""


def has_scores(explanation: Explanation) -> bool:
    return not bool(explanation.scores.isnan().all())


def _legend(explanation: Explanation) -> str:
    """What the looks of tokens mean, as far as this page has them."""
    ran = slice(explanation.answered_after + 1)
    applies = {
        SCORES: has_scores(explanation),
        DROPPED: not bool(explanation.lives[ran].all()),
        FROZEN: bool(explanation.frozen[: explanation.answered_after].any()),
        WORD: any(explanation.joined),
    }
    entries = "".join(entry for entry, here in applies.items() if here)
    return f'<table class="key"><tr>{entries}</tr></table>' if entries else ""


def _depths(explanation: Explanation) -> str:
    """A row of bars, one over each token, if the method gave depths."""
    if explanation.depths is None:
        return ""
    cells = "".join(
        f'<td class="depth" style="--depth: {depth / len(explanation.scores):.3f}">{depth}<i></i></td>'
        for depth in explanation.depths
    )
    return f'<tr class="depths"><th>depth</th>{cells}</tr>\n'


def _row(explanation: Explanation, layer: int) -> str:
    """Row 0 is the embeddings: every token as it came in."""
    cells = "".join(_cell(explanation, layer, place) for place in range(len(explanation.tokens)))
    is_last = layer == explanation.answered_after
    name = "tokens" if layer == 0 else f"layer {layer}{f', {explanation.end}' if is_last else ''}"
    says = escape("; ".join(_says(explanation, layer))) if layer else ""
    return f'<tr class="{"exit" if is_last else "layer"}"><th>{name}</th>{cells}<td class="says">{says}</td></tr>'


def _says(explanation: Explanation, layer: int) -> list[str]:
    """The answer of the exit after a layer, and what was compared there."""
    answer = exit_says(explanation.exits[layer - 1])
    compared = [f"{what} {each.summary}" for what, each in explanation.compared[layer - 1].items()]
    return [answer, *compared] if answer else compared


def _cell(explanation: Explanation, layer: int, place: int) -> str:
    lives = bool(explanation.lives[layer, place])
    classes = ["live" if lives else "gone"]
    notes = [] if lives else ["dropped"]
    style = ""
    if layer:
        if explanation.frozen[layer - 1, place]:
            classes.append("frozen")
            notes.append("frozen")
        score = float(explanation.scores[layer - 1, place])
        if score == score:
            row = explanation.scores[layer - 1].nan_to_num(nan=0.0)
            share = max(0.0, score) / max(float(row.max()), 1e-12)
            style = f' style="--score: {share:.3f}"'
            notes.append(f"score {score:.4g}")
        for what, each in explanation.compared[layer - 1].items():
            if isinstance(each.value, list) and each.value[place] is not None:
                notes.append(f"{what} {each.value[place]:.4g} (bound {each.bound:.4g})")
    if explanation.joined[place]:
        classes.append("joined")
    elif place + 1 < len(explanation.joined) and explanation.joined[place + 1]:
        classes.append("opens")
    title = f' title="{escape(", ".join(notes))}"' if notes else ""
    token = escape(visible(explanation.tokens[place]))
    return f'<td class="{" ".join(classes)}"{style}{title}><bdi>{token}</bdi></td>'
