"""A page with tables and a plot, as Markdown and as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from stretto.view.tables import Formats, Rows, html_table, markdown_table

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 58rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; }
img { max-width: 100%; }
small { color: #555; }
"""


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    tables: Mapping[str, tuple[Rows, Formats]]
    """By heading; the first one is above the plot."""
    plot: Path
    """A PNG next to the report; the HTML contains a copy."""
    notes: str
    commands: Sequence[str]

    def markdown(self) -> str:
        (_, first), *others = self.tables.items()
        parts = [f"# {self.title}", self.lead, markdown_table(*first), f"![the plot]({self.plot.name})", self.notes]
        for heading, table in others:
            parts += [f"## {heading}", markdown_table(*table)]
        parts += ["## Try", "```\n" + "\n".join(self.commands) + "\n```"]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        (_, first), *others = self.tables.items()
        picture = base64.b64encode(self.plot.read_bytes()).decode()
        parts = [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(self.title)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>',
            f"<h1>{escape(self.title)}</h1>",
            f"<p>{escape(self.lead)}</p>",
            html_table(*first),
            f'<p><img alt="the plot" src="data:image/png;base64,{picture}"></p>',
            f"<p><small>{escape(self.notes)}</small></p>",
        ]
        for heading, table in others:
            parts += [f"<h2>{escape(heading)}</h2>", html_table(*table)]
        parts += ["<h2>Try</h2>", f"<pre>{escape(chr(10).join(self.commands))}</pre>", "</body></html>"]
        return "\n".join(parts) + "\n"
