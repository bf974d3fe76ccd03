"use strict";
// The page of `stretto serve`: plain DOM, no library, nothing from elsewhere.

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000, TYPING_MS = 250, MINUTE = 60, MOST_BARS = 6;
const SAMPLES = ["A warm, funny and beautifully acted film.", "The plot is thin, yet somehow it never quite bores."];
let models = [], points = [], history = [], before = null;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;  // never as HTML: texts and labels are anybody's
  return element;
}

async function call(path, body) {
  const headers = body ? { "content-type": "application/json" } : {};
  if ($("key").value) headers.authorization = `Bearer ${$("key").value}`;
  const answer = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers });
  if (answer.status === 401) $("ask-key").hidden = false;
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return { content, headers: answer.headers };
}

const model = () => models.find((each) => each.name === $("model").value);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// ---- model and operating point

async function start() {
  try {
    const { content } = await call("info");
    $("ask-key").hidden = true;
    models = content.models;
  } catch (error) {
    $("about").textContent = error.message;
    return;
  }
  $("model").replaceChildren(...models.map((each) => new Option(each.name)));
  $("choose-model").hidden = models.length < 2;
  chooseModel();
}

function chooseModel() {
  const chosen = model();
  $("about").textContent = `${chosen.task}, ${chosen.method}, ${chosen.n_layers} layers, ${chosen.dtype}`;
  points = [...chosen.points].sort((a, b) => b.cost - a.cost || (a.name ? 1 : -1));
  if (!points.some((each) => each.dial === chosen.dial_off))
    points.unshift({ dial: chosen.dial_off, score: null, cost: 1, depth: chosen.n_layers });
  const own = points.findLastIndex((each) => each.dial === chosen.dial);
  if (own < 0) points.push({ dial: chosen.dial, score: null, cost: null, depth: null });
  $("dial").max = points.length - 1;
  $("dial").value = own < 0 ? points.length - 1 : own;
  showPoint();
  $("cards").replaceChildren();
  if (fields().length > 1) addCard();
  else for (const sample of SAMPLES) addCard(sample);
}

function showPoint() {
  const point = points[$("dial").value], parts = [];
  const fact = (name, value) => { const b = make("b", "", value); parts.push(`${parts.length ? " · " : ""}${name} `, b); };
  if (point.name) fact("budget", point.name + (point.guaranteed ? " (guaranteed)" : ""));
  if (point.score !== null) fact("score", point.score.toFixed(3));
  if (point.cost !== null) fact("cost", percent(point.cost));
  if (point.depth !== null) fact("average depth", point.depth.toFixed(1));
  fact("dial", String(+point.dial.toFixed(4)));
  if (point.dial === model().dial) parts.push(make("span", "mark", ` · the model's own (${model().promise})`));
  $("point").replaceChildren(...parts);
  $("dial").setAttribute("aria-valuetext", $("point").textContent);
}

// ---- texts

function fields() {
  const chosen = model();
  if (chosen.task === "span") return ["Question", "Context"];
  return chosen.pairs ? ["First text", "Second text"] : ["Text"];
}

function addCard(text = "") {
  const card = $("card").content.firstElementChild.cloneNode(true);
  for (const name of fields()) {
    const area = make("textarea");
    area.setAttribute("aria-label", name);
    area.placeholder = name;
    area.value = text;
    area.addEventListener("input", () => {
      clearTimeout(card.timer);
      card.timer = setTimeout(() => ask(card), TYPING_MS);
    });
    card.querySelector(".texts").append(area);
  }
  card.querySelector(".remove").addEventListener("click", () => { card.remove(); showRemovers(); });
  $("cards").append(card);
  showRemovers();
  if (text) ask(card);
  return card;
}

function showRemovers() {
  const alone = $("cards").children.length < 2;
  for (const button of document.querySelectorAll("#cards .remove")) button.hidden = alone;
}

async function ask(card) {
  const texts = [...card.querySelectorAll("textarea")].map((area) => area.value);
  const number = card.asked = (card.asked || 0) + 1;  // an answer that comes late is not shown
  if (texts.some((text) => !text.trim())) { clear(card); return; }
  const { name, task } = model(), { dial } = points[$("dial").value];
  const inputs = texts.length > 1 ? texts : texts[0], by = `?model=${encodeURIComponent(name)}`;
  const routes = {
    tokens: () => call(`tokens${by}`, { inputs, dial }),
    span: () => call(`answer${by}`, { question: texts[0], context: texts[1], dial }),
    seq2seq: () => call(`generate${by}`, { inputs, dial }),
  };
  const predict = routes[task] || (() => call(`predict/${encodeURIComponent(name)}`, { inputs, dial }));
  try {
    const answered = await predict();
    const explained = task === "seq2seq" ? null : (await call(`explain${by}`, { inputs, dial })).content;
    if (card.asked === number && card.isConnected) show(card, answered, explained);
  } catch (error) {
    if (card.asked === number) { clear(card); card.querySelector(".answer").replaceChildren(make("p", "error", error.message)); }
  }
}

function clear(card) {
  for (const part of [".answer", ".layers", ".took", ".tokens"]) card.querySelector(part).replaceChildren();
}

function show(card, { content, headers }, explained) {
  card.querySelector(".answer").replaceChildren(...answerOf(content));
  const { depth, cost } = explained || content, layers = model().n_layers;
  const strip = card.querySelector(".layers");
  strip.replaceChildren(...Array.from({ length: layers }, (_, i) => make("i", i < depth ? "run" : "")));
  strip.setAttribute("aria-label", `${depth} of ${layers} layers were run`);
  const took = card.querySelector(".took");
  took.replaceChildren(explained ? "left after layer " : "average layer of a token ",
    make("b", "", +depth.toFixed(1)), ` of ${layers} · `, make("b", "", percent(cost)), " of the full model's work · ",
    make("b", "", `${(+headers.get("x-inference-time")).toFixed(1)} ms`));
  const tokens = explained ? explained.tokens.map((token, i) => tokenOf(explained, token, i)) : [];
  card.querySelector(".tokens").replaceChildren(...tokens);
}

function answerOf(content) {
  if (!Array.isArray(content)) {
    if (content.entities) {
      const found = content.entities.map((each) => `${each.text} (${each.type})`).join(", ") || content.tags.join(" ");
      return [make("p", "", found)];
    }
    if ("text" in content) return [make("p", "", content.text)];
    return content.best.map((each, i) => bar(each.text || "no answer", each.score, i === 0));
  }
  if (content.length === 1 && content[0].label === "value") return [make("p", "", content[0].score.toFixed(3))];
  return content.slice(0, MOST_BARS).map((each, i) => bar(each.label, each.score, i === 0));
}

function bar(label, score, best) {
  const row = make("div", best ? "bar best" : "bar"), name = make("span", "", label), track = make("i");
  name.title = label;
  track.style.setProperty("--share", `${100 * score}%`);
  row.append(name, track, make("b", "", score.toFixed(3)));
  return row;
}

function tokenOf(explained, token, i) {
  const last = explained.last_layers[i], gone = last < explained.depth;
  const special = /^(\[[A-Z]+\]|<\/?s>)$/.test(token);
  const span = make("span", [explained.joined[i] && "joined", special && "special", gone && "gone"].filter(Boolean).join(" "), token);
  span.style.setProperty("--lives", (0.25 + 0.75 * (explained.depth ? Math.min(last / explained.depth, 1) : 1)).toFixed(2));
  span.title = gone ? `dropped after layer ${last}` : `went as far as the text: layer ${explained.depth}`;
  if (gone) span.append(make("sub", "", last));
  return span;
}

// ---- live figures

async function poll() {
  try {
    const { content } = await call("stats");
    const now = content.models[$("model").value];
    if (now) showLive(now, content.seconds);
  } catch { /* the next one may come through */ }
  setTimeout(poll, POLL_MS);
}

function showLive(now, seconds) {
  if (before && before.seconds < seconds && before.answered <= now.answered) {
    history.push((now.answered - before.answered) / (seconds - before.seconds));
    history = history.slice(-MINUTE);
  }
  before = { answered: now.answered, seconds };
  const most = Math.max(1, ...history), latest = history.length ? history[history.length - 1] : 0;
  $("rate").textContent = `${latest.toFixed(1)} (${now.live} inside, ${now.waiting} waiting)`;
  const at = (value, i) => `${(300 * (i + MINUTE - history.length)) / (MINUTE - 1)},${68 - (62 * value) / most}`;
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  if (history.length > 1) {
    const left = (300 * (MINUTE - history.length)) / (MINUTE - 1);
    path.setAttribute("d", `M${left},70 L${history.map(at).join(" L")} L300,70 Z`);
  }
  $("throughput").replaceChildren(path);
  const tallest = Math.max(1, ...now.depths);
  $("histogram").replaceChildren(...now.depths.map((count, i) => {
    const column = make("div"), box = make("i");
    box.style.setProperty("--share", `${(82 * count) / tallest}%`);
    column.title = `${count} after layer ${i + 1}`;
    column.append(box, String(i + 1));
    return column;
  }));
  $("histogram").setAttribute("aria-label", now.depths.map((count, i) => `layer ${i + 1}: ${count}`).join(", "));
  const cost = now.mean_cost === null ? "" : `, ${percent(now.mean_cost)} of the full model's work`;
  $("total").textContent = `${now.answered} answers${cost}`;
}

// ---- events

const askAll = () => { for (const card of $("cards").children) ask(card); };
$("model").addEventListener("change", () => { history = []; before = null; chooseModel(); });
$("dial").addEventListener("input", () => { showPoint(); askAll(); });
$("ask-key").addEventListener("submit", (event) => { event.preventDefault(); start(); });
$("add").addEventListener("click", () => addCard().querySelector("textarea").focus());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey && event.key === "Enter") askAll();
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); $("add").click(); }
});
start().then(poll);
