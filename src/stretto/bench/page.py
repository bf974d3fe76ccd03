"""The comparison as one self-contained HTML file: plots with values on hover, tables, texts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from stretto.bench.report.groups import Group, by_set, mean
from stretto.bench.results import FULL, Row
from stretto.bench.suite import BASELINES, Suite
from stretto.view import plots
from stretto.view.tables import html_table

#: Okabe and Ito's, and two more; with the shapes enough for 36 rows.
COLOURS = (*plots.COLOURS, "#7A4EAB", "#8C564B")
SHAPES = ("circle", "diamond", "triangle", "cross")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { border-top: 1px solid #ccc; padding-top: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .9em; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: .9em; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
svg [data-row] line, svg [data-row] polyline { pointer-events: none; }
svg [data-row] .mark:hover { stroke: #222; stroke-width: 2; }
.legend button { border: 1px solid #ddd; background: none; border-radius: .3rem; margin: .1rem; cursor: pointer; }
.legend button.off { opacity: .35; }
.legend { margin-bottom: .6rem; }
.legend svg { vertical-align: -2px; margin-right: .3em; }
td:last-child, th:last-child { padding-right: 0; }
#tip { position: fixed; background: #222; color: #fff; padding: .3rem .5rem; border-radius: .3rem; font-size: .85em;
  pointer-events: none; white-space: pre; display: none; }
"""

SCRIPT = """
const NS = "http://www.w3.org/2000/svg", W = 380, H = 280, M = {l: 46, r: 16, t: 8, b: 34};
const tip = document.getElementById("tip");
const node = (name, attributes, parent) => {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.appendChild(made);
  return made;
};
const hover = (element, text) => {
  element.addEventListener("mousemove", e => {
    tip.textContent = text; tip.style.display = "block";
    tip.style.left = Math.min(e.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(e.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  element.addEventListener("mouseleave", () => tip.style.display = "none");
};
const ticks = (low, high) => {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(n => n * power).find(n => n >= rough), found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(+value.toFixed(6));
  return found;
};
const frame = (parent, title, xName, yName, xs, ys, names) => {
  const figure = parent.appendChild(document.createElement("figure"));
  figure.appendChild(document.createElement("figcaption")).textContent = title;
  const svg = node("svg", {width: W, height: H, role: "img", "aria-label": title}, figure);
  const [x0, x1] = xs, [y0, y1] = ys;
  const x = v => M.l + (v - x0) / (x1 - x0) * (W - M.l - M.r);
  const y = v => H - M.b - (v - y0) / (y1 - y0) * (H - M.t - M.b);
  const marked = names ? names.map((name, i) => [i + .5, name]) : ticks(x0, x1).map(u => [u, u]);
  for (const [u, name] of marked.filter((_, i) => i % Math.ceil(marked.length / 12) === 0))
    node("text", {x: x(u), y: H - M.b + 14, "text-anchor": "middle"}, svg).textContent = name;
  for (const v of ticks(y0, y1)) {
    node("line", {x1: M.l, x2: W - M.r, y1: y(v), y2: y(v), stroke: "#eee"}, svg);
    node("text", {x: M.l - 5, y: y(v) + 4, "text-anchor": "end"}, svg).textContent = v;
  }
  node("text", {x: (W + M.l) / 2, y: H - 4, "text-anchor": "middle"}, svg).textContent = xName;
  const turned = {x: 10, y: H / 2, transform: `rotate(-90 10 ${H / 2})`, "text-anchor": "middle"};
  node("text", turned, svg).textContent = yName;
  return {svg, x, y};
};
const CORNERS = {square: [[-1, -1], [1, -1], [1, 1], [-1, 1]], diamond: [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
  triangle: [[0, -1.2], [1.2, 1], [-1.2, 1]], cross: [[-.4, -1.2], [.4, -1.2], [.4, -.4], [1.2, -.4], [1.2, .4],
  [.4, .4], [.4, 1.2], [-.4, 1.2], [-.4, .4], [-1.2, .4], [-1.2, -.4], [-.4, -.4]]};
const mark = (parent, x, y, size, look) => {
  const paint = {fill: look.hollow ? "#fff" : look.colour, stroke: look.colour, class: "mark"};
  if (!CORNERS[look.shape]) return node("circle", {...paint, cx: x, cy: y, r: size}, parent);
  const points = CORNERS[look.shape].map(([a, b]) => `${x + a * size},${y + b * size}`).join(" ");
  return node("polygon", {...paint, points}, parent);
};
const curves = (part, parent, title, xName, lines) => {
  const isShown = p => p[1] >= part.full - 12;
  const points = lines.flatMap(line => line.points).filter(isShown), scores = points.map(p => p[1]);
  if (!points.length) return;
  const right = Math.max(1.02, ...points.map(p => p[0])), best = Math.max(part.full, ...scores);
  const lowest = Math.min(part.full - 2, ...scores) - .5;
  const {svg, x, y} = frame(parent, title, xName, part.metric, [0, right * 1.03], [lowest, best + .5]);
  const level = node("line", {x1: M.l, x2: W - M.r, y1: y(part.full), y2: y(part.full), stroke: "#888",
    "stroke-dasharray": "4 3"}, svg);
  hover(level, "full model " + part.full.toFixed(2));
  for (const line of lines) {
    const shown = line.points.filter(isShown), group = node("g", {"data-row": line.row}, svg);
    if (shown.length > 1)
      node("polyline", {points: shown.map(p => `${x(p[0])},${y(p[1])}`).join(" "), fill: "none", stroke: line.colour,
        "stroke-width": 1.3, "stroke-dasharray": line.hollow ? "5 3" : ""}, group);
    for (const p of shown) {
      if (p[3]) node("line", {x1: x(p[0]), x2: x(p[0]), y1: y(Math.max(p[1] - p[3], lowest)), y2: y(p[1] + p[3]),
        stroke: line.colour, opacity: .3}, group);
      hover(mark(group, x(p[0]), y(p[1]), shown.length > 8 ? 2.6 : 4, line), p[2]);
    }
  }
};
const isAtEnd = counts => counts.slice(0, -1).every(count => count === 0);
const bars = (parent, title, xName, names, counts, colour) => {
  const ends = [0, Math.max(1, ...counts)];
  const {svg, x, y} = frame(parent, title, xName, "texts", [0, counts.length], ends, names);
  counts.forEach((count, i) => {
    const place = {x: x(i + .1), width: x(.8) - x(0), y: y(count), height: y(0) - y(count)};
    hover(node("rect", {...place, fill: colour}, svg), `${xName}: ${names[i]}\n${count} texts`);
  });
};
for (const part of DATA) {
  const section = document.getElementById(part.id), legend = section.querySelector(".legend");
  for (const row of part.rows) {
    const button = legend.appendChild(document.createElement("button"));
    mark(node("svg", {width: 12, height: 12}, button), 6, 6, 4, row);
    button.append(row.row);
    button.addEventListener("click", () => {
      const off = button.classList.toggle("off");
      section.querySelectorAll("g[data-row]").forEach(g => {
        if (g.dataset.row === row.row) g.style.display = off ? "none" : "";
      });
    });
  }
  const plots = section.querySelector(".plots");
  curves(part, plots, "Score over FLOPs", "cost (fraction of the full model's FLOPs)", part.costs);
  for (const [name, lines] of Object.entries(part.times))
    curves(part, plots, "Score over time, " + name, "time (fraction of the full model's, packed)", lines);
  const histograms = section.querySelector(".histograms");
  for (const h of part.histograms) {
    const layers = h.depth.map((_, i) => i + 1);
    bars(histograms, `${h.row}: layers run (dial ${h.dial})`, "layers", layers, h.depth, h.colour);
    if (!isAtEnd(h.left))
      bars(histograms, `${h.row}: tokens left at the end`, "% of the input's tokens",
        h.left.map((_, i) => `${10 * i}–${10 * i + 10}`), h.left, h.colour);
  }
}
"""


def page(
    suite: Suite, groups: Sequence[Group], comparison: Mapping[str, Any], named: Mapping[str, Mapping[int, str]]
) -> str:
    """`named` are the hard and easy texts of each set, by number."""
    names = list(dict.fromkeys(name for group in groups for name in group.rows))
    looks = looks_of(names)
    found = {(part["set"], part["model"]): part for part in comparison.get("sets", [])}
    sections, data = [], []
    for number, seeds in enumerate(by_set(groups)):
        first = seeds[0]
        part = found.get((first.any.set, first.any.model), {})
        sections.append(section(f"set{number}", seeds, part, named.get(first.any.set, {})))
        data.append(drawn(f"set{number}", seeds, looks))
    embedded = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(suite.name)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>',
            f"<h1>{escape(suite.name)}</h1><p>{escape(suite.about)} Point at a mark for its values; click a name to "
            "hide its marks. Hollow marks are int8, grey ones other engines. Points more than 12 below the full model "
            "are left out.</p>",
            *sections,
            f'<div id="tip"></div><script>const DATA = {embedded};{SCRIPT}</script></body></html>',
        ]
    )


def looks_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a shape for each row: all colours with one shape, then with the next. Other engines are grey."""
    methods, others = ([name for name in names if (name in BASELINES) == other] for other in (False, True))
    looks = {
        name: {"colour": COLOURS[place % len(COLOURS)], "shape": SHAPES[place // len(COLOURS) % len(SHAPES)]}
        for place, name in enumerate(methods)
    }
    return looks | {name: {"colour": "#777", "shape": SHAPES[place]} for place, name in enumerate(others)}


def section(name: str, seeds: Sequence[Group], part: Mapping[str, Any], texts: Mapping[int, str]) -> str:
    first = seeds[0]
    volumes = sorted(part.get("hypervolume", {}).items(), key=lambda pair: -sum(pair[1]) / len(pair[1]))
    several = "; means, with standard deviations as bars; times and histograms are of the first" * (len(seeds) > 1)
    parts = [
        f'<section id="{name}"><h2>{escape(first.title)}</h2>',
        f"<p>Score is {escape(first.metric)}. Full model: {mean([100 * group.full_score for group in seeds])} "
        f"({'seeds' if several else 'seed'} {', '.join(str(group.any.seed) for group in seeds)}{several}).</p>",
        '<div class="legend"></div><div class="plots"></div>',
    ]
    if volumes:
        parts += [
            "<h3>Hypervolume</h3><p>The area under a curve, counted from 10 points below the full model: the full "
            "model's score at cost c gives 1 − c.</p>",
            html_table([{"row": row, "hypervolume": mean(values, 3)} for row, values in volumes]),
        ]
    heading = ""
    if any(row.answers for row in first.rows.values()):
        heading = (
            "<h3>Depth and length</h3><p>At the default dial, the cheapest within a point of the dial off on the dev "
            "data. Rows that run all layers for all tokens there are left out.</p>"
        )
    parts.append(f'{heading}<div class="histograms plots"></div>')
    agreed = part.get("agreement", {"rows": []})
    if agreed["rows"]:
        parts += [
            "<h3>Agreement</h3><p>Share of the test inputs that two rows answer alike, each at its default dial.</p>",
            html_table(
                [
                    {"": row, **dict(zip(agreed["rows"], shares, strict=True))}
                    for row, shares in zip(agreed["rows"], agreed["shares"], strict=True)
                ],
                dict.fromkeys(agreed["rows"], ".3f"),
            ),
        ]
    for title, key in (("Hardest texts", "hardest"), ("Easiest texts", "easiest")):
        if part.get(key):
            parts += [f"<h3>{title}</h3>", html_table([text_line(line, texts) for line in part[key]])]
    return "\n".join([*parts, "</section>"])


def text_line(line: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    wrong = f"{line['wrong']} of {line['of']}" if line["of"] else "–"
    text = texts.get(line["input"], "")
    return {"input": line["input"], "wrong": wrong, "mean cost": line["cost"], "text": text[:200]}


def drawn(name: str, seeds: Sequence[Group], looks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the script draws of one set. A point is [x, score, what to say of it, standard deviation or 0]."""
    first = seeds[0]
    costs, histograms = [], []
    times: dict[str, list[dict[str, Any]]] = {}
    for row in first.rows.values():
        look = {"row": row.name, **looks[row.name]}
        others = [group.rows[row.name] for group in seeds if row.name in group.rows]
        for dtype in ("float32", "int8"):
            drawing = {**look, "hollow": dtype == "int8"}
            if marks := cost_marks(others, dtype):
                costs.append({**drawing, "points": marks})
            for where, points in timed_marks(row, dtype).items():
                times.setdefault(where, []).append({**drawing, "points": points})
        if row.answers and any(sum(row.answers[kind][:-1]) for kind in ("depth", "left")):
            histograms.append({**look, **row.answers})
    full = statistics.mean(100 * group.full_score for group in seeds)
    return {
        "id": name, "metric": first.metric, "full": full, "costs": costs, "times": times, "histograms": histograms,
        "rows": [{"row": row, **looks[row]} for row in first.rows],
    }  # fmt: skip


def cost_marks(rows: Sequence[Row], dtype: str) -> list[list[Any]]:
    """The points of a row over cost: means of all seeds. Where they have other dials (each has its own search), those
    of the first seed alone."""
    curves = [row.on("test", dtype) for row in rows]
    if any([p.dial for p in curve] != [p.dial for p in curves[0]] for curve in curves):
        curves = curves[:1]
    found = []
    for points in zip(*curves, strict=True):
        scores, costs = [100 * p.score for p in points], [p.cost for p in points]
        said = (
            f"{label(rows[0], dtype)}\nscore {mean(scores)}\ncost {mean(costs, 3)}\ndial {points[0].dial:g}\n"
            f"depth {statistics.mean(p.depth for p in points):.2f}"
        )
        spread = statistics.stdev(scores) if len(scores) > 1 else 0
        found.append([statistics.mean(costs), statistics.mean(scores), said, spread])
    found.sort(key=lambda mark: mark[0])
    return found[:1] if rows[0].method == "static_depth" else found  # only one depth has been trained


def label(row: Row, dtype: str) -> str:
    return f"{row.name}{' int8' if dtype == 'int8' and row.name not in BASELINES else ''}"


def timed_marks(row: Row, dtype: str) -> dict[str, list[list[Any]]]:
    """'batch 8' or 'stream' -> points over time, as a fraction of the full model's."""
    found: dict[str, list[list[Any]]] = {}
    for clock in row.clock:
        point = next((p for p in row.on("test", dtype) if p.dial == clock.dial and clock.dtype == dtype), None)
        if point is not None and FULL in clock.ratios:
            others = "\n".join(f"× {other}: {value:.2f}" for other, value in clock.ratios.items())
            each = f"\n{clock.ms_per_text:.3g} ms per text" if clock.ms_per_text is not None else ""
            said = f"{label(row, dtype)}\nscore {100 * point.score:.2f}\ndial {point.dial:g}{each}\n{others}"
            where = "stream" if clock.stream else f"batch {clock.batch}"
            found.setdefault(where, []).append([1 / clock.ratios[FULL], 100 * point.score, said, 0])
    return {where: sorted(marks, key=lambda mark: mark[0]) for where, marks in found.items()}
