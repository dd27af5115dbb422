// What the pages do beyond links: curves, finding, tokens that are loaded when they are seen, keys, and following a run.
// Answers of the server are either JSON, which is only ever written as text, or HTML that the server has escaped.
"use strict";

const body = document.body, $ = (q, root = document) => root.querySelector(q), $$ = (q, root = document) => [...root.querySelectorAll(q)];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(name, text = "", ...classes) {
  const made = document.createElement(name);
  made.textContent = text;
  made.classList.add(...classes.filter(Boolean));
  return made;
}

function say(text) {
  const place = $("#said");
  place.textContent = text;
  place.classList.add("on");
  setTimeout(() => place.classList.remove("on"), 1800);
}

async function get(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${answer.status} of ${address}`);
  return answer;
}

async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); say(`${what} is copied`); } catch { say("The browser does not allow to copy"); }
}

// --- what is folded on a narrow screen, so that the content comes first

const narrow = matchMedia("(max-width: 60rem)");
function fold() { $$(".fold").forEach((one) => (one.open = !narrow.matches)); }
narrow.addEventListener("change", fold);
fold();

// --- curves

const COLORS = ["#2f6fde", "#d9722e", "#1d9a6c", "#b85fa8", "#c79a1b", "#3aa3c9", "#8a8f99", "#6a55c9"];

// As in chips: what is resolved is green, the infrastructure violet, and no failure is either.
const MEANT = { resolved: "#1d9a6c", "all resolved": "#1d9a6c", infrastructure: "#6a55c9" }, FAILED = ["#c9463d", "#d9722e", "#c79a1b", "#b85fa8", "#8a8f99"];

function colors(series) {
  const meant = ({ label }) => MEANT[label.split(": ").pop()]; // with several runs, a label begins with the run's name
  const palette = series.some(meant) ? FAILED : COLORS, others = series.filter((one) => !meant(one));
  return series.map((one) => meant(one) ?? palette[others.indexOf(one) % palette.length]);
}

function stack(series) {
  const sums = [];
  return series.map(({ values }) => values.map((value, at) => (sums[at] = (sums[at] ?? 0) + (value ?? 0))));
}

function chart(panel, place) {
  const box = make("figure", "", "chart");
  box.append(make("h4", panel.title));
  const last = panel.series.map((one) => `${one.label}: ${one.values.findLast((v) => v !== null) ?? "none"}`).join(", ");
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `${panel.title}, ${panel.unit}. Last: ${last}`);
  place.append(box);
  const sums = panel.stacked ? stack(panel.series) : panel.series.map((one) => one.values);
  const points = { show: panel.steps.length < 40, size: 5 };
  const order = panel.series.map((_, at) => at), painted = colors(panel.series);
  if (panel.stacked) order.reverse(); // the highest sum is drawn first, the others over it
  const series = order.map((at) => {
    const color = painted[at], { values } = panel.series[at], label = panel.series[at].label.replaceAll("_", " ");
    const shown = (plot, value, series, index) => number(values[index ?? values.length - 1]); // nothing is pointed at: the last
    if (!panel.stacked) return { label, stroke: color, width: 1.8, points, spanGaps: true, value: shown };
    return { label, stroke: color, fill: color, width: 0, points: { show: false }, value: shown, paths: uPlot.paths.bars({ size: [0.96, 60] }) };
  });
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "11px system-ui" };
  const [low, high] = panel.bounds;
  const range = (plot, least, most) => {
    if (least === null) return [0, 1];
    const pad = Math.max((most - least) * 0.06, Math.abs(most) * 0.01) || 0.5;
    return [low ?? (panel.stacked ? 0 : least - pad), high ?? most + pad];
  };
  const size = () => ({ width: Math.max(200, box.clientWidth - 24), height: 190 });
  const plot = new uPlot({
    ...size(), series: [{ label: "step", value: (plot, value, series, index) => panel.steps[index ?? panel.steps.length - 1] }, ...series], cursor: { points: { size: 6 } },
    scales: { x: { time: false, range: (plot, least, most) => (panel.stacked ? [least - 0.5, most + 0.5] : least === most ? [least - 1, most + 1] : [least, most]) }, y: { range } },
    axes: [{ ...axis, size: 34, values: (u, all) => all.map((v) => (Number.isInteger(v) ? v : "")) }, { ...axis, size: 52, label: panel.unit, labelSize: 16, labelFont: "11px system-ui", values: (u, all) => all.map(number) }],
  }, [panel.steps, ...order.map((at) => sums[at])], box);
  new ResizeObserver(() => plot.setSize(size())).observe(box);
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return String(+value.toPrecision(4));
}

const OPEN = ["Learning", "Episodes", "Speed"];

async function curves() {
  const place = $("[data-curves]");
  if (!place) return;
  const panels = await (await get(place.dataset.curves)).json();
  const open = new Set($$("details[open] > summary", place).map((one) => one.textContent));
  const first = !$("details", place);
  place.replaceChildren();
  if (!panels.length) place.append(make("p", "There are no figures of steps yet.", "note"));
  for (const section of new Set(panels.map((one) => one.section))) {
    const part = make("details"), grid = make("div", "", "grid");
    part.append(make("summary", section), grid);
    place.append(part);
    const draw = () => { if (part.open && !grid.firstChild) panels.filter((one) => one.section === section).forEach((one) => chart(one, grid)); };
    part.addEventListener("toggle", draw);
    part.open = first ? OPEN.includes(section) : open.has(section);
    draw();
  }
}

// --- labels

for (const form of $$("form[data-label]")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const answer = await fetch(form.dataset.label, { method: "POST", headers: { "X-View": "1" }, body: new URLSearchParams(new FormData(form)) });
    if (!answer.ok) return say(await answer.text());
    const list = $("[data-labels]");
    list.replaceChildren(...(await answer.json()).map((one) => {
      const item = make("li");
      item.append(make("span", one.label, "chip"), ` ${one.comment} `, make("span", one.by + (one.turn ? `, turn ${one.turn}` : ""), "sub"));
      return item;
    }));
    form.reset();
  });
}

// --- following a run

let known = null;
async function follow() {
  try {
    const state = await (await get(body.dataset.state)).json();
    const now = JSON.stringify([state.episodes, state.steps, state.phase, state.read]);
    if (known !== null && now !== known) {
      const fresh = new DOMParser().parseFromString(await (await get(location.href)).text(), "text/html");
      for (const part of $$("[data-part]")) {
        const other = $(`[data-part="${part.dataset.part}"]`, fresh);
        if (other && other.innerHTML !== part.innerHTML) part.replaceChildren(...[...other.childNodes].map((one) => document.adoptNode(one)));
      }
      if (JSON.parse(known)[1] !== state.steps || !state.steps) await curves();
    }
    known = now;
  } catch { /* the server has ended, or is busy: the next look may succeed */ }
  setTimeout(follow, 3000);
}

// --- what is loaded when it is opened or seen

async function load(part) {
  if (!part.dataset.load) return;
  const address = part.dataset.load;
  delete part.dataset.load;
  const holder = make("div");
  part.append(holder);
  try { holder.innerHTML = await (await get(address)).text(); } catch (error) { holder.textContent = error.message; part.dataset.load = address; }
}

const pending = new Map();

function strip(node, from = 0) {
  const place = $(".strip", node);
  if (place && body.dataset.strip && place.dataset.loaded !== String(from)) {
    place.dataset.loaded = from;
    pending.set(place, fill(place, `${body.dataset.strip}&node=${node.dataset.node}&from=${from}`));
  }
  return pending.get(place);
}

async function fill(place, address) {
  try { place.innerHTML = await (await get(address)).text(); } catch (error) { place.textContent = error.message; delete place.dataset.loaded; }
}

function choose(token) {
  const again = token.classList.contains("here"), box = $("[data-token]");
  $$(".t.here").forEach((one) => one.classList.remove("here"));
  if (again) return box.replaceChildren(make("p", "Choose a token to read its values.", "note"));
  token.classList.add("here");
  const { id, p, v, tp, r, e } = token.dataset, node = token.closest(".node");
  const list = make("dl", "", "facts");
  const row = (name, value) => value !== undefined && list.append(make("dt", name), make("dd", value));
  const text = make("pre"); text.append(make("code", token.textContent));
  row("Token", `${id}, at ${token.id.split("t").pop()} of node ${node.dataset.node}`);
  row("Mask", node.classList.contains("trained") ? "1" : "0");
  if (p !== undefined) row("Probability", `${(100 * Math.exp(p)).toPrecision(4)} %`);
  row("Log-probability, rollout", p); row("Log-probability, trainer", tp); row("Ratio, trainer to rollout", r); row("Entropy", e); row("Weights", v);
  const button = make("button", "Copy link", "quiet");
  button.dataset.do = "link";
  box.replaceChildren(text, list, button);
}

// --- going to a place

function reveal(place) {
  for (let at = place; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  $$(".turn.here, .node.here").forEach((one) => one.classList.remove("here"));
  place.closest(".turn, .node")?.classList.add("here");
  place.scrollIntoView({ block: "center" });
}

async function arrive() {
  const name = decodeURIComponent(location.hash.slice(1)), token = /^n(\d+)t(\d+)$/.exec(name);
  if (token && $(".strip")) {
    const node = document.getElementById(`n${token[1]}`);
    if (!node) return;
    await strip(node, Math.floor(token[2] / 2000) * 2000);
    const found = document.getElementById(name);
    if (found) { reveal(found); if (!found.classList.contains("here")) choose(found); }
    return;
  }
  const place = name && document.getElementById(name);
  if (place && place.closest(".turn, .node")) { if (place.classList.contains("node")) await strip(place); reveal(place); place.scrollIntoView({ block: "start" }); }
}

function go(hash) {
  if (location.hash === hash) arrive(); else location.hash = hash;
}

// --- finding

let hits = [], at = -1, asked = 0;

function highlight(root, text) {
  if (!window.Highlight || !root || !text) return null;
  const ranges = [], wanted = text.toLowerCase(), walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node && ranges.length < 500; node = walk.nextNode()) {
    const whole = node.data.toLowerCase();
    for (let from = whole.indexOf(wanted); from >= 0; from = whole.indexOf(wanted, from + wanted.length)) {
      const range = new Range(); range.setStart(node, from); range.setEnd(node, from + wanted.length); ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
  return ranges[0] ?? null;
}

async function show(index) {
  if (!hits.length) return;
  at = (index + hits.length) % hits.length;
  const hit = hits[at];
  $$(".hits button").forEach((one, n) => { if (n === at) { one.setAttribute("aria-current", "true"); one.scrollIntoView({ block: "nearest" }); } else one.removeAttribute("aria-current"); });
  $(".hits-state").textContent = `${at + 1} of ${hits.total}${hits.total > hits.length ? `, the first ${hits.length} are listed` : ""}`;
  if (body.dataset.strip) { // tokens
    if (hit.node >= 0) return go(`#n${hit.node}t${hit.token}`);
    location.href = `${body.dataset.tokens}${hit.turn ? `#t${hit.turn}` : ""}`;
    return;
  }
  const ids = { read: `c${hit.node}`, result: `t${hit.turn}r${hit.place}`, patch: "patch", log: "verdict", verdict: "verdict" };
  const place = document.getElementById(ids[hit.what] ?? `t${hit.turn}`) ?? document.getElementById(`t${hit.turn}`);
  if (!place) return;
  if (place.dataset.load) await load(place);
  reveal(place);
  const range = highlight(place.id === "patch" || place.id === "verdict" ? place.parentElement : place, $("#find").value);
  range?.startContainer.parentElement.scrollIntoView({ block: "center" });
  for (let up = range?.startContainer.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
}

async function find(text) {
  const mine = ++asked, state = $(".hits-state"), list = $(".hits");
  if (!text) { hits = []; list.replaceChildren(); state.textContent = ""; window.CSS?.highlights?.clear(); return; }
  const answer = await (await get(`${body.dataset.find}&q=${encodeURIComponent(text)}`)).json();
  if (mine !== asked) return;
  hits = answer.hits; hits.total = answer.count; at = -1;
  state.textContent = answer.count ? `${answer.count} ${answer.count === 1 ? "hit" : "hits"}` : "Nothing is found";
  list.replaceChildren(...hits.map((hit, index) => {
    const row = make("li"), button = make("button");
    button.append(make("span", `${hit.turn || ""} ${hit.what} `, "what"), hit.before.slice(-24), make("mark", hit.text), hit.after.slice(0, 40));
    button.addEventListener("click", () => show(index));
    row.append(button);
    return row;
  }));
}

// --- keys

function rows() { return $$("[data-turn], [data-node], [data-row]").filter((one) => one.offsetParent !== null); }

function step(by) {
  const all = rows();
  if (!all.length) return;
  const now = all.findIndex((one) => one.classList.contains("here"));
  const next = all[Math.min(all.length - 1, Math.max(0, now < 0 ? (by > 0 ? 0 : all.length - 1) : now + by))];
  all.forEach((one) => one.classList.remove("here"));
  next.classList.add("here");
  next.scrollIntoView({ block: next.matches("[data-row]") ? "nearest" : "start" });
  $$(".outline .here").forEach((one) => one.classList.remove("here"));
  if (next.id) {
    history.replaceState(null, "", `#${next.id}`);
    const line = $(`.outline a[href="#${CSS.escape(next.id)}"]`);
    line?.parentElement.classList.add("here");
    line?.scrollIntoView({ block: "nearest" });
  }
}

function link() {
  const token = $(".t.here"), place = token ?? $(".turn.here, .node.here");
  copy(place ? new URL(`${body.dataset.here}#${place.id}`, location.href).href : location.href, "The link");
}

const ACTIONS = {
  theme() {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("theme", dark ? "light" : "dark");
    curves();
  },
  help() { $("#help").showModal(); },
  link,
  async json(button) { copy(await (await get(button.closest("[data-json]").dataset.json)).text(), "The turn"); },
};

const KEYS = {
  j: () => step(1), k: () => step(-1), n: () => show(at + 1), N: () => show(at - 1), c: link, "?": ACTIONS.help,
  "/": () => { const field = $("#find") ?? $("#all-text"); if (field?.closest(".fold")) field.closest(".fold").open = true; field?.focus(); },
  Enter: () => $("[data-row].here a")?.click(),
  t: () => { if (body.dataset.tokens) location.href = body.dataset.tokens + other(); },
  u: () => { location.href = body.dataset.up ?? $(".brand").href; },
  "[": () => { if (body.dataset.before) location.href = body.dataset.before; },
  "]": () => { if (body.dataset.after) location.href = body.dataset.after; },
  o: () => { const all = $$(".content details:not([data-load])"), open = !all.every((one) => one.open); all.forEach((one) => (one.open = open)); },
};

function other() {
  const link = $(".turn.here header .meta a[href*='#n'], .node.here header .meta a[href*='#t']");
  return link ? link.hash : "";
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  const typing = event.target.matches("input, select, textarea");
  if (typing && event.key === "Escape") return event.target.blur();
  if (typing && event.target.id === "find" && event.key === "Enter") { event.preventDefault(); return show(event.shiftKey ? at - 1 : at + 1); }
  if (typing || !KEYS[event.key] || (event.key === "Enter" && event.target.matches("a, button, summary"))) return;
  event.preventDefault();
  KEYS[event.key]();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-do]"), token = event.target.closest(".t"), more = event.target.closest(".more button");
  if (button) ACTIONS[button.dataset.do](button);
  else if (token) { history.replaceState(null, "", `#${token.id}`); choose(token); }
  else if (more) strip(more.closest(".node"), +more.dataset.from);
});
document.addEventListener("toggle", (event) => { if (event.target.open) load(event.target); }, true);
document.addEventListener("change", (event) => { if (event.target.name === "by") body.className = event.target.value; });
addEventListener("hashchange", arrive);

let timer;
$("#find")?.addEventListener("input", (event) => { clearTimeout(timer); timer = setTimeout(() => find(event.target.value), 150); });
$("[data-find-form]")?.addEventListener("submit", (event) => event.preventDefault());
if (body.dataset.strip) {
  const seen = new IntersectionObserver((all) => all.forEach((one) => { if (one.isIntersecting) { seen.unobserve(one.target); if (!$(".strip", one.target).dataset.loaded) strip(one.target); } }), { rootMargin: "400px" });
  $$(".node").forEach((one) => seen.observe(one));
}
curves();
arrive();
if (body.dataset.state) follow();
