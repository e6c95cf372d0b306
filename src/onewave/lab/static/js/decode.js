// The Decode page: a step of one launch as lanes by SM, with hand-offs; move row blocks, reorder a queue, bend the GPU.

import { post, postText } from "./api.js";
import { Question } from "./asking.js";
import { shades, showDifferences, showPhases } from "./compare.js";
import { button, css, field, fileButton, h, number, percent, save, say, select, svg, whole } from "./dom.js";
import { Lanes, time } from "./lanes.js";
import { copyLink } from "./route.js";
import { TIMELINE_KEYS, Timeline } from "./timeline.js";

const DEFAULTS = { model: "llama-3.2-1b", weights: "compact", batch: 1, context: 512, sms: 132, gpus: 1 };
const SLIDERS = {
  bandwidth: ["Bandwidth", "%", 25, 300],
  hand_off: ["Hand-off time", "%", 10, 300],
};
const FRESH = () => ({ moves: [], turns: [], turn: 0, held: "", ring: "", bandwidth: 100, hand_off: 100 });
const question = new Question("decode", "/api/decode-choices", DEFAULTS);
const state = { changes: FRESH(), found: null, own: null, from: null, queue: 0, twin: null };
let root = null;
let parts = {};
let latest = 0;

export async function show(panel, query) {
  if (root && !query) return question.publish();
  if (!(await question.read(query))) return undefined;
  root = panel;
  build();
  return begin();
}

function build() {
  const { asked, choices } = question;
  const inputs = [
    ["Model", select(Object.keys(choices.models), asked.model, null, { name: "model" })],
    ["Weights", select(choices.weights, asked.weights, null, { name: "weights" })],
    ["Sequences", number(asked.batch, 1, 16, null, { name: "batch" })],
    ["Tokens before", number(asked.context, 0, 1000000, null, { name: "context" })],
    ["SMs", number(asked.sms, 8, 512, null, { name: "sms" })],
    ["GPUs", number(asked.gpus, 1, 8, null, { name: "gpus" })],
  ];
  const submit = h("button", { type: "submit", class: "primary", id: "plan-step" }, "Plan the step");
  const form = question.form("Choose a step", inputs, submit, () => {
    state.changes = FRESH();
    begin();
  });
  parts = {
    figures: h("div", { class: "figures five" }),
    proof: h("p", { class: "explain", "aria-live": "polite", id: "proof" }),
    timeline: new Timeline({
      label: `The step: a lane per SM. ${TIMELINE_KEYS}`,
      height: 460,
      onpick: (index) => picked(index),
      onview: drawHandOff,
    }),
    measured: new Timeline({ label: `Measured: a lane per SM. ${TIMELINE_KEYS}`, height: 300 }),
    detail: h("p", { class: "explain", "aria-live": "polite", id: "wait-detail" }),
    hand: svg("svg", { class: "hand-offs", "aria-hidden": "true" }),
    shares: h("div", { class: "stack", id: "shares" }),
    queue: h("div", { class: "stack", id: "queue" }),
    phases: h("section", { class: "card", "aria-label": "Phases" }),
    differences: h("section", { class: "card", "aria-label": "Differences", hidden: true }),
    twin: h("div", { class: "line", hidden: true }),
    sliders: h("div", { class: "bar sliders" }),
  };
  const explain = parts.timeline.describe.bind(parts.timeline);
  parts.timeline.describe = (index) => [explain(index), waitOf(index)].filter(Boolean).join("; ");
  parts.twin.append(h("h2", {}, "Measured, coloured by phase"), parts.measured.canvas);
  const tools = h(
    "div",
    { class: "tools" },
    button("Whole step", () => ask({ whole: true }), { id: "whole-step" }),
    button("Longest hand-off", longest, { id: "longest" }),
    button("Undo all", () => { state.changes = FRESH(); sliders(); ask(); }, { id: "undo-all" }),
    button("Export plan", exportPlan, { id: "export-plan", title: "For onewave tiles verify and bench wave --plan" }),
    fileButton("Open measured trace…", "file-measured", measured),
    button("Share", async () => { question.publish(); say(await copyLink()); }),
  );
  root.replaceChildren(
    h("div", { class: "intro" }, h("h1", {}, "Decode"), legend()),
    h("div", { class: "card stack" }, form, tools, parts.sliders),
    h(
      "section",
      { class: "card stack", "aria-label": "The step" },
      parts.figures, parts.proof, h("div", { class: "drawn" }, parts.timeline.canvas, parts.hand), parts.detail, parts.twin,
    ),
    h(
      "div",
      { class: "pair" },
      h("section", { class: "card stack", "aria-label": "Shares" }, h("h2", {}, "Row blocks of each SM"), parts.shares),
      h("section", { class: "card stack", "aria-label": "Queue" }, h("h2", {}, "A queue, in order"), parts.queue),
    ),
    h("div", { class: "pair" }, parts.phases, parts.differences),
  );
  sliders();
}

function legend() {
  const key = (variable, text) =>
    h("li", {}, h("span", { class: "swatch", style: { "--swatch": `var(${variable})` } }), text);
  return h("ul", { class: "keys" }, h("li", {}, "A lane per SM:"), key("--s1", "running, by phase"), key("--idle", "waiting for a hand-off"));
}

function sliders() {
  const made = Object.entries(SLIDERS).map(([name, [label, unit, least, most]]) => {
    const shown = h("output", {}, `${state.changes[name]} ${unit}`);
    const input = h("input", {
      type: "range", min: least, max: most, step: 5, value: state.changes[name], name,
      oninput: () => { shown.textContent = `${input.value} ${unit}`; },
      onchange: () => { state.changes[name] = Number(input.value); ask(); },
    });
    return h("div", { class: "field" }, h("label", { for: (input.id = `slider-${name}`) }, label, " ", shown), input);
  });
  const counts = ["ring", "held"].map((name) =>
    field(name === "ring" ? "Tiles in the ring" : "Tiles held", number(state.changes[name], name === "ring" ? 4 : 0, 12, (event) => {
      state.changes[name] = event.target.value;
      ask();
    }, { name, placeholder: state.found?.[name] ?? "" })),
  );
  parts.sliders.replaceChildren(...made, ...counts);
}

async function begin() {
  state.own = state.twin = null;
  state.from = null;
  state.queue = 0;
  parts.twin.hidden = parts.differences.hidden = true;
  await ask();
  state.own = state.found?.step_ms ?? null;
  if (state.found) figures();
}

// Ask the server for the plan with all changes; a later question makes an earlier answer stale.
async function ask({ whole: all = false } = {}) {
  const turn = ++latest;
  const start = document.getElementById("plan-step");
  start.disabled = true;
  const layers = all ? question.choices.models[question.asked.model] : 2;
  try {
    const found = await post("/api/decode", { ...question.asked, ...state.changes, layers });
    if (turn === latest) accept(found);
  } catch (error) {
    say(error.message, true);
  } finally {
    start.disabled = false;
  }
}

function accept(found) {
  parts.proof.textContent = found.proof.ok ? found.proof.message : `Refused: ${found.proof.message}`;
  parts.proof.classList.toggle("bad", !found.proof.ok);
  if (!found.proof.ok) {
    question.publish();
    return; // the picture stays that of the last plan that can run
  }
  state.found = found;
  state.lanes = new Lanes(found.trace);
  parts.timeline.load(state.lanes);
  picked(-1);
  figures();
  shares();
  queue();
  showPhases(parts.phases, state.lanes, "Phases");
  differences();
  question.publish();
}

function figures() {
  const { found, own } = state;
  const figure = (text, label, kind = "") => h("div", { class: "figure" }, h("b", { class: kind }, text), h("span", {}, label));
  const change = own && !found.whole ? found.step_ms / own - 1 : 0;
  const layers = found.whole ? "the whole step" : `${found.layers} of ${found.all_layers} layers and the head`;
  parts.figures.replaceChildren(
    figure(`${found.step_ms.toFixed(4)} ms`, `predicted, ${layers}`),
    figure(found.whole ? "–" : change ? `${change > 0 ? "+" : "−"}${Math.abs(100 * change).toFixed(2)} %` : "0 %", "against the wave's own plan", change > 0 ? "bad" : ""),
    figure(whole.format(state.lanes.length), "tasks"),
    figure(whole.format(found.workers), "SMs"),
    figure(percent(1 - state.lanes.busy / (state.lanes.makespan * state.lanes.workers)), "of the SMs' time waiting"),
  );
}

// ---- hand-offs ----

const waitOf = (index) => {
  const what = state.found?.waits?.[state.lanes.source[index]];
  return what && state.lanes.start[index] > state.lanes.wait[index] ? `SM ${state.lanes.worker[index]} waits for ${what}` : "";
};

function picked(index) {
  parts.detail.hidden = index < 0;
  drawHandOff();
  if (index < 0) return;
  const { lanes } = state;
  const [ran, waited] = [lanes.end[index] - lanes.start[index], lanes.start[index] - lanes.wait[index]].map((t) => time(t, lanes.unit));
  const what = waitOf(index);
  parts.detail.textContent = `${lanes.name[index]} on SM ${lanes.worker[index]}: runs ${ran}, waits ${waited}. ${what ? `${what}.` : ""}`;
  state.queue = lanes.worker[index];
  queue();
}

// A line from the SM that the picked task waits for to the task itself, in the timeline's present view.
function drawHandOff() {
  const index = parts.timeline.picked;
  parts.hand.replaceChildren();
  const what = index < 0 ? null : state.found.waits[state.lanes.source[index]];
  const source = what && Number(what.match(/SM (\d+)$/)?.[1]);
  if (!what || Number.isNaN(source)) return;
  const { timeline } = parts;
  const { lanes } = state;
  const name = what.match(/of (\w+) from/)?.[1];
  let last = -1;
  for (let i = lanes.first[source]; i < lanes.first[source + 1]; i++) if (lanes.name[i] === name && lanes.end[i] <= lanes.start[index] + 1) last = i;
  if (last < 0) return;
  const y = (lane) => 22 + (lane + 0.5) * timeline.view.lane - timeline.view.top;
  const [x1, y1, x2, y2] = [timeline.x(lanes.end[last]), y(source), timeline.x(lanes.start[index]), y(lanes.worker[index])];
  parts.hand.setAttribute("viewBox", `0 0 ${timeline.canvas.clientWidth} ${timeline.canvas.clientHeight}`);
  const middle = (x1 + x2) / 2;
  parts.hand.replaceChildren(
    svg("path", { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, fill: "none", stroke: css("--ink"), "stroke-width": 1.5 }),
    svg("circle", { cx: x1, cy: y1, r: 3, fill: css("--ink") }),
  );
}

function longest() {
  const { lanes } = state;
  if (!lanes) return;
  let most = -1;
  for (let i = 0; i < lanes.length; i++) {
    if (state.found.waits[lanes.source[i]] && (most < 0 || lanes.start[i] - lanes.wait[i] > lanes.start[most] - lanes.wait[most])) most = i;
  }
  if (most >= 0) parts.timeline.pick(most, true);
}

// ---- changes ----

// Bars by SM: choose one, then another, and a row block moves from the first to the second; or drag from bar to bar.
function shares() {
  const charts = Object.entries(state.found.shares).map(([stage, counts]) => {
    const most = Math.max(...counts, 1);
    const wide = 720 / counts.length;
    const bars = counts.map((count, sm) =>
      svg(
        "rect",
        {
          x: (sm * wide).toFixed(2), y: 40 - (36 * count) / most, width: Math.max(0.6, wide - 0.6).toFixed(2), height: (36 * count) / most,
          class: "share-bar", "data-sm": sm,
        },
        svg("title", {}, `SM ${sm}: ${count} row blocks`),
      ),
    );
    const at = (event) => {
      const box = drawing.getBoundingClientRect();
      return Math.max(0, Math.min(counts.length - 1, Math.floor(((event.clientX - box.left) / box.width) * counts.length)));
    };
    const drawing = svg(
      "svg",
      {
        class: "shares", viewBox: "0 0 720 40", preserveAspectRatio: "none", role: "img",
        "aria-label": `${stage}: ${Math.min(...counts)} to ${most} row blocks an SM`,
        onpointerdown: (event) => { state.from = at(event); drawing.setPointerCapture(event.pointerId); },
        onpointerup: (event) => { if (state.from !== null && at(event) !== state.from) move(stage, state.from, at(event), 1); state.from = null; },
      },
      bars,
    );
    return h("figure", { class: "share" }, h("figcaption", {}, `${stage}: ${Math.min(...counts)} to ${most}`), drawing);
  });
  const [stage, source, target, count] = [
    select(Object.keys(state.found.shares), state.stage ?? "gate_up", (event) => { state.stage = event.target.value; }, { name: "stage" }),
    number(0, 0, state.found.workers - 1, null, { name: "source" }),
    number(1, 0, state.found.workers - 1, null, { name: "target" }),
    number(1, 1, 32, null, { name: "count" }),
  ];
  const form = h(
    "form",
    {
      class: "bar",
      "aria-label": "Move row blocks",
      onsubmit: (event) => {
        event.preventDefault();
        move(stage.value, Number(source.value), Number(target.value), Number(count.value));
      },
    },
    field("Of", stage), field("Blocks", count), field("From SM", source), field("To SM", target),
    h("button", { type: "submit", id: "move-blocks" }, "Move"),
  );
  const done = state.changes.moves.length ? `${state.changes.moves.length} row blocks moved.` : "Drag from one bar to another, or:";
  parts.shares.replaceChildren(...charts, h("p", { class: "soft" }, done), form);
}

function move(stage, source, target, count) {
  for (let i = 0; i < count; i++) state.changes.moves.push([stage, source, target]);
  ask();
}

function queue() {
  const sm = Math.min(state.queue, state.found.workers - 1);
  const tasks = state.found.queues[sm] ?? [];
  const swap = (first, second) => () => {
    state.changes.turns.push([sm, first, second]);
    ask();
  };
  const row = (task, at) =>
    h(
      "li",
      {},
      h("code", {}, task),
      button("↑", swap(at, at - 1), { disabled: at === 0, "aria-label": `${task} earlier`, class: "quiet" }),
      button("↓", swap(at, at + 1), { disabled: at === tasks.length - 1, "aria-label": `${task} later`, class: "quiet" }),
    );
  const chosen = number(sm, 0, state.found.workers - 1, (event) => {
    state.queue = Number(event.target.value);
    queue();
  }, { name: "queue" });
  parts.queue.replaceChildren(field("SM", chosen), h("ol", { class: "queue" }, tasks.map(row)));
}

// ---- measured, exported ----

async function measured(file) {
  try {
    const trace = await postText("/api/trace", `{"trace":${await file.text()}}`);
    state.twin = { trace, lanes: new Lanes(trace), byTask: new Map() };
    state.twin.lanes.task.forEach((task, index) => state.twin.byTask.has(task) || state.twin.byTask.set(task, index));
    parts.twin.hidden = false;
    parts.measured.load(state.twin.lanes);
    differences();
    say("");
  } catch (error) {
    say(`${file.name}: ${error.message}`, true);
  }
}

function differences() {
  parts.differences.hidden = !state.twin;
  if (!state.twin) return;
  const ours = { trace: state.found.trace, lanes: state.lanes, byTask: new Map() };
  state.lanes.task.forEach((task, index) => ours.byTask.has(task) || ours.byTask.set(task, index));
  parts.measured.colourOf = shades(ours, state.twin, "phase");
  parts.measured.redraw();
  showDifferences(parts.differences, ours, state.twin, (index) => parts.measured.pick(index, true));
}

async function exportPlan() {
  try {
    const { plan } = await post("/api/decode-plan", { ...question.asked, ...state.changes, layers: 1 });
    save("plan.json", plan);
    say("Saved. `onewave tiles verify plan.json` proves it; `onewave bench wave --plan plan.json` runs it.");
  } catch (error) {
    say(error.message, true);
  }
}

window.addEventListener("themechange", () => root && state.found && drawHandOff());
