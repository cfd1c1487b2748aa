// The page: asks the JSON API, draws with plotly. Every text that comes from a run is set as text, never as markup.
"use strict";

/** How often the page looks for news. Who opens it may set another figure before: tests do. */
const TICK_MS = window.tickMs ?? 1000;

// -- small things ---------------------------------------------------------------------------------------------------------------

const $ = (id) => document.getElementById(id);

/** Element with attributes and children; strings become text nodes. */
function el(tag, attrs = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attrs)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

/** Plotly reads a little markup in its texts; a name from a run must not be read so. */
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const whole = (n) => (n === null || n === undefined ? "–" : Math.round(n).toLocaleString("en-US"));
const percent = (x, digits = 1) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(digits)} %`);

function scaled(value, unit, base = 1000) {
  if (value === null || value === undefined) return "–";
  const names = ["", base === 1024 ? "Ki" : "k", base === 1024 ? "Mi" : "M", base === 1024 ? "Gi" : "G", base === 1024 ? "Ti" : "T", "P"];
  let i = 0, x = value;
  while (Math.abs(x) >= base && i < names.length - 1) { x /= base; i += 1; }
  return `${x >= 100 || Number.isInteger(x) ? x.toFixed(0) : x.toPrecision(3)} ${names[i]}${unit}`;
}

function duration(ns) {
  if (ns === null || ns === undefined) return "–";
  const a = Math.abs(ns);
  if (a >= 60e9) return `${(ns / 60e9).toFixed(1)} min`;
  if (a >= 1e9) return `${(ns / 1e9).toPrecision(4)} s`;
  if (a >= 1e6) return `${(ns / 1e6).toPrecision(4)} ms`;
  if (a >= 1e3) return `${(ns / 1e3).toPrecision(4)} µs`;
  return `${ns.toFixed(0)} ns`;
}

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

/** JSON of an address. A refused request and a run that cannot be read both come as {error}. */
async function get(address) {
  const answer = await fetch(address, { headers: { accept: "application/json" } });
  if (!(answer.headers.get("content-type") || "").startsWith("application/json"))
    return { error: { kind: "server", what: `the dashboard failed at this request (${answer.status})`, came: address, expected: null, do: "look at the terminal that it runs in" } };
  return answer.json();
}

// -- state ----------------------------------------------------------------------------------------------------------------------

const query = new URLSearchParams(location.search);
const state = {
  page: location.pathname.startsWith("/gates") ? "gates" : "profiling",
  run: query.get("run") || "", other: query.get("with") || "", follow: true,
  first: numberIn(query.get("from")), last: numberIn(query.get("to")),
  runs: null, root: "", phases: new Map(), view: null, progress: null, shown: "", busy: false, again: false, every: TICK_MS, asked: 0,
  timeline: { step: null, rank: null, window: null, answer: null, serial: 0, steps: "" },
};

function numberIn(text) {
  const value = text === null || String(text).trim() === "" ? NaN : Number(text);
  return Number.isInteger(value) && value >= 0 ? value : null;
}

function keepAddress() {
  const q = new URLSearchParams();
  if (state.run) q.set("run", state.run);
  if (state.other) q.set("with", state.other);
  if (state.first !== null) q.set("from", state.first);
  if (state.last !== null) q.set("to", state.last);
  const text = q.toString();
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
  for (const a of document.querySelectorAll("nav a")) a.href = a.dataset.href + (text ? `?${text}` : "");
}

const runUrl = (what, params = {}) => {
  const q = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== null && v !== undefined));
  return `/api/run/${encodeURIComponent(state.run)}/${what}?${q}`;
};

// -- messages -------------------------------------------------------------------------------------------------------------------

const TITLES = { corrupt: "This run is damaged", busy: "This run is locked", input: "This run cannot be shown", machine: "This machine cannot read the run" };

function notice(error, calm = false) {
  const box = $("notice");
  box.hidden = !error;
  box.classList.toggle("calm", calm);
  if (!error) return box.replaceChildren();
  const rows = [["came", error.came], ["expected", error.expected], ["do", error.do]].filter(([, v]) => v);
  box.replaceChildren(el("h2", {}, calm ? error.what : `${TITLES[error.kind] || "Error"}: ${error.what}`),
    el("dl", {}, rows.map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])));
}

function showProgress() {
  const p = state.progress, box = $("progress");
  if (!state.run || !p) return box.replaceChildren();
  const broken = p.error || state.broken, kind = broken ? "error" : p.state;
  const words = broken ? TITLES[broken.kind] || "cannot be read"
    : { empty: "no step yet", running: "running", finished: "finished", stopped: "stopped", failed: "failed", unknown: "old metrics",
        silent: `no sign of life for ${ago(p.silent_s || 0)}` }[p.state] || p.state;
  const parts = [el("span", { class: `dot ${kind}`, "aria-hidden": "true" }), words];
  if (!broken && p.last_step !== null) {
    const newest = p.tail.length ? p.tail[p.tail.length - 1] : state.newest;
    if (p.tail.length) state.newest = newest;
    parts.push(" · step ", el("b", { id: "step" }, whole(p.last_step)));
    if (newest && newest[1] !== null) parts.push(" · loss ", el("b", {}, newest[1].toFixed(4)));
  }
  box.replaceChildren(...parts);
}

// -- panels and plots -----------------------------------------------------------------------------------------------------------

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const panels = new Map();

/** A framed plot: made once, drawn often. `size` is a class of the plot. */
function panel(id, title, { cls = "", size = "", html = false } = {}) {
  if (panels.has(id)) return panels.get(id);
  const sub = el("span", { class: "sub" }), mark = el("span", { class: "chip ungated", hidden: true }, "UNGATED"), aside = el("span", { class: "aside" });
  const plot = html ? el("div", { class: "scroll" }) : el("div", { class: `plot ${size}`, role: "img", "aria-label": title });
  const none = el("div", { class: "none", hidden: true }), prov = el("p", { class: "prov" });
  const node = el("figure", { class: `panel ${cls}`, id: `p-${id}` }, el("figcaption", {}, el("h2", {}, title), mark, sub, aside), plot, none, prov);
  const made = { id, node, sub, mark, aside, plot, none, prov, drawn: false, title };
  panels.set(id, made);
  $("grid").append(node);
  return made;
}

function provenanceText(p) {
  if (!p) return "";
  const peak = p.peak_flops ? `peak ${scaled(p.peak_flops, "FLOP/s")}${p.devices > 1 ? ` x ${p.devices}` : ""}${p.peak_bandwidth ? `, ${scaled(p.peak_bandwidth, "B/s")}` : ""} (${p.peak_source})` : "no peak known";
  return [p.run, p.status, p.commit, p.hardware, p.devices > 1 ? `${p.devices} devices` : null, p.threads ? `${p.threads} threads` : null,
    `${p.flops_model} (${p.convention})`, peak].filter(Boolean).join(" · ");
}

/** Says where the figures of a panel come from, and marks it when the run is ungated. */
function stampPanel(made, provenance) {
  const list = (Array.isArray(provenance) ? provenance : [provenance]).filter(Boolean);
  const text = list.map(provenanceText).join("  |  ");
  made.prov.textContent = text;
  made.prov.title = list.map((p) => Object.entries(p).map(([k, v]) => `${k}: ${v}`).join("\n")).join("\n\n");
  made.ungated = list.some((p) => p.status !== "GATED");
  made.mark.hidden = !made.ungated;
}

function nothing(made, why) {
  made.none.textContent = why || "nothing to show yet";
  made.none.hidden = false;
  made.plot.hidden = true;
}

function layoutFor(made, extra) {
  const axis = { gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true, tickfont: { size: 11 } };
  const { xaxis = {}, yaxis = {}, annotations = [], ...rest } = extra;
  const stamp = made.ungated ? [{ text: "UNGATED", xref: "paper", yref: "paper", x: 1, y: 1, xanchor: "right", yanchor: "top", showarrow: false,
    bgcolor: css("--stamp"), font: { color: css("--stamp-ink"), size: 10 }, borderpad: 2 }] : [];
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, DejaVu Sans, sans-serif", size: 11, color: css("--ink") },
    margin: { l: 48, r: 10, t: 8, b: 30 }, hovermode: "x unified", hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { size: 11, color: css("--ink") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--dim"), activecolor: css("--accent") }, showlegend: true, legend: { orientation: "h", y: 1.0, yanchor: "bottom", x: 0, font: { size: 11 } }, bargap: 0.25, ...rest,
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, annotations: [...stamp, ...annotations],
  };
}

// The buttons are listed one by one: plotly's own set has one that uploads a chart to a server of its maker.
const CONFIG = { displaylogo: false, responsive: true, showTips: false, doubleClick: false, plotlyServerURL: "", showSendToCloud: false, showLink: false,
  modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "toImage"]] };

function draw(made, traces, layout) {
  made.none.hidden = true;
  made.plot.hidden = false;
  made.traces = traces;
  made.layout = layout;
  const full = layoutFor(made, layout);
  full.uirevision = made.revision || "same";
  Plotly.react(made.plot, traces, full, made.listen ? CONFIG : { ...CONFIG, doubleClick: "reset" });
  if (!made.drawn) {
    made.drawn = true;
    if (made.listen) made.listen(made.plot);
  }
}

/** A plot over steps: zooming into it asks for these steps everywhere. */
function stepPanel(id, title, options) {
  const made = panel(id, title, options);
  made.listen = (plot) => {
    plot.on("plotly_relayout", (change) => {
      const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"];
      if (low !== undefined && high !== undefined) showSteps(Math.max(0, Math.ceil(low)), Math.max(1, Math.floor(high)));
    });
    plot.on("plotly_doubleclick", () => { showSteps(null, null); return false; });
  };
  return made;
}

function stepAxis(extra = {}) {
  const range = state.first !== null || state.last !== null ? { range: [state.first ?? 0, state.last ?? (state.progress && state.progress.last_step) ?? 1], autorange: false } : { autorange: true };
  return { title: { text: "step", standoff: 4, font: { size: 11 } }, ...range, ...extra };
}

const alpha = (hex, a) => `rgba(${parseInt(hex.slice(1, 3), 16)},${parseInt(hex.slice(3, 5), 16)},${parseInt(hex.slice(5, 7), 16)},${a})`;
const phaseColour = (name) => (state.phases.get(name) || { colour: "#9AA3A7" }).colour;
const phaseShape = (name) => (state.phases.get(name) || { shape: "" }).shape;
const phaseText = (name) => (state.phases.get(name) || { text: "" }).text;

function swatch(name) {
  const c = phaseColour(name), s = phaseShape(name);
  const angle = s === "/" ? "135deg" : "45deg";
  return el("span", { class: "swatch", "aria-hidden": "true", style: { background: s ? `repeating-linear-gradient(${angle}, ${c} 0 2px, transparent 2px 4px)` : c } });
}

// -- the figures of a run -------------------------------------------------------------------------------------------------------

function ensureGrid() {
  if ($("grid")) return;
  $("content").replaceChildren(el("section", { id: "figures", class: "figures", "aria-label": "Figures" }), el("p", { id: "notes", class: "prov", hidden: true }), el("section", { id: "grid", class: "grid" }));
  comparisonPanel();
  panel("waterfall", "Step waterfall", { size: "tall" });
  stepPanel("phases", "Phases over the run", { size: "tall" });
  stepPanel("utilisation", "MFU and HFU");
  stepPanel("speed", "Throughput");
  panel("ops", "Slowest ops, by distance to their ceiling", { cls: "wide", html: true });
  timelinePanel();
  panel("roofline", "Roofline of the profiled steps", { size: "tall" });
  stepPanel("loss", "Loss", { size: "tall" });
  stepPanel("launches", "Launches and dispatches a step");
  stepPanel("bandwidth", "Bandwidth of the profiled steps");
  panel("memory", "Memory, planned and actual");
  panel("live", "Planned live bytes, launch by launch");
  stepPanel("resident", "Memory over the run", { size: "tall" });
  panel("ranks", "Ranks beside each other", { html: true });
  panel("waits", "Data: waits and sources", { html: true });
  panel("used", "Gates used", { html: true });
}

function drawView(v) {
  ensureGrid();
  $("stamp").hidden = !v.ungated;
  $("stamp").textContent = v.ungated ? "UNGATED: this run used components without evidence; its figures prove nothing" : "";
  const notes = [...(state.missing ? [`there is no run ${state.missing} here; this is ${v.run}`] : []), ...new Set(v.utilisation.notes)];
  $("notes").hidden = !notes.length;
  $("notes").textContent = notes.join(" · ");
  $("notes").title = notes.join("\n");
  drawFigures(v);
  for (const [id, drawOne, part] of [
    ["waterfall", drawWaterfall, v.waterfall], ["phases", drawPhases, v.phases], ["utilisation", drawUtilisation, v.utilisation], ["speed", drawSpeed, v.utilisation],
    ["ops", drawOps, v.ops], ["roofline", drawRoofline, v.ops], ["loss", drawLoss, v.loss], ["launches", drawLaunches, v.launches], ["bandwidth", drawBandwidth, v.bandwidth],
    ["memory", drawMemory, v.memory], ["resident", drawResident, v.memory], ["live", drawLive, v.memory_launches], ["ranks", drawRanks, v.ranks], ["waits", drawWaits, v.waits], ["used", drawUsed, v.gates]]) {
    const made = panels.get(id);
    stampPanel(made, part.provenance);
    made.sub.textContent = "";
    if (part.why) nothing(made, part.why); else drawOne(made, part, v);
    made.sub.title = made.sub.textContent;
  }
}

function drawFigures(v) {
  $("figures").replaceChildren(...v.figures.figures.map((f) => {
    const [number, ...unit] = f.text.split(" ");
    const goal = f.value === null ? f.reason : f.verdict ? `target ${f.target}${f.target_source && f.target_source !== "default" ? ` (${f.target_source})` : ""}` : f.reason;
    return el("div", { class: "figure", "data-key": f.key, title: `${f.title} = ${f.formula}\n${goal}\n${provenanceText(v.provenance)}` },
      el("div", { class: "name" }, f.title), el("div", { class: "value" }, number, " ", el("small", {}, unit.join(" ")), f.verdict ? el("small", { class: f.verdict }, ` ${f.verdict}`) : null),
      el("div", { class: "goal" }, goal));
  }));
}

function drawWaterfall(made, w) {
  made.sub.textContent = `${duration(w.wall_ns)} a step, mean of ${whole(w.steps)} unprofiled steps ${whole(w.first)} to ${whole(w.last)}${w.ranks.length > 1 ? `, ${w.ranks.length} ranks` : ""}`;
  const rows = w.phases.filter((p) => p.exclusive_ns > 0 || p.overlapped_ns > 0 || p.phase === "unexplained");
  let base = 0;
  const bases = rows.map((p) => { const b = base; base += p.exclusive_ns; return b / 1e6; });
  const hover = rows.map((p) => [duration(p.exclusive_ns), percent(p.share, 2), plain(phaseText(p.phase)), duration(p.overlapped_ns)]);
  const y = rows.map((p) => p.phase);
  const traces = [{ type: "bar", orientation: "h", y, x: rows.map((p) => p.exclusive_ns / 1e6), base: bases, customdata: hover, name: "exclusive", showlegend: false,
    marker: { color: rows.map((p) => phaseColour(p.phase)), pattern: { shape: rows.map((p) => phaseShape(p.phase)), size: 5, solidity: 0.4 } },
    text: rows.map((p) => `${duration(p.exclusive_ns)}  ${percent(p.share)}`), textposition: "outside", cliponaxis: false, textfont: { size: 11 },
    hovertemplate: "<b>%{y}</b> %{customdata[0]} · %{customdata[1]}<br>%{customdata[2]}<extra></extra>" }];
  if (rows.some((p) => p.overlapped_ns > 0))
    traces.push({ type: "bar", orientation: "h", y, x: rows.map((p) => p.overlapped_ns / 1e6), base: bases, width: 0.25, offset: 0.24, customdata: hover, name: "overlapped (beside the compute stream)", opacity: 0.7,
      marker: { color: "rgba(0,0,0,0)", line: { color: rows.map((p) => phaseColour(p.phase)), width: 1.2 } }, hovertemplate: "<b>%{y}</b> overlapped %{customdata[3]}<extra></extra>" });
  draw(made, traces, { barmode: "overlay", hovermode: "closest", margin: { l: 8, r: 16, t: 8, b: 34 }, xaxis: { title: { text: "ms in a step interval", standoff: 4 }, range: [0, (w.wall_ns / 1e6) * 1.22], autorange: false, fixedrange: true },
    yaxis: { autorange: "reversed", type: "category", fixedrange: true } });
}

function drawPhases(made, v) {
  const sums = v.x.map((_, i) => Object.values(v.series).reduce((n, y) => n + (y[i] || 0), 0)), sorted = [...sums].sort((a, b) => a - b);
  const most = sorted[sorted.length - 1] || 0, usual = sorted[Math.floor(0.95 * (sorted.length - 1))] || 0, cut = usual > 0 && most > 2.5 * usual;
  made.sub.textContent = `mean exclusive time of rank 0, stacked${cut ? `; ${sums.filter((s) => s > 1.4 * usual).length} peaks go beyond the chart, up to ${duration(most)}` : ""}`;
  const traces = [];
  for (const phase of state.phases.keys()) {
    const y = v.series[phase];
    if (!y || !y.some((n) => n > 0)) continue;
    const c = phaseColour(phase), s = phaseShape(phase);
    traces.push({ type: "scatter", mode: "lines", stackgroup: "all", name: phase, x: v.x, y: y.map((n) => (n === null ? null : n / 1e6)), line: { width: 0.6, color: c }, fillcolor: alpha(c, 0.75),
      fillpattern: { shape: s, size: 6, solidity: 0.35, bgcolor: s ? "rgba(0,0,0,0)" : undefined, fgcolor: s ? c : undefined }, hovertemplate: "%{y:.3f} ms" });
  }
  draw(made, traces, { xaxis: stepAxis(), yaxis: { title: { text: "ms", standoff: 4 }, ...(cut ? { range: [0, (1.4 * usual) / 1e6], autorange: false } : { rangemode: "tozero", autorange: true }), fixedrange: true }, legend: { orientation: "h", y: -0.16, yanchor: "top", font: { size: 10 }, traceorder: "normal" } });
}

const RUNS = [["#0072B2", "solid"], ["#D55E00", "dash"]];

/** Mean line and, where buckets hold several steps, the band from the smallest to the largest value. */
function band(name, s, colour, { dash = "solid", factor = 1, unit = "", digits = 4, yaxis, legendgroup = name } = {}) {
  const scale = (a) => a.map((n) => (n === null ? null : n * factor));
  const mean = scale(s.mean), low = scale(s.min), high = scale(s.max), made = [];
  if (s.x.some((_, i) => low[i] !== null && high[i] - low[i] > 0)) {
    const edge = { type: "scatter", mode: "lines", x: s.x, line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup, yaxis };
    made.push({ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: alpha(colour, 0.16) });
  }
  const text = (n) => (n === null ? "–" : Number(n.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: digits }));
  made.push({ type: "scatter", mode: s.x.length < 3 ? "markers" : "lines", x: s.x, y: mean, name, legendgroup, yaxis, line: { color: colour, width: 1.6, dash }, marker: { color: colour, size: 5 },
    customdata: s.x.map((_, i) => [text(mean[i]), low[i] === high[i] ? "" : ` (${text(low[i])} to ${text(high[i])})`]), hovertemplate: `%{customdata[0]}${unit}%{customdata[1]}` });
  return made;
}

/** Runs of a view that have something to show; names those that have not. */
function drawable(made, v) {
  const missing = v.runs.filter((r) => r.why);
  if (missing.length) made.sub.textContent = missing.map((r) => `${r.label}: ${r.why}`).join("; ");
  return v.runs.filter((r) => !r.why);
}

const named = (runs, r, what) => plain(runs.length > 1 ? `${what} ${r.label}` : what);

function drawUtilisation(made, v) {
  const runs = drawable(made, v);
  if (!made.sub.textContent) made.sub.textContent = `steady steps · ${v.provenance[0].flops_model}`;
  const traces = runs.flatMap((r, i) => [...band(named(runs, r, "MFU"), r.mfu, "#0072B2", { factor: 100, unit: " %", dash: RUNS[i][1] }), ...band(named(runs, r, "HFU"), r.hfu, "#E69F00", { factor: 100, unit: " %", dash: RUNS[i][1] })]);
  draw(made, traces, { xaxis: stepAxis(), yaxis: { title: { text: "% of peak", standoff: 4 }, rangemode: "tozero", fixedrange: true } });
}

function drawSpeed(made, v) {
  const runs = drawable(made, v);
  if (!made.sub.textContent) made.sub.textContent = "steady steps";
  draw(made, runs.flatMap((r, i) => band(named(runs, r, "tokens/s"), r.tokens_per_second, RUNS[i][0], { dash: RUNS[i][1], unit: " tokens/s", digits: 5 })),
    { xaxis: stepAxis(), yaxis: { title: { text: "tokens/s", standoff: 4 }, rangemode: "tozero", fixedrange: true } });
}

function drawLoss(made, v) {
  const runs = drawable(made, v), traces = runs.flatMap((r, i) => band(named(runs, r, "training loss"), r.loss, RUNS[i][0], { dash: RUNS[i][1], unit: " nats", digits: 5 }));
  runs.forEach((r, i) => {
    if (r.evaluations.x.length) traces.push({ type: "scatter", mode: r.evaluations.x.length > 60 ? "lines" : "lines+markers", x: r.evaluations.x, y: r.evaluations.bits_per_byte, name: named(runs, r, "validation, bits per byte"), yaxis: "y2",
      line: { color: i ? "#CC79A7" : "#009E73", width: 1.4, dash: RUNS[i][1] }, marker: { size: 5, symbol: i ? "diamond" : "circle" }, hovertemplate: "%{y:.4f} bits/byte" });
    if (r.refused.length) traces.push({ type: "scatter", mode: "markers", x: r.refused, y: r.refused.map(() => 0), name: named(runs, r, "refused steps"), marker: { symbol: "x", color: "#882255", size: 7 }, hovertemplate: "refused: not finite" });
  });
  draw(made, traces, { xaxis: stepAxis(), yaxis: { title: { text: "nats a token", standoff: 4 }, fixedrange: true }, margin: { l: 48, r: 44, t: 8, b: 30 },
    yaxis2: { overlaying: "y", side: "right", tickmode: "auto", nticks: 6, showgrid: false, automargin: true, tickfont: { size: 11 }, title: { text: "bits per byte", standoff: 4, font: { size: 11 } }, fixedrange: true } });
}

function drawLaunches(made, v) {
  const runs = drawable(made, v), traces = runs.flatMap((r, i) => band(named(runs, r, "launches"), r.launches, RUNS[i][0], { dash: RUNS[i][1] }));
  runs.forEach((r, i) => {
    if (r.dispatches.x.length) traces.push({ type: "scatter", mode: "lines+markers", x: r.dispatches.x, y: r.dispatches.value, name: named(runs, r, "dispatches (profiled steps)"), line: { color: i ? "#882255" : "#CC79A7", width: 1.2, dash: RUNS[i][1] }, marker: { size: 4 }, hovertemplate: "%{y:,}" });
  });
  draw(made, traces, { xaxis: stepAxis(), yaxis: { rangemode: "tozero", fixedrange: true } });
}

function drawBandwidth(made, v) {
  const runs = drawable(made, v), traces = [], peak = Math.max(...runs.map((r) => r.peak_bandwidth || 0)), giga = (a) => a.map((n) => (n === null ? null : n / 1e9));
  runs.forEach((r, i) => {
    const line = (y, what, colour, symbol) => ({ type: "scatter", mode: "lines+markers", x: r.x, y: giga(y), name: named(runs, r, what), line: { color: colour, width: 1.4, dash: RUNS[i][1] }, marker: { size: 5, symbol }, hovertemplate: "%{y:.4g} GB/s" });
    traces.push(line(r.all, "all launches", i ? "#CC79A7" : "#56B4E9", "circle"), line(r.bound, "bandwidth-bound launches", i ? "#D55E00" : "#0072B2", "square"));
  });
  const shapes = peak ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: peak / 1e9, y1: peak / 1e9, line: { color: css("--dim"), width: 1, dash: "dot" } }] : [];
  const annotations = peak ? [{ xref: "paper", x: 0, y: peak / 1e9, text: `peak ${scaled(peak, "B/s")}`, showarrow: false, xanchor: "left", yanchor: "bottom", font: { size: 10, color: css("--dim") } }] : [];
  draw(made, traces, { xaxis: stepAxis(), yaxis: { title: { text: "GB/s of the fewest bytes", standoff: 4 }, range: [0, 1.15 * Math.max(peak / 1e9, ...traces.flatMap((t) => t.y.filter((n) => n !== null)))], fixedrange: true }, shapes, annotations });
}

function drawMemory(made, m) {
  const process = m.arenas.filter((a) => a.planned === null);
  made.sub.textContent = ["largest of all ranks", ...process.map((a) => `whole ${a.arena}: ${scaled(a.most, "B", 1024)} at most`)].join(" · ");
  const rows = m.arenas.length > process.length ? m.arenas.filter((a) => a.planned !== null) : m.arenas, y = rows.map((a) => plain(a.arena)), mib = (n) => (n === null ? null : n / 2 ** 20), bytes = (n) => (n === null ? "not planned" : scaled(n, "B", 1024));
  const bar = (key, name, colour, shape) => ({ type: "bar", orientation: "h", y, x: rows.map((a) => mib(a[key])), name, marker: { color: colour, pattern: { shape, size: 5, solidity: 0.35 } }, customdata: rows.map((a) => bytes(a[key])), hovertemplate: "%{customdata}" });
  made.plot.style.height = `${Math.max(190, 84 + 38 * rows.length)}px`;
  draw(made, [bar("planned", "planned", "#56B4E9", "/"), bar("most", "actual, most", "#0072B2", "")], { barmode: "group", hovermode: "y unified", margin: { l: 8, r: 10, t: 8, b: 34 },
    xaxis: { title: { text: "MiB", standoff: 4 }, fixedrange: true, rangemode: "tozero" }, yaxis: { type: "category", autorange: "reversed", fixedrange: true } });
}

const LINES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#882255", "#6E5BB8"];

function drawResident(made, m) {
  const process = new Set(m.arenas.filter((a) => a.planned === null).map((a) => a.arena)), apart = process.size && process.size < m.arenas.length;
  made.sub.textContent = `rank 0, at the end of a step${apart ? `; ${[...process].join(", ")} on the right axis` : ""}`;
  const names = Object.keys(m.series).sort((a, b) => process.has(a) - process.has(b));
  draw(made, names.flatMap((arena, i) => band(plain(arena), m.series[arena], process.has(arena) ? "#9AA3A7" : LINES[i % LINES.length], { factor: 1 / 2 ** 20, unit: " MiB", dash: process.has(arena) ? "dot" : i < LINES.length ? "solid" : "dash", yaxis: apart && process.has(arena) ? "y2" : undefined })),
    { xaxis: stepAxis(), margin: { l: 48, r: 44, t: 8, b: 30 }, yaxis: { title: { text: "MiB", standoff: 4 }, rangemode: "tozero", fixedrange: true },
      yaxis2: { overlaying: "y", side: "right", showgrid: false, automargin: true, tickmode: "auto", nticks: 6, rangemode: "tozero", tickfont: { size: 11 }, fixedrange: true } });
}

function drawLive(made, m) {
  made.sub.textContent = `Segment ${m.plan}, activation arena`;
  const traces = [...state.phases.keys()].filter((p) => m.phase.includes(p)).map((phase) => {
    const at = m.launch.map((_, i) => i).filter((i) => m.phase[i] === phase);
    return { type: "bar", name: phase, x: at.map((i) => m.launch[i]), y: at.map((i) => m.live[i] / 2 ** 20), marker: { color: phaseColour(phase), pattern: { shape: phaseShape(phase), size: 5, solidity: 0.4 } }, width: 1,
      customdata: at.map((i) => [plain(m.op[i]), plain(m.layer[i])]), hovertemplate: "%{customdata[0]} %{customdata[1]}: %{y:.3f} MiB" };
  });
  draw(made, traces, { barmode: "overlay", bargap: 0, xaxis: { title: { text: "launch", standoff: 4 } }, yaxis: { title: { text: "MiB", standoff: 4 }, rangemode: "tozero", fixedrange: true } });
}

function drawRoofline(made, v, view) {
  const ops = v.ops.filter((o) => o.intensity > 0 && o.flops_rate > 0);
  if (!ops.length) return nothing(made, "no profiled op with FLOPs and bytes");
  made.sub.textContent = `${v.steps} profiled steps; area: share of device time`;
  const traces = [], p = v.peak_flops, b = v.peak_bandwidth;
  const low = Math.min(...ops.map((o) => o.intensity)) / 3, high = Math.max(p && b ? (3 * p) / b : 0, ...ops.map((o) => o.intensity * 3));
  if (p && b) {
    const x = [low, p / b, high].filter((n) => n >= low && n <= high);
    traces.push({ type: "scatter", mode: "lines", x, y: x.map((n) => Math.min(p, n * b)), name: "ceiling", line: { color: css("--dim"), width: 1.5 }, hovertemplate: "ceiling %{y:.3s}FLOP/s<extra></extra>" });
  }
  for (const phase of state.phases.keys()) {
    const mine = ops.filter((o) => o.phase === phase);
    if (mine.length) traces.push({ type: "scatter", mode: "markers", name: phase, x: mine.map((o) => o.intensity), y: mine.map((o) => o.flops_rate),
      marker: { color: phaseColour(phase), size: mine.map((o) => 7 + 38 * Math.sqrt(o.share || 0)), opacity: 0.8, line: { color: css("--panel"), width: 1 } },
      customdata: mine.map((o) => [plain(o.op), plain(o.shape), o.distance === null ? "no ceiling known" : `${percent(1 / o.distance)} of the ceiling, ${o.bound}-bound`, duration(o.device_ns)]),
      hovertemplate: "<b>%{customdata[0]}</b> %{customdata[1]}<br>%{customdata[2]} · %{customdata[3]} a step<extra></extra>" });
  }
  draw(made, traces, { hovermode: "closest", xaxis: { type: "log", title: { text: "FLOPs a byte", standoff: 4 }, range: [Math.log10(low), Math.log10(high)], autorange: false }, yaxis: { type: "log", title: { text: "FLOP/s", standoff: 4 }, exponentformat: "SI" } });
}

// -- tables ---------------------------------------------------------------------------------------------------------------------

const OPS = [
  ["op", "op", "l code", (o) => [swatch(o.phase), o.op]], ["phase", "phase", "l", (o) => o.phase], ["shape", "shape", "l code shape", (o) => o.shape], ["device_ns", "time", "", (o) => duration(o.device_ns)],
  ["share", "share", "", (o) => percent(o.share)], ["distance", "of the ceiling", "l", ceilingCell], ["bound", "bound by", "l", (o) => o.bound || "–"], ["flops_rate", "FLOP/s", "", (o) => scaled(o.flops_rate, "")],
  ["bandwidth", "bytes/s", "", (o) => scaled(o.bandwidth, "")], ["intensity", "FLOPs/byte", "", (o) => (o.intensity === null ? "–" : o.intensity.toPrecision(3))], ["runs", "runs", "", (o) => whole(o.runs)],
  ["dispatches", "dispatches", "", (o) => whole(o.dispatches)], ["enqueue_ns", "enqueue", "", (o) => duration(o.enqueue_ns)], ["wait_ns", "wait", "", (o) => duration(o.wait_ns)],
];
const opsOrder = { key: "device_ns", down: true };

function ceilingCell(o) {
  if (o.distance === null) return "no ceiling known";
  const reached = Math.min(1, 1 / o.distance);
  return [el("span", { class: "bar" }, el("i", { style: { width: `${100 * reached}%`, background: phaseColour(o.phase) } })), o.distance < 1 ? el("span", { class: "warn", title: "faster than the measured ceiling: its operands came from a cache, or the peak was measured too low" }, `${percent(1 / o.distance)} (above it)`)
    : `${percent(1 / o.distance)} (${o.distance >= 1000 ? scaled(o.distance, "") : o.distance.toPrecision(3)} x)`];
}

function drawOps(made, v) {
  made.none.hidden = true; made.plot.hidden = false;
  made.plot.style.maxHeight = "460px"; made.plot.style.overflowY = "auto";
  made.sub.textContent = `${duration(v.device_ns)} of device time a profiled step, ${v.steps} steps${v.rest && v.rest.ops ? `; ${v.rest.ops} more ops take ${percent(v.rest.share)}` : ""}; the ceiling is max(FLOPs / peak, bytes / bandwidth)`;
  const sorted = [...v.ops].sort((a, b) => { const x = a[opsOrder.key], y = b[opsOrder.key]; const c = typeof x === "string" ? x.localeCompare(y) : (x ?? -1) - (y ?? -1); return opsOrder.down ? -c : c; });
  const focus = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.sort : null;
  made.plot.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, OPS.map(([key, title, cls]) => el("th", { scope: "col", class: cls.includes("l") ? "l" : null, "aria-sort": key === opsOrder.key ? (opsOrder.down ? "descending" : "ascending") : null },
    el("button", { type: "button", "data-sort": key, onclick: () => { opsOrder.down = key === opsOrder.key ? !opsOrder.down : typeof v.ops[0][key] !== "string"; opsOrder.key = key; drawOps(made, v); } }, title + (key === opsOrder.key ? (opsOrder.down ? " ↓" : " ↑") : "")))))),
    el("tbody", {}, sorted.map((o) => el("tr", {}, OPS.map(([key, , cls, cell]) => el("td", { class: cls, title: key === "shape" ? o.shape : key === "op" ? o.component : null }, cell(o))))))));
  if (focus) { const again = made.plot.querySelector(`[data-sort="${focus}"]`); if (again) again.focus(); }
}

function drawRanks(made, v) {
  made.none.hidden = true; made.plot.hidden = false;
  made.sub.textContent = v.sentence;
  const head = ["rank", "own time", "longer than the others'", "verdict", "exposed", "overlapped"];
  const range = (r) => r.low === null || r.high === null ? percent(r.apart) : `${percent(r.apart)} (${percent(r.low)} to ${percent(r.high)})`;
  made.plot.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", {}, h)))), el("tbody", {}, v.rows.map((r) =>
    el("tr", {}, el("td", {}, r.rank), el("td", {}, duration(r.own_ns)), el("td", {}, range(r)), el("td", { class: r.verdict === "SLOWER" ? "bad" : "" }, r.verdict),
      el("td", {}, duration(r.exposed_ns)), el("td", {}, duration(r.overlapped_ns)))))));
}

function drawWaits(made, v) {
  made.none.hidden = true; made.plot.hidden = false;
  const table = (head, rows) => el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", {}, h)))), el("tbody", {}, rows.map((r) => el("tr", {}, r.map((c) => el("td", {}, c))))));
  const worst = v.ranks.reduce((a, b) => (b.longest_ns > a.longest_ns ? b : a));
  made.sub.textContent = `longest wait for batches: ${duration(worst.longest_ns)}, step ${whole(worst.longest_step)}`;
  made.plot.replaceChildren(
    table(["rank", "steps", "of them waited", "wait a step", "of its time", "making them"], v.ranks.map((r) => [r.rank, whole(r.steps), whole(r.waited), duration(r.wait_ns), percent(r.share, 3), duration(r.made_ns)])),
    table(["source", "of the samples", "padding", "bits per byte"], v.sources.map((s) => [s.source, percent(s.share), percent(s.padding), s.bits_per_byte === null ? "–" : s.bits_per_byte.toFixed(4)])));
}

function drawUsed(made, v) {
  made.none.hidden = true; made.plot.hidden = false;
  const gates = [...new Set(v.components.flatMap((c) => Object.keys(c.evidence)))].sort(), bare = v.components.filter((c) => !Object.keys(c.evidence).length).length;
  made.sub.textContent = `${v.components.length} components${bare ? `, ${bare} without evidence` : ""}, as of the run; today's status is on the Gates page`;
  made.plot.style.maxHeight = "340px"; made.plot.style.overflowY = "auto";
  made.plot.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "l" }, "component"), gates.map((g) => el("th", { class: "l" }, g)), gates.length ? null : el("th", { class: "l" }, "evidence"))),
    el("tbody", {}, v.components.map((c) => el("tr", {}, el("td", { class: "l code" }, c.component), gates.map((g) => el("td", { class: "l code dimmed", title: c.evidence[g] || null }, c.evidence[g] ? String(c.evidence[g]).slice(0, 8) : "–")), gates.length ? null : el("td", { class: "l bad" }, "none"))))));
}

// -- comparison -----------------------------------------------------------------------------------------------------------------

const comparison = { key: "", at: 0, anyway: false };
const VERDICTS = { SLOWER: "bad", FASTER: "good", SAME: "dimmed", UNDECIDED: "warn" };

function comparisonPanel() {
  const made = panel("comparison", "Comparison", { cls: "wide", html: true });
  made.node.hidden = true;
  made.forest = el("div", { class: "plot", role: "img", "aria-label": "Change of each phase, with its interval" });
  made.rows = el("div", { class: "scroll" });
  made.plot.replaceChildren(made.forest, made.rows);
}

function dropComparison() {
  comparison.key = "";
  comparison.anyway = false;
  if (panels.has("comparison")) panels.get("comparison").node.hidden = true;
  refresh();
}

/** Judging costs more than drawing, so a run that goes on is compared again every ten seconds only. */
async function showComparison() {
  if (!state.other || !panels.has("comparison")) return;
  const key = `${state.run}\n${state.other}\n${comparison.anyway}`, made = panels.get("comparison");
  if (comparison.key === key && (Date.now() - comparison.at < 10000 || comparison.stamp === state.shown)) return;
  Object.assign(comparison, { key, at: Date.now(), stamp: state.shown });
  const q = new URLSearchParams({ a: state.other, b: state.run, ...(comparison.anyway ? { anyway: "1" } : {}) });
  const c = await get(`/api/compare?${q}`);
  if (comparison.key !== key || panels.get("comparison") !== made) return;
  made.node.hidden = false;
  if (c.error) {
    stampPanel(made, state.view && state.view.provenance);
    made.sub.textContent = `${state.run} against ${state.other}`;
    nothing(made, "");
    made.none.replaceChildren(el("div", {}, el("p", { class: "bad" }, c.error.what), el("p", {}, [c.error.came, c.error.expected].filter(Boolean).join(" · ")),
      comparison.anyway ? null : el("button", { type: "button", id: "anyway", onclick: () => { comparison.anyway = true; showComparison(); } }, "Compare anyway, and say how they differ")));
    return;
  }
  drawComparison(made, c);
}

function drawComparison(made, c) {
  made.none.hidden = true; made.plot.hidden = false;
  stampPanel(made, c.provenance);
  const out = c.rows.filter((r) => r.verdict === "SLOWER" || r.verdict === "FASTER").length;
  made.sub.textContent = `${c.b} against ${c.a} · ${whole(c.steps[1])} and ${whole(c.steps[0])} steady steps · ${whole(c.stalls[1])} and ${whole(c.stalls[0])} stalls · ${out ? `${out} rows differ` : "no row differs"}`;
  const order = { SLOWER: 0, FASTER: 0, UNDECIDED: 1, SAME: 2 }, change = (i) => (i.estimate === null ? "–" : `${i.estimate >= 0 ? "+" : "−"}${percent(Math.abs(i.estimate), 2)}`);
  const signed = (x) => (x === null ? "?" : `${x >= 0 ? "+" : "−"}${percent(Math.abs(x), 2)}`);
  const rows = c.rows.map((r, i) => [r, i]).sort(([r, i], [s, j]) => order[r.verdict] - order[s.verdict] || (order[r.verdict] === 0 ? Math.abs(s.own.estimate) * s.share - Math.abs(r.own.estimate) * r.share : i - j)).map(([r]) => r);
  const forest = c.rows.filter((r) => r.kind !== "op" && r.own.estimate !== null && r.own.low !== null && r.own.high !== null);
  made.forest.hidden = !forest.length;
  if (forest.length) {
    made.forest.style.height = `${96 + 21 * forest.length}px`;
    const of = (verdict, colour, symbol) => { const f = forest.filter((r) => r.verdict === verdict); return { type: "scatter", mode: "markers", orientation: "h", name: verdict, y: f.map((r) => plain(r.name)), x: f.map((r) => 100 * r.own.estimate), marker: { color: colour, symbol, size: 8 },
      error_x: { type: "data", symmetric: false, array: f.map((r) => 100 * (r.own.high - r.own.estimate)), arrayminus: f.map((r) => 100 * (r.own.estimate - r.own.low)), color: colour, thickness: 1.4, width: 3 },
      customdata: f.map((r) => `${change(r.own)} (${signed(r.own.low)} to ${signed(r.own.high)}), ${duration(r.a_ns)} to ${duration(r.b_ns)}`), hovertemplate: "<b>%{y}</b> %{customdata}<extra></extra>" }; };
    const traces = [of("SLOWER", "#D55E00", "triangle-right"), of("FASTER", "#009E73", "triangle-left"), of("UNDECIDED", "#E69F00", "circle-open"), of("SAME", "#9AA3A7", "circle")].filter((t) => t.x.length);
    const reach = Math.max(3, ...forest.filter((r) => r.share >= 0.02 || r.verdict !== "UNDECIDED").map((r) => 100 * Math.max(Math.abs(r.own.low), Math.abs(r.own.high)))) * 1.1;
    Plotly.react(made.forest, traces, { ...layoutFor(made, { hovermode: "closest", margin: { l: 8, r: 10, t: 8, b: 32 }, xaxis: { title: { text: `% change of ${plain(c.b)} against ${plain(c.a)}`, standoff: 4 }, range: [-reach, reach], autorange: false, fixedrange: true },
      yaxis: { type: "category", autorange: "reversed", categoryorder: "array", categoryarray: forest.map((r) => plain(r.name)), fixedrange: true },
      shapes: [{ type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: { color: css("--dim"), width: 1 } }] }), uirevision: "forest" }, CONFIG);
  }
  const head = ["verdict", "what", "name", c.a, c.b, "change", "interval", "matters from", "share", ""];
  made.rows.style.maxHeight = "420px"; made.rows.style.overflowY = "auto";
  made.rows.replaceChildren(...c.notes.map((n) => el("p", { class: "warn" }, n)),
    el("p", { id: "common" }, `In common: ${signed(c.common.shift)} ${c.common.verdict} (${c.common.reason})${c.common.taken ? "; rows are judged without it" : ""}`),
    el("table", {}, el("thead", {}, el("tr", {}, head.map((h, i) => el("th", { class: i < 3 || i === 9 ? "l" : null, scope: "col" }, h)))),
      el("tbody", {}, rows.map((r) => el("tr", { "data-verdict": r.verdict, "data-name": r.name }, el("td", { class: `l ${VERDICTS[r.verdict]}` }, r.verdict), el("td", { class: "l" }, r.kind), el("td", { class: "l code shape", title: r.name }, state.phases.has(r.name) ? swatch(r.name) : null, r.name),
        el("td", {}, duration(r.a_ns)), el("td", {}, duration(r.b_ns)), el("td", { class: VERDICTS[r.verdict] }, change(r.own)), el("td", {}, r.own.low === null ? "–" : `${signed(r.own.low)} to ${signed(r.own.high)}`), el("td", {}, percent(r.line, 1)), el("td", {}, percent(r.share)), el("td", { class: "l dimmed" }, r.reason || ""))))));
}

// -- timeline -------------------------------------------------------------------------------------------------------------------

function timelinePanel() {
  if (panels.has("timeline")) return panels.get("timeline");
  const made = panel("timeline", "Timeline of a profiled step", { cls: "wide", size: "timeline" });
  made.plot.tabIndex = 0;
  const step = el("select", { id: "tl-step", "aria-label": "step", onchange: (e) => { showTimeline({ step: Number(e.target.value), window: null }); } });
  const rank = el("select", { id: "tl-rank", "aria-label": "rank", onchange: (e) => { showTimeline({ rank: e.target.value === "" ? null : Number(e.target.value), window: null }); } });
  const button = (text, title, act, id) => el("button", { type: "button", title, id, onclick: act }, text);
  made.aside.append(el("label", {}, "step ", step), el("label", { id: "tl-rank-label" }, "rank ", rank),
    button("−", "zoom out (-)", () => zoomTimeline(2), "tl-out"), button("+", "zoom in (+)", () => zoomTimeline(0.5), "tl-in"),
    button("←", "earlier (left arrow)", () => moveTimeline(-0.4)), button("→", "later (right arrow)", () => moveTimeline(0.4)),
    button("step", "the step itself (0)", () => showTimeline({ window: null }), "tl-own"), button("all", "and what follows it: evaluation, checkpoint (a)", wholeTimeline, "tl-all"));
  made.listen = (plot) => {
    plot.on("plotly_relayout", (change) => {
      const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"];
      if (low !== undefined && high !== undefined && high > low) showTimeline({ window: [Math.round(low * 1e6), Math.round(high * 1e6)] });
    });
    plot.on("plotly_doubleclick", () => { showTimeline({ window: null }); return false; });
  };
  made.plot.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && !e.metaKey) return;
    e.preventDefault();
    const box = made.plot.querySelector(".nsewdrag");
    const at = box ? (e.clientX - box.getBoundingClientRect().left) / box.getBoundingClientRect().width : 0.5;
    zoomTimeline(e.deltaY > 0 ? 1.5 : 1 / 1.5, Math.min(1, Math.max(0, at)));
  }, { passive: false });
  made.node.addEventListener("keydown", (e) => {
    if (e.target.tagName === "SELECT" || e.ctrlKey || e.metaKey || e.altKey) return;
    const act = { "+": () => zoomTimeline(0.5), "=": () => zoomTimeline(0.5), "-": () => zoomTimeline(2), ArrowLeft: () => moveTimeline(-0.25),
      ArrowRight: () => moveTimeline(0.25), "0": () => showTimeline({ window: null }), a: wholeTimeline, "[": () => stepTimeline(-1), "]": () => stepTimeline(1) }[e.key];
    if (act) { e.preventDefault(); e.stopPropagation(); act(); }
  });
  return made;
}

function timelineWindow() {
  const t = state.timeline;
  return t.window || (t.answer && t.answer.own) || null;
}

function wholeTimeline() {
  if (state.timeline.answer && state.timeline.answer.step !== null) showTimeline({ window: [...state.timeline.answer.extent] });
}

function zoomTimeline(factor, at = 0.5) {
  const w = timelineWindow(), extent = state.timeline.answer && state.timeline.answer.extent;
  if (!w) return;
  const span = Math.max(2000, (w[1] - w[0]) * factor), centre = w[0] + (w[1] - w[0]) * at;
  if (span >= extent[1] - extent[0]) return wholeTimeline();
  showTimeline({ window: clampWindow([centre - span * at, centre + span * (1 - at)], extent) });
}

function moveTimeline(share) {
  const w = timelineWindow();
  if (!w) return;
  const by = (w[1] - w[0]) * share;
  showTimeline({ window: clampWindow([w[0] + by, w[1] + by], state.timeline.answer.extent) });
}

function clampWindow([low, high], extent) {
  const span = high - low;
  const start = Math.min(Math.max(low, extent[0]), Math.max(extent[0], extent[1] - span));
  return [Math.round(start), Math.round(start + span)];
}

function stepTimeline(by) {
  const t = state.timeline;
  if (!t.answer || !t.answer.steps.length) return;
  const at = t.answer.steps.findIndex((s) => s.step === t.answer.step) + by;
  if (at >= 0 && at < t.answer.steps.length) showTimeline({ step: t.answer.steps[at].step, window: null });
}

async function showTimeline(change) {
  const t = Object.assign(state.timeline, change), serial = ++t.serial;
  const made = timelinePanel();
  let answer;
  try {
    answer = await get(runUrl("timeline", { step: t.step, rank: t.rank, from: t.window && t.window[0], to: t.window && t.window[1] }));
  } catch { return; }
  if (t !== state.timeline || serial !== t.serial) return;  // another run is shown, or another step
  if (answer.error) {
    made.sub.textContent = "";
    return nothing(made, `${answer.error.what}: ${answer.error.came || ""}`);
  }
  t.answer = answer;
  made.aside.hidden = answer.step === null;
  if (answer.step === null) { stampPanel(made, state.view && state.view.provenance); return nothing(made, answer.note); }
  drawTimeline(made, answer);
}

function drawTimeline(made, a) {
  const t = state.timeline, ranks = a.steps.find((s) => s.step === a.step).ranks, key = JSON.stringify([a.steps, a.step]);
  if (t.steps !== key) {
    t.steps = key;
    $("tl-step").replaceChildren(...a.steps.map((s) => el("option", { value: s.step }, whole(s.step))));
    $("tl-rank").replaceChildren(...(ranks.length > 1 ? [el("option", { value: "" }, "all")] : []), ...ranks.map((r) => el("option", { value: r }, String(r))));
  }
  $("tl-step").value = a.step;
  $("tl-rank").value = a.rank === null ? (ranks.length > 1 ? "" : ranks[0]) : a.rank;
  $("tl-rank-label").hidden = ranks.length < 2;
  stampPanel(made, state.view && state.view.provenance);
  const coarse = a.drawn < a.events ? `, ${whole(a.events)} events drawn as ${whole(a.drawn)} bars: zoom in for each` : `, ${whole(a.events)} events`;
  const odd = a.odd ? `; ${a.odd} left out: they end before they start` : "";
  const lost = a.arrows_left_out ? `; ${whole(a.arrows_left_out)} arrows not drawn at this zoom` : "";
  made.sub.textContent = `${duration(a.window[1] - a.window[0])} of ${duration(a.extent[1])}${coarse}${lost}${odd}`;
  const span = a.window[1] - a.window[0], b = a.bars, traces = [];
  for (const phase of state.phases.keys()) {
    const at = [];
    for (let i = 0; i < b.category.length; i += 1) if (b.category[i] === phase) at.push(i);
    if (!at.length) continue;
    traces.push({
      type: "bar", orientation: "h", name: phase, y: at.map((i) => b.track[i]), base: at.map((i) => b.start[i] / 1e6),
      x: at.map((i) => Math.max(b.stop[i] - b.start[i], span / 4000) / 1e6), width: 0.72,
      marker: { color: phaseColour(phase), line: { width: span / at.length > 0 ? 0.5 : 0, color: css("--panel") }, pattern: { shape: phaseShape(phase), size: 5, solidity: 0.4 } },
      text: at.map((i) => (b.stop[i] - b.start[i] > span * 0.025 ? plain(b.name[i]) : "")), textposition: "inside", insidetextanchor: "start",
      constraintext: "none", cliponaxis: true, textangle: 0, textfont: { size: 10, color: "#fff" },
      customdata: at.map((i) => [plain(b.name[i]), duration(b.stop[i] - b.start[i]), duration(b.start[i]), b.events[i] > 1 ? `${b.events[i]} events, ${duration(b.busy[i])} together` : "", phase]),
      hovertemplate: "<b>%{customdata[0]}</b> %{customdata[1]}<br>at %{customdata[2]} · %{customdata[4]}<br>%{customdata[3]}<extra></extra>",
    });
  }
  if (a.arrows.length) {
    const x = [], y = [], ex = [], ey = [];
    for (const [from, at, to, then] of a.arrows) { x.push(at / 1e6, then / 1e6, null); y.push(from, to, null); ex.push(then / 1e6); ey.push(to); }
    traces.push({ type: "scatter", mode: "lines", x, y, line: { color: css("--dim"), width: 0.8 }, opacity: 0.55, hoverinfo: "skip", name: "enqueue to execution", legendrank: 2000 });
    traces.push({ type: "scatter", mode: "markers", x: ex, y: ey, marker: { symbol: "triangle-right", size: 6, color: css("--dim") }, hoverinfo: "skip", showlegend: false });
  }
  made.plot.style.height = `${Math.max(220, 110 + 46 * a.tracks.length)}px`;
  made.revision = `${a.step}/${a.rank}/${a.window}`;
  draw(made, traces, {
    barmode: "overlay", hovermode: "closest", dragmode: "zoom", margin: { l: 8, r: 10, t: 8, b: 34 },
    xaxis: { title: { text: "ms from the first event of the step", standoff: 4, font: { size: 11 } }, range: [a.window[0] / 1e6, a.window[1] / 1e6], autorange: false },
    yaxis: { fixedrange: true, categoryorder: "array", categoryarray: [...a.tracks].reverse(), range: [-0.6, a.tracks.length - 0.4], type: "category" },
  });
}

// -- gates page -----------------------------------------------------------------------------------------------------------------

const gatesPage = { answer: null, text: "", only: false };

async function showGates(fresh = false) {
  const main = $("content");
  if (!gatesPage.answer) main.replaceChildren(el("p", { class: "none" }, "asking the registry …"));
  let answer;
  try { answer = await get(`/api/gates${fresh ? "?fresh=1" : ""}`); } catch { return unreachable(); }
  notice(answer.error || null);
  if (answer.error) return main.replaceChildren();
  gatesPage.answer = answer;
  drawGates();
}

function drawGates() {
  const a = gatesPage.answer, main = $("content");
  const search = el("input", { type: "search", id: "gate-search", placeholder: "component, kind, verdict …", value: gatesPage.text, oninput: (e) => { gatesPage.text = e.target.value; rows(); } });
  const only = el("input", { type: "checkbox", id: "gate-only", checked: gatesPage.only, onchange: (e) => { gatesPage.only = e.target.checked; rows(); } });
  const body = el("tbody"), count = el("span", { class: "sub", id: "gate-count" });
  const head = ["component", "kind", "usable", ...a.gates];
  main.replaceChildren(el("section", { class: "panel wide" },
    el("div", { class: "head" }, el("h2", {}, `Gates on ${a.described}`), count),
    el("div", { class: "filters" }, el("label", {}, "Find ", search), el("label", { class: "check" }, only, " only what is not usable"),
      el("button", { type: "button", onclick: () => showGates(true) }, "Ask again")),
    el("div", { class: "scroll" }, el("table", { class: "gates" }, el("thead", {}, el("tr", {}, head.map((h) => el("th", { scope: "col" }, h)))), body)),
    el("p", { class: "prov" }, `machine class ${a.machine} · asked at ${new Date(a.asked_unix * 1000).toLocaleTimeString()} · the verdict is of the best evidence; stale: the code changed since`)));
  function rows() {
    const needle = gatesPage.text.trim().toLowerCase();
    const kept = a.components.filter((c) => (!gatesPage.only || !c.usable) && (!needle || gateText(c).includes(needle)));
    count.textContent = `${kept.length} of ${a.components.length} shown · ${a.usable} usable`;
    body.replaceChildren(...kept.map((c) => el("tr", {}, el("th", { scope: "row", class: "id" }, c.id), el("td", {}, `${c.kind}${c.backend ? ` · ${c.backend}` : ""}`),
      el("td", { class: c.usable ? "good" : "bad" }, c.usable ? "yes" : "no", c.presupposed.length ? el("small", {}, `presupposes ${c.presupposed.join(", ")}`) : null),
      a.gates.map((g) => gateCell(c, g)))));
  }
  rows();
}

const gateText = (c) => [c.id, c.kind, c.backend, c.usable ? "usable" : "not usable", ...Object.values(c.gates).flatMap((g) => [g.verdict, g.evidence])].join(" ").toLowerCase();

function gateCell(c, gate) {
  const g = c.gates[gate];
  if (!g) return el("td", { class: "dimmed" }, c.exempt[gate] ? el("details", {}, el("summary", {}, "exempt"), el("small", {}, c.exempt[gate])) : "");
  const cls = g.satisfied ? "good" : g.evidence === "none" ? "dimmed" : g.evidence === "stale" ? "warn" : "bad";
  const cell = [el("span", { class: cls }, g.verdict), ` ${g.evidence === "none" ? "" : g.evidence}`];
  return el("td", { title: g.machine ? `evidence of ${g.machine}` : "no evidence" }, g.satisfied ? cell : el("details", {}, el("summary", {}, cell), el("small", {}, g.why)));
}

// -- the run picker and the loop ------------------------------------------------------------------------------------------------

async function loadRuns() {
  const answer = await get("/api/runs");
  if (answer.error) { state.runs = []; notice(answer.error); return; }
  state.phases = new Map(answer.phases.map((p) => [p.name, p]));
  state.root = answer.root;
  const key = JSON.stringify(answer.runs.map((r) => [r.name, r.status, Boolean(r.error)]));
  state.runs = answer.runs;
  if (key !== state.runsKey) {
    state.runsKey = key;
    const option = (r) => el("option", { value: r.name }, `${r.name}${r.status === "UNGATED" ? "  [UNGATED]" : ""}${r.error || !r.metrics ? "  (!)" : ""}`);
    $("run").replaceChildren(...(state.runs.length ? state.runs.map(option) : [el("option", { value: "" }, "no run")]));
    $("other").replaceChildren(el("option", { value: "" }, "–"), ...state.runs.map(option));
  }
  if (!state.runs.some((r) => r.name === state.run)) {
    if (state.run && state.runs.length) state.missing = state.run;
    state.run = state.runs.length ? state.runs[0].name : "";
  }
  if (!state.runs.some((r) => r.name === state.other)) state.other = "";
  $("run").value = state.run;
  $("other").value = state.other;
}

function pickRun(name) {
  Object.assign(state, { run: name, view: null, progress: null, newest: null, first: null, last: null, missing: "", broken: null, every: TICK_MS });
  $("first").value = $("last").value = "";
  state.timeline = { step: null, rank: null, window: null, answer: null, serial: state.timeline.serial + 1, steps: "" };
  clearPage();
  keepAddress();
  tick();
}

function clearPage() {
  panels.forEach((p) => { if (p.drawn) Plotly.purge(p.plot); });
  panels.clear();
  $("content").replaceChildren();
  $("stamp").hidden = true;
  notice(null);
  state.shown = "";
}

function showSteps(first, last) {
  state.first = first;
  state.last = last !== null && first !== null && last < first ? first : last;
  $("first").value = state.first ?? "";
  $("last").value = state.last ?? "";
  keepAddress();
  refresh();
}

function unreachable() {
  $("progress").replaceChildren(el("span", { class: "dot error" }), "the dashboard does not answer; trying again");
}

function noRuns() {
  clearPage();
  $("progress").replaceChildren();
  notice({ what: "There is no run here yet", came: state.root, expected: "run directories, as `alpha train` makes them", do: "alpha train configs/demo.toml (this page shows it as soon as it begins)" }, true);
}

let ticking = false;
let lastList = 0;

async function tick() {
  if (ticking || state.page !== "profiling") return;
  ticking = true;
  try {
    if (Date.now() - lastList > 5 * TICK_MS || state.runs === null) { await loadRuns(); lastList = Date.now(); keepAddress(); }
    if (!state.run) { noRuns(); return; }
    const run = state.run;
    const p = await get(runUrl("progress", { since: state.newest ? state.newest[0] : -1 }));
    if (run !== state.run) return;
    state.progress = p;
    if (p.error) { state.shown = ""; showError(p.error); return; }
    showProgress();
    if ((state.follow || !state.view) && p.stamp !== state.shown && Date.now() - state.asked >= state.every) await refresh();
  } catch (error) {
    if (error instanceof TypeError || error instanceof SyntaxError) unreachable(); else throw error;
  } finally { ticking = false; }
}

/** The page of a run that cannot be shown; said once, however often it is asked again. */
function showError(error) {
  const key = JSON.stringify(error), shown = state.shown;
  if (!state.broken || JSON.stringify(state.broken) !== key) {
    clearPage();
    notice(error, false);
  }
  Object.assign(state, { view: null, broken: error, shown: ["busy", "machine", "server"].includes(error.kind) ? "" : shown });
  showProgress();
}

/** Ask for the figures and draw them; one request at a time, and a run that is slow to read is asked less often. */
async function refresh() {
  if (!state.run) return;
  if (state.busy) { state.again = true; return; }
  state.busy = true;
  if (!state.view && !panels.size) $("content").replaceChildren(el("p", { class: "none" }, `reading ${state.run} …`));
  const run = state.run, began = Date.now(), stamp = state.progress && state.progress.stamp;
  try {
    const points = Math.round(Math.min(900, Math.max(200, window.innerWidth / 2)));
    const view = await get(runUrl("view", { points, first: state.first, last: state.last, with: state.other || null }));
    if (run !== state.run) return;
    state.asked = Date.now();
    state.every = Math.max(TICK_MS, 6 * (state.asked - began));
    if (view.error) { state.shown = stamp; showError(view.error); return; }
    state.broken = null;
    notice(null);
    showProgress();
    const isNew = !state.view;
    if (isNew) $("content").replaceChildren();
    state.view = view;
    state.shown = stamp;
    drawView(view);
    if (isNew || (state.follow && !state.timeline.window && state.timeline.step === null)) showTimeline({});
    if (state.other) await showComparison();
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  } catch (error) {
    if (error instanceof TypeError && /fetch/i.test(error.message)) unreachable(); else throw error;
  } finally {
    state.busy = false;
    if (state.again) { state.again = false; refresh(); }
  }
}

// -- keys and start -------------------------------------------------------------------------------------------------------------

function keys(e) {
  if (e.key === "Escape" && e.target !== document.body) e.target.blur();
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName) && e.target.type !== "checkbox";
  if (typing || e.ctrlKey || e.metaKey || e.altKey || $("help").open) return;
  const on = state.page === "profiling";
  const act = {
    "?": () => $("help").showModal(), g: () => document.querySelector("[data-page=gates]").click(), p: () => document.querySelector("[data-page=profiling]").click(),
    r: on && (() => $("run").focus()), c: on && (() => $("other").focus()), f: on && (() => $("follow").click()), z: on && (() => showSteps(null, null)),
    t: on && panels.has("timeline") && (() => { panels.get("timeline").plot.focus(); panels.get("timeline").node.scrollIntoView({ block: "center" }); }),
  }[e.key];
  if (act) { e.preventDefault(); act(); }
}

function start() {
  for (const a of document.querySelectorAll("nav a")) {
    a.dataset.href = a.getAttribute("href");
    if (a.dataset.page === state.page) a.setAttribute("aria-current", "page");
  }
  document.addEventListener("keydown", keys);
  $("keys").addEventListener("click", () => $("help").showModal());
  if (state.page === "gates") {
    document.title = "Alpha gates";
    $("picker").hidden = true;
    keepAddress();
    showGates();
    return;
  }
  $("picker").addEventListener("submit", (e) => e.preventDefault());
  $("run").addEventListener("change", (e) => pickRun(e.target.value));
  $("other").addEventListener("change", (e) => { state.other = e.target.value; keepAddress(); comparison.anyway = false; if (!state.other) dropComparison(); else refresh(); });
  $("follow").addEventListener("change", (e) => { state.follow = e.target.checked; if (state.follow) tick(); });
  for (const id of ["first", "last"]) $(id).addEventListener("change", () => showSteps(numberIn($("first").value), numberIn($("last").value)));
  $("whole").addEventListener("click", () => showSteps(null, null));
  $("first").value = state.first ?? "";
  $("last").value = state.last ?? "";
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    panels.forEach((p) => { if (p.drawn && !p.plot.hidden) draw(p, p.traces, p.layout); });
  });
  tick();
  setInterval(() => { if (!document.hidden) tick(); }, TICK_MS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); });
}

start();
