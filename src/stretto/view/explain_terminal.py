"""An explanation in a terminal: the text in colour, and a line per layer. In a pipe: a line per token instead."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, Any

from stretto.errors import counted
from stretto.view.explain import visible
from stretto.view.tables import plain_table, show_table

if TYPE_CHECKING:
    from stretto.view.explain import Explanation

#: From tokens that leave first (or have the least depth) to those that stay to the end, for terminals of many and of
#: 16 colours.
SHADES = (
    "grey50", "#204a4a on #d7efe9", "#10403a on #a6dccd", "#08332d on #6cc3ad",
    "#ffffff on #2f9d84", "#ffffff on #006d5b",
)  # fmt: skip
FEW_SHADES = ("bright_black", "blue", "cyan", "green", "bright_green", "black on green")


def show_explanation(explanation: Explanation, file: IO[str] | None = None) -> None:
    """Print to `file` (default: stdout), in colour or plain."""
    stream = sys.stdout if file is None else file
    print(headline(explanation) + "\n", file=stream)
    show_tokens(explanation, stream)


def show_tokens(explanation: Explanation, stream: IO[str]) -> None:
    """The tokens, and a line per layer."""
    if not (stream.isatty() and _show_text(explanation, stream)):
        print(plain_table(token_rows(explanation)), file=stream)
    print(file=stream)
    show_table(layer_rows(explanation), file=stream)


def headline(explanation: Explanation) -> str:
    answer = explanation.prediction
    return (
        f"{visible(answer.summary)}: {answer.depth} of {counted(len(explanation.scores), 'layer')}, "
        f"cost {answer.cost:.3f} ({explanation.method}, dial {explanation.dial:g})"
    )


def token_rows(explanation: Explanation) -> list[dict[str, Any]]:
    """A row per token: the layers it went through as a bar, frozen ones marked. Pieces of a word are marked with +."""
    rows = []
    lived = explanation.lives[1:].T.tolist()
    frozen = explanation.frozen.T.tolist()
    for place, last in enumerate(explanation.last_layers):
        bar = "".join("*" if f else "#" if alive else "." for alive, f in zip(lived[place], frozen[place], strict=True))
        mark = "+" if explanation.joined[place] else ""
        row = {"token": mark + visible(explanation.tokens[place]), "layers": bar, "last": last}
        if explanation.depths is not None:
            row["depth"] = explanation.depths[place]
        rows.append(row)
    return rows


def layer_rows(explanation: Explanation) -> list[dict[str, Any]]:
    """A row per layer up to the one that it was answered after."""
    some_frozen = bool(explanation.frozen.any())
    some_exits = any(explanation.exits)
    compared = dict.fromkeys(what for layer in explanation.compared for what in layer)
    rows = []
    for layer in range(1, explanation.answered_after + 1):
        row: dict[str, Any] = {"layer": layer, "tokens left": int(explanation.lives[layer].sum())}
        if some_frozen:
            row["frozen"] = int((explanation.frozen[layer - 1] & explanation.lives[layer]).sum())
        if some_exits:
            row["exit says"] = exit_says(explanation.exits[layer - 1])
        for what in compared:
            found = explanation.compared[layer - 1].get(what)
            row[what] = found.summary if found else ""
        row[""] = explanation.end if layer == explanation.answered_after else ""
        rows.append(row)
    return rows


def exit_says(probabilities: dict[str, float] | None) -> str:
    """'good 0.93'; for regression the value."""
    if not probabilities:
        return ""
    best = max(probabilities, key=probabilities.__getitem__)
    return f"{visible(best)} {probabilities[best]:.3f}" if best else f"{probabilities[best]:.4g}"


def _show_text(explanation: Explanation, stream: IO[str]) -> bool:
    """False if the terminal has no colours, and nothing was shown."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    if console.color_system is None or console.no_color:
        return False
    shades = FEW_SHADES if console.color_system in ("standard", "windows") else SHADES
    depth, most = explanation.answered_after, len(shades) - 1
    text = Text()
    ever_frozen = explanation.frozen.any(dim=0).tolist()
    ends = explanation.last_layers if explanation.depths is None else explanation.depths
    for place, last in enumerate(ends):
        if place and not explanation.joined[place]:
            text.append(" ")
        shade = shades[most if last >= depth else last * most // depth]
        style = f"underline {shade}" if ever_frozen[place] else shade
        text.append(visible(explanation.tokens[place]), style=style)
    legend = Text("\ntokens: ")
    for place, shade in enumerate(shades):
        words = {0: "leave first" if explanation.depths is None else "least depth", most: "stay to the end"}
        legend.append(f" {words.get(place, '…')} ", style=shade)
    if any(ever_frozen):
        legend.append("  ")
        legend.append("frozen on the way", style="underline")
    console.print(text)
    console.print(legend)
    return True
