// Traces: when every task of a launch waited and ran, simulated or measured; zoom, differences, export to Perfetto.

import { get, post, postText } from "./api.js";
import { showDifferences, showPhases, shades } from "./compare.js";
import { button, field, fileButton, h, number, percent, save, say, select, whole, withinSize } from "./dom.js";
import { Lanes, time } from "./lanes.js";
import { Overview } from "./overview.js";
import { copyLink, remember } from "./route.js";
import { TIMELINE_KEYS, Timeline } from "./timeline.js";

const PROGRAMS = {
  gemm: ["One GEMM: M, N, K", "2048,4096,4096"],
  chain: ["Two GEMMs: M, K, N0, N1", "1024,2048,2048,2048"],
  ffn: ["FFN: M, hidden, intermediate", "1024,2048,5632"],
  attention: ["Attention: Sq, Sk, heads, head_dim", "1024,1024,8,128"],
  block: ["Attention → FFN: seq, heads, head_dim, intermediate", "1024,8,128,4096"],
  decode: ["Whole decode step: model, context, batch", "llama-3.2-1b,4096"],
};
const DEFAULTS = { program: "attention", sizes: PROGRAMS.attention[1], workers: 24, order: "bpt", sync: "row" };
const state = { asked: { ...DEFAULTS }, a: null, b: null, colour: "phase" };
let choices = null;
let root = null;
let parts = {};

export async function show(panel, query) {
  if (root && !query) {
    publish();
    return;
  }
  const wanted = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(query)) if (key in DEFAULTS) wanted[key] = value.slice(0, 60);
  if (!(wanted.program in PROGRAMS)) wanted.program = DEFAULTS.program;
  if (root && Object.keys(DEFAULTS).every((key) => String(wanted[key]) === String(state.asked[key]))) return;
  state.asked = wanted;
  try {
    choices ??= await get("/api/choices");
  } catch (error) {
    say(error.message, true);
    return;
  }
  root = panel;
  build();
  await simulate("a");
}

const publish = () => remember("traces", state.a?.asked ? new URLSearchParams(state.a.asked).toString() : "");

function build() {
  const { asked } = state;
  const sizes = h("input", {
    type: "text",
    value: asked.sizes,
    name: "sizes",
    spellcheck: "false",
    autocomplete: "off",
  });
  const program = select(
    Object.fromEntries(Object.entries(PROGRAMS).map(([key, [text]]) => [key, text])),
    asked.program,
    () => {
      sizes.value = PROGRAMS[program.value][1];
    },
    { name: "program" },
  );
  const workers = number(asked.workers, 1, 1024, null, { name: "workers" });
  const order = select(Object.keys(choices.orders), asked.order, null, { name: "order" });
  const sync = select(choices.policies, asked.sync, null, { name: "sync" });
  const read = () => ({
    program: program.value,
    sizes: sizes.value.replaceAll(" ", ""),
    workers: workers.value,
    order: order.value,
    sync: sync.value,
  });
  const run = (place) => () => {
    state.asked = read();
    simulate(place);
  };
  const form = h(
    "form",
    {
      class: "bar trace-settings",
      "aria-label": "Simulate a program",
      onsubmit: (event) => {
        event.preventDefault();
        run("a")();
      },
    },
    field("Program", program),
    field("Sizes", sizes),
    field("Workers", workers),
    field("Order", order),
    field("Waits by", sync),
    h("button", { type: "submit", class: "primary", id: "simulate" }, "Simulate"),
    button("Simulate as B", run("b"), { id: "simulate-b", title: "Beside the first, for comparison" }),
  );
  parts = {
    figures: h("div", { class: "figures five" }),
    overview: new Overview((share, span) => slide(share, span)),
    a: line("a"),
    b: line("b"),
    detail: h("p", { class: "explain", "aria-live": "polite", id: "task-detail" }),
    phases: h("section", { class: "card", "aria-label": "Phases" }),
    differences: h("section", { class: "card", "aria-label": "Differences", hidden: true }),
    colour: select(
      { phase: "phase", run: "run time against A", begin: "start against A" },
      state.colour,
      (event) => {
        state.colour = event.target.value;
        recolour();
      },
      { name: "colour" },
    ),
    drop: button(
      "Remove B",
      () => {
        state.b = null;
        fill();
      },
      { id: "remove-b" },
    ),
  };
  parts.colourField = field("Colour B by", parts.colour);
  const files = h(
    "div",
    { class: "tools" },
    fileButton("Open trace…", "file-a", (file) => open(file, "a")),
    fileButton("Compare with…", "file-b", (file) => open(file, "b")),
    button("Save", withTrace(saveTrace), { title: "Save the trace as JSON" }),
    button("Perfetto", withTrace(perfetto), { id: "perfetto", title: "Save for ui.perfetto.dev" }),
    button("Share", withTrace(share)),
  );
  const zooms = h(
    "div",
    { class: "tools zooms" },
    button(
      "−",
      withTrace(() => parts.a.timeline.zoom(1 / 1.6)),
      { "aria-label": "Zoom out" },
    ),
    button(
      "+",
      withTrace(() => parts.a.timeline.zoom(1.6)),
      { "aria-label": "Zoom in", id: "zoom-in" },
    ),
    button(
      "Fit",
      withTrace(() => parts.a.timeline.fit()),
      { id: "fit" },
    ),
    h(
      "span",
      { class: "soft" },
      matchMedia("(pointer: coarse)").matches
        ? "Drag to move, pinch to zoom, tap a task."
        : "Drag to move, Ctrl + wheel to zoom, click a task.",
    ),
  );
  root.replaceChildren(
    h("div", { class: "intro" }, h("h1", {}, "Traces"), legend()),
    h("div", { class: "card stack" }, form, files),
    h(
      "section",
      { class: "card stack", "aria-label": "Timeline" },
      parts.figures,
      parts.overview.canvas,
      h("div", { class: "bar between" }, zooms, h("div", { class: "bar" }, parts.colourField, parts.drop)),
      parts.a.node,
      parts.b.node,
      parts.detail,
    ),
    h("div", { class: "pair" }, parts.phases, parts.differences),
  );
  root.ondragover = (event) => event.preventDefault();
  root.ondrop = (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file && withinSize(file)) open(file, "a");
  };
}

function line(key) {
  const made = {
    title: h("h2", {}),
    timeline: new Timeline({
      label: `Trace ${key.toUpperCase()}: a lane per worker. ${TIMELINE_KEYS}`,
      height: 520,
      onview: (view) => follow(key, view),
      onpick: (index) => told(key, index),
    }),
  };
  made.node = h("div", { class: "line" }, made.title, made.timeline.canvas);
  return made;
}

function legend() {
  const key = (variable, text) =>
    h("li", {}, h("span", { class: "swatch", style: { "--swatch": `var(${variable})` } }), text);
  return h(
    "ul",
    { class: "keys" },
    h("li", {}, "A lane per worker:"),
    key("--s1", "running, coloured by phase"),
    key("--idle", "waiting with a task"),
    key("--idle-tint", "idle"),
  );
}

// ---- getting traces ----

async function simulate(place) {
  const { asked } = state;
  const start = document.getElementById("simulate");
  start.disabled = true;
  try {
    const trace = await get("/api/sample-trace", asked);
    accept(place, trace, `simulated ${asked.program} ${asked.sizes}, ${asked.order}, ${asked.sync}`, { ...asked });
  } catch (error) {
    say(error.message, true);
  } finally {
    start.disabled = false;
  }
}

async function open(file, place) {
  try {
    const text = await file.text();
    if (!text.trim()) throw new Error("the file is empty");
    const trace = await postText("/api/trace", `{"trace":${text}}`);
    accept(place, trace, `${file.name}, ${trace.source}`, null);
  } catch (error) {
    say(`${file.name}: ${error.message}`, true);
  }
}

function accept(place, trace, name, asked) {
  if (!trace.tasks.task.length) {
    say(`${name}: the trace has no tasks.`, true);
    return;
  }
  if (place === "b" && state.a && trace.unit !== state.a.trace.unit) {
    say(`B is in ${trace.unit}, A in ${state.a.trace.unit}; traces in one unit can be compared.`, true);
    return;
  }
  const lanes = new Lanes(trace);
  const byTask = new Map();
  lanes.task.forEach((task, index) => {
    if (!byTask.has(task)) byTask.set(task, index);
  });
  state[place] = { trace, lanes, name, asked, byTask };
  if (place === "a" && state.b && state.b.trace.unit !== trace.unit) state.b = null;
  if (!state.a) state.a = state[place];
  fill();
  publish();
  say("");
}

// ---- showing them ----

function fill() {
  const { a, b } = state;
  const wide = Math.max(a.lanes.makespan, b?.lanes.makespan ?? 0);
  for (const key of ["a", "b"]) {
    const { node, timeline, title } = parts[key];
    node.hidden = !state[key];
    if (!state[key]) continue;
    title.textContent = b ? `${key.toUpperCase()}: ${state[key].name}` : state[key].name;
    Object.assign(timeline.options, { wide, height: b ? 300 : 520 });
    timeline.load(state[key].lanes);
  }
  parts.colourField.hidden = parts.drop.hidden = parts.differences.hidden = !b;
  parts.detail.hidden = true;
  parts.overview.load(a.lanes, wide);
  figures(a.lanes);
  showPhases(parts.phases, a.lanes, b ? "Phases of A" : "Phases");
  if (b) {
    recolour();
    showDifferences(parts.differences, a, b, (index) => parts.b.timeline.pick(index, true));
  }
}

function figures(lanes) {
  const total = Math.max(lanes.makespan * lanes.workers, 1e-9);
  const figure = (text, label, kind = "") =>
    h("div", { class: "figure" }, h("b", { class: kind }, text), h("span", {}, label));
  parts.figures.replaceChildren(
    figure(whole.format(lanes.length), "tasks"),
    figure(whole.format(lanes.workers), "workers"),
    figure(time(lanes.makespan, lanes.unit), "from launch to end"),
    figure(percent(lanes.busy / total), "of the workers' time running"),
    figure(
      percent(Math.max(0, 1 - lanes.busy / total)),
      `idle, of which ${percent(lanes.waited / total)} waiting with a task`,
      "bad",
    ),
  );
}

function recolour() {
  const { a, b, colour } = state;
  if (!b) return;
  parts.b.timeline.colourOf = shades(a, b, colour);
  parts.b.timeline.redraw();
}

function told(key, index) {
  const other = key === "a" ? "b" : "a";
  parts.detail.hidden = index < 0;
  if (index < 0) return;
  const { lanes } = state[key];
  const describe = (found, i) => {
    const [starts, runs, waited] = [found.start[i], found.end[i] - found.start[i], found.start[i] - found.wait[i]].map(
      (value) => time(value, found.unit),
    );
    return `worker ${found.worker[i]}, starts at ${starts}, runs ${runs}, waited ${waited}`;
  };
  const [name, phase] = [lanes.name[index], lanes.phase[index]];
  let text = `${name} ${lanes.task[index]}${phase === name ? "" : ` (${phase})`}: `;
  if (!state.b) text += `${describe(lanes, index)}.`;
  else {
    const twin = state[other].byTask.get(lanes.task[index]);
    text += `${key.toUpperCase()}: ${describe(lanes, index)}. `;
    text +=
      twin === undefined
        ? `${other.toUpperCase()} has no such task.`
        : `${other.toUpperCase()}: ${describe(state[other].lanes, twin)}.`;
    parts[other].timeline.picked = twin ?? -1;
    parts[other].timeline.redraw();
  }
  parts.detail.textContent = text;
}

function follow(key, view) {
  if (state.b) parts[key === "a" ? "b" : "a"].timeline.set({ from: view.from, to: view.to }, true);
  parts.overview.look(view.from, view.to);
}

function slide(from, to) {
  parts.a.timeline.set({ from, to });
}

// What needs a trace: nothing is there where the first question failed.
const withTrace = (act) => () => (state.a ? act() : say("Simulate a program or open a trace first.", true));

// ---- taking them elsewhere ----

function saveTrace() {
  save("trace.json", `${JSON.stringify(state.a.trace)}\n`);
}

async function perfetto() {
  try {
    save("trace.perfetto.json", JSON.stringify(await post("/api/perfetto", { trace: state.a.trace })));
    say("Saved. In ui.perfetto.dev choose “Open trace file”.");
  } catch (error) {
    say(error.message, true);
  }
}

async function share() {
  if (!state.a.asked) {
    say("A trace from a file has no link; send the file.", true);
    return;
  }
  publish();
  say(await copyLink());
}

window.addEventListener("themechange", () => root && state.b && recolour());
