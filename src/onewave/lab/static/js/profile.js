// The Profile page: what bounds each part of a prompt and of a decode step on a GPU, predicted; roofline and staircase.

import { get } from "./api.js";
import { Question } from "./asking.js";
import { Chart } from "./chart.js";
import { h, number, percent, say, select, table } from "./dom.js";

const DEFAULTS = { model: "llama-3.1-8b", gpu: "H200", weights: "compact", tokens: 512, batch: 1, context: 512 };
const question = new Question("profile", "/api/profile-choices", DEFAULTS);
let root = null;
let parts = {};

export async function show(panel, query) {
  if (root && !query) return question.publish();
  if (!(await question.read(query))) return undefined;
  root = panel;
  build();
  return ask();
}

function build() {
  const { asked, choices } = question;
  const inputs = [
    ["Model", select(choices.models, asked.model, null, { name: "model" })],
    ["GPU", select(choices.gpus, asked.gpu, null, { name: "gpu" })],
    ["Weights", select(choices.weights, asked.weights, null, { name: "weights" })],
    ["Prompt tokens", number(asked.tokens, 1, 1048576, null, { name: "tokens" })],
    ["Sequences", number(asked.batch, 1, 16, null, { name: "batch" })],
    ["Tokens before", number(asked.context, 0, 1000000, null, { name: "context" })],
  ];
  const submit = h("button", { type: "submit", class: "primary", id: "predict" }, "Predict");
  const form = question.form("Choose a model and a GPU", inputs, submit, ask);
  parts = {
    rows: h("section", { class: "card", "aria-label": "Parts" }),
    roofline: h("section", { class: "card", "aria-label": "Roofline" }),
    stairs: h("section", { class: "card", "aria-label": "Staircase" }),
  };
  root.replaceChildren(
    h("div", { class: "intro" }, h("h1", {}, "Profile"), h("p", { class: "soft" }, "Predicted; onewave profile measures on a GPU.")),
    h("div", { class: "card stack" }, form),
    parts.rows,
    h("div", { class: "pair" }, parts.roofline, parts.stairs),
  );
}

async function ask() {
  const start = document.getElementById("predict");
  start.disabled = true;
  try {
    fill(await get("/api/profile", question.asked));
    question.publish();
  } catch (error) {
    say(error.message, true);
  } finally {
    start.disabled = false;
  }
}

function fill(found) {
  const rows = found.rows.map((row) => ({
    head: `${row.phase} ${row.part}`,
    kind: row.part === "step" ? "you" : "",
    cells: [
      row.part === "step" ? "" : `${row.us_a_layer.toFixed(1)} µs`,
      row.intensity.toFixed(1), percent(row.compute), percent(row.memory), h("span", { title: row.reason }, row.bound),
    ],
  }));
  const heads = ["part", "a layer", "FLOPs a byte", "of its FLOPs", "of its bandwidth", "bound by"];
  parts.rows.replaceChildren(h("h2", {}, `${question.asked.model} on ${question.asked.gpu}`), table(heads, rows));
  const drawn = `data:image/svg+xml;utf8,${encodeURIComponent(found.roofline)}`;
  parts.roofline.replaceChildren(h("h2", {}, "Roofline"), h("img", { src: drawn, class: "roofline", alt: `Roofline of ${question.asked.gpu}` }));
  const chart = new Chart(
    { x: found.m, series: { "gate and up": found.us }, bound: null },
    {
      label: "Time of the gate and up product over its rows", xName: "rows", yName: "µs", logarithmic: false, steps: true,
      yText: (value) => value.toFixed(0),
    },
  );
  parts.stairs.replaceChildren(h("h2", {}, "Staircase: gate and up over rows"), chart.node);
}
