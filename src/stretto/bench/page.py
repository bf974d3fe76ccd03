"""The comparison as one self-contained HTML file: plots with values on hover, tables, texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from stretto.bench.report.groups import Group, by_set, mean
from stretto.bench.results import FULL, Row
from stretto.bench.suite import BASELINES, Suite
from stretto.view.plots import COLOURS
from stretto.view.tables import html_table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { border-top: 1px solid #ccc; padding-top: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: .9em; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: .9em; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
.legend button { border: 1px solid #ddd; background: none; border-radius: .3rem; margin: .1rem; cursor: pointer; }
.legend button.off { opacity: .35; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .3em; }
#tip { position: fixed; background: #222; color: #fff; padding: .3rem .5rem; border-radius: .3rem; font-size: .85em;
  pointer-events: none; white-space: pre; display: none; }
"""

SCRIPT = """
const NS = "http://www.w3.org/2000/svg", W = 360, H = 250, M = {l: 46, r: 16, t: 8, b: 34};
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
    tip.style.top = (e.clientY + 14) + "px";
  });
  element.addEventListener("mouseleave", () => tip.style.display = "none");
};
const ticks = (low, high) => {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(n => n * power).find(n => n >= rough), found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(+value.toFixed(6));
  return found;
};
const frame = (parent, title, xName, yName, xs, ys) => {
  const figure = parent.appendChild(document.createElement("figure"));
  figure.appendChild(document.createElement("figcaption")).textContent = title;
  const svg = node("svg", {width: W, height: H, role: "img", "aria-label": title}, figure);
  const [x0, x1] = xs, [y0, y1] = ys;
  const x = v => M.l + (v - x0) / (x1 - x0) * (W - M.l - M.r);
  const y = v => H - M.b - (v - y0) / (y1 - y0) * (H - M.t - M.b);
  for (const u of ticks(x0, x1))
    node("text", {x: x(u), y: H - M.b + 14, "text-anchor": "middle"}, svg).textContent = u;
  for (const v of ticks(y0, y1)) {
    node("line", {x1: M.l, x2: W - M.r, y1: y(v), y2: y(v), stroke: "#eee"}, svg);
    node("text", {x: M.l - 5, y: y(v) + 4, "text-anchor": "end"}, svg).textContent = v;
  }
  node("text", {x: (W + M.l) / 2, y: H - 4, "text-anchor": "middle"}, svg).textContent = xName;
  const turned = {x: 10, y: H / 2, transform: `rotate(-90 10 ${H / 2})`, "text-anchor": "middle"};
  node("text", turned, svg).textContent = yName;
  return {svg, x, y};
};
const curves = (part, parent, title, xName, lines) => {
  if (!lines.length) return;
  const points = lines.flatMap(line => line.points).filter(p => p[1] >= part.full - 12);
  if (!points.length) return;
  const right = Math.max(1.02, ...points.map(p => p[0])), best = Math.max(part.full, ...points.map(p => p[1]));
  const {svg, x, y} = frame(parent, title, xName, part.metric, [0, right * 1.03], [part.full - 12, best + 1]);
  const level = node("line", {x1: M.l, x2: W - M.r, y1: y(part.full), y2: y(part.full), stroke: "#888",
    "stroke-dasharray": "4 3"}, svg);
  hover(level, "full model " + part.full.toFixed(2));
  for (const line of lines) {
    const shown = line.points.filter(p => p[1] >= part.full - 12);
    const group = node("g", {"data-row": line.row}, svg);
    if (line.joined && shown.length > 1)
      node("polyline", {points: shown.map(p => `${x(p[0])},${y(p[1])}`).join(" "), fill: "none", stroke: line.colour,
        "stroke-width": 1.5, "stroke-dasharray": line.dashed ? "5 3" : ""}, group);
    for (const p of shown) {
      const dot = node(line.square ? "rect" : "circle", line.square
        ? {x: x(p[0]) - 4, y: y(p[1]) - 4, width: 8, height: 8, fill: line.colour}
        : {cx: x(p[0]), cy: y(p[1]), r: line.joined ? 3 : 5, fill: line.colour}, group);
      hover(dot, p[2]);
    }
  }
};
const bars = (parent, title, xName, names, counts, colour) => {
  const ends = [0, Math.max(1, ...counts)];
  const {svg, x, y} = frame(parent, title, xName, "texts", [0, counts.length], ends);
  counts.forEach((count, i) => {
    const place = {x: x(i + .1), width: x(.8) - x(0), y: y(count), height: y(0) - y(count)};
    hover(node("rect", {...place, fill: colour}, svg), names[i] + ": " + count + " texts");
  });
};
for (const part of DATA) {
  const section = document.getElementById(part.id), legend = section.querySelector(".legend");
  for (const row of part.rows) {
    const button = legend.appendChild(document.createElement("button"));
    const dot = button.appendChild(document.createElement("i"));
    dot.style.background = row.colour;
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
    if (h.left[h.left.length - 1] < h.left.reduce((a, b) => a + b, 0))
      bars(histograms, `${h.row}: tokens left at the end`, "tenths of the input's tokens",
        h.left.map((_, i) => `${10 * i}–${10 * i + 10} %`), h.left, h.colour);
  }
}
"""


def page(
    suite: Suite, groups: Sequence[Group], comparison: Mapping[str, Any], named: Mapping[str, Mapping[int, str]]
) -> str:
    """`named` are the hard and easy texts of each set, by number."""
    names = list(dict.fromkeys(name for group in groups for name in group.rows))
    colours = {name: colour_of(place, len(names)) for place, name in enumerate(names)}
    found = {(part["set"], part["model"]): part for part in comparison.get("sets", [])}
    sections, data = [], []
    for number, seeds in enumerate(by_set(groups)):
        first = seeds[0]
        part = found.get((first.any.set, first.any.model), {})
        sections.append(section(f"set{number}", seeds, part, named.get(first.any.set, {})))
        data.append(drawn(f"set{number}", first, colours))
    embedded = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(suite.name)}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>',
            f"<h1>{escape(suite.name)}</h1><p>{escape(suite.about)} Point at a mark for its values; click a name to "
            "hide its marks.</p>",
            *sections,
            f'<div id="tip"></div><script>const DATA = {embedded};{SCRIPT}</script></body></html>',
        ]
    )


def colour_of(place: int, count: int) -> str:
    """Those of the plots, or hues around the circle if there are more rows."""
    return COLOURS[place] if count <= len(COLOURS) else f"hsl({360 * place / count:.0f} 70% {40 + 12 * (place % 2)}%)"


def section(name: str, seeds: Sequence[Group], part: Mapping[str, Any], texts: Mapping[int, str]) -> str:
    first = seeds[0]
    volumes = sorted(part.get("hypervolume", {}).items(), key=lambda pair: -sum(pair[1]) / len(pair[1]))
    parts = [
        f'<section id="{name}"><h2>{escape(first.title)}</h2>',
        f"<p>Score is {escape(first.metric)}. Full model: {mean([100 * group.full_score for group in seeds])} (seeds "
        f"{', '.join(str(group.any.seed) for group in seeds)}; plots are of the first).</p>",
        '<div class="legend"></div><div class="plots"></div>',
    ]
    if volumes:
        parts += [
            "<h3>Hypervolume</h3><p>The area under a curve, counted from 10 points below the full model: the full "
            "model's score at cost c gives 1 − c.</p>",
            html_table([{"row": row, "hypervolume": mean(values, 3)} for row, values in volumes]),
        ]
    heading = "<h3>Depth and length</h3>" if any(row.answers for row in first.rows.values()) else ""
    parts.append(f'{heading}<div class="histograms plots"></div>')
    agreed = part.get("agreement", {"rows": []})
    if agreed["rows"]:
        parts += [
            "<h3>Agreement</h3><p>Share of the test inputs that two rows answer alike, each at its default dial.</p>",
            html_table(
                [
                    {"": row, **dict(zip(agreed["rows"], shares, strict=True))}
                    for row, shares in zip(agreed["rows"], agreed["shares"], strict=True)
                ]
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


def drawn(name: str, group: Group, colours: Mapping[str, str]) -> dict[str, Any]:
    """What the script draws of one set."""
    costs, histograms = [], []
    times: dict[str, list[dict[str, Any]]] = {}
    for row in group.rows.values():
        look = {"row": row.name, "colour": colours[row.name], "square": row.name in BASELINES}
        for dtype in ("float32", "int8"):
            points = sorted(row.on("test", dtype), key=lambda point: point.cost)
            if row.method == "static_depth":
                points = points[:1]  # only one depth has been trained
            if points:
                marks = [
                    [
                        point.cost, 100 * point.score,
                        f"{row.name}{' int8' if dtype == 'int8' else ''}\nscore {100 * point.score:.2f}\n"
                        f"cost {point.cost:.3f}\ndial {point.dial:g}\ndepth {point.depth:.2f}",
                    ]
                    for point in points
                ]  # fmt: skip
                costs.append({**look, "points": marks, "joined": len(marks) > 1, "dashed": dtype == "int8"})
        for where, marks in timed_marks(row).items():
            times.setdefault(where, []).append({**look, "points": marks, "joined": False, "dashed": False})
        if row.answers:
            histograms.append({**look, **row.answers})
    return {
        "id": name, "metric": group.metric, "full": 100 * group.full_score, "costs": costs, "times": times,
        "histograms": histograms, "rows": [{"row": row, "colour": colours[row]} for row in group.rows],
    }  # fmt: skip


def timed_marks(row: Row) -> dict[str, list[list[Any]]]:
    """'batch 8' or 'stream' -> [time as a fraction of the full model's, score, what to say of it]."""
    found: dict[str, list[list[Any]]] = {}
    for clock in row.clock:
        point = next((p for p in row.on("test", clock.dtype) if p.dial == clock.dial), None)
        if point is not None and FULL in clock.ratios:
            others = "\n".join(f"× {other}: {value:.2f}" for other, value in clock.ratios.items())
            label = f"{row.name}{' int8' if clock.dtype == 'int8' else ''}\nscore {100 * point.score:.2f}\n{others}"
            where = "stream" if clock.stream else f"batch {clock.batch}"
            found.setdefault(where, []).append([1 / clock.ratios[FULL], 100 * point.score, label])
    return found
