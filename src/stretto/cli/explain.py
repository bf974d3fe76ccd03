"""`stretto explain`: up to which layer each token is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from stretto.cli.guard import output_file
from stretto.cli.options import Dtype, Json, MaxNewTokens, ModelFolder, NumBeams
from stretto.cli.output import STDOUT, open_model, say, write_json
from stretto.errors import StrettoError
from stretto.saving.files import write_text

if TYPE_CHECKING:
    from stretto.model import AdaptiveModel

EXAMPLES = """
stretto explain reviews-model "A warm, funny and beautifully acted film."
stretto explain reviews-model "A fine film." --dial 0.3 --html tokens.html
stretto explain pairs-model "A man sleeps." --text-b "Nobody is awake." --json
stretto explain reviews-model - < review.txt
stretto explain translation-model "Ein Haus am See." --html exits.html     # the exit over each token of the text
"""

TextArgument = Annotated[str, Argument(metavar="TEXT", help="The text; '-' reads it from stdin.", show_default=False)]


def read_stdin() -> str:
    """The whole of stdin, without the last line break."""
    from stretto.data.lines import stdin_bytes

    try:
        return stdin_bytes().read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise StrettoError(
            f"Expected a text in UTF-8 on stdin, got other bytes at {error.start + 1}. Convert it first (iconv)."
        ) from None


def explain_translation(
    model: AdaptiveModel, text: str | tuple[str, ...], dial: float | None, html: str | None, json: str | None
) -> None:
    from stretto.view.explain_text import explain_text, show_text_explanation, text_page

    report(explain_text(model, text, dial), show_text_explanation, text_page, html, json)


def report(
    explanation: Any, show: Callable[[Any], None], page: Callable[[Any], str], html: str | None, json: str | None
) -> None:
    """Show an explanation in the terminal, or write it where the options say."""
    if explanation.not_shown:
        say(explanation.not_shown)
    if json != STDOUT:
        show(explanation)
    write_json(json, explanation.to_json())
    if html is not None:
        write_text(html, page(explanation))
        say(f"wrote {html}")


def explain(
    model: ModelFolder,
    text: TextArgument,
    text_b: Annotated[str | None, Option(help="The second text of a pair.")] = None,
    dial: Annotated[float | None, Option(help="Trades score for cost; default: the model's own dial.")] = None,
    html: Annotated[
        str | None, Option(metavar="FILE", help="Write a page with all layers and tokens.", callback=output_file)
    ] = None,
    dtype: Dtype = "float32",
    num_beams: NumBeams = None,
    max_new_tokens: MaxNewTokens = None,
    json: Json = None,
) -> None:
    """Show up to which layer each token is used, and at which layer the answer is given.

    For each layer: the number that the method compared with the dial. For a model that writes texts: the decoder block
    at which each token of the text left, and that number."""
    from stretto.view.explain import explain as run_explain
    from stretto.view.explain_html import explanation_page
    from stretto.view.explain_terminal import show_explanation

    if text == STDOUT:
        text = read_stdin()
    loaded = open_model(model, dtype, num_beams, max_new_tokens)
    if loaded.task.answers == "text":
        explain_translation(loaded, text if text_b is None else (text, text_b), dial, html, json)
        return
    explanation = run_explain(loaded, text if text_b is None else (text, text_b), dial)
    report(explanation, show_explanation, explanation_page, html, json)
