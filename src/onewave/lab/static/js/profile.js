// The Profile page: what bounds each part of a prompt and of a decode step on a GPU, predicted; roofline and staircase.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { field, h, number, percent, say, select, table } from "./dom.js";
import { remember } from "./route.js";

const DEFAULTS = { model: "llama-3.1-8b", gpu: "H200", weights: "compact", tokens: 512, batch: 1, context: 512 };
const state = { asked: { ...DEFAULTS } };
let choices = null;
let root = null;
let parts = {};

export async function show(panel, query) {
  const wanted = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(query)) if (key in DEFAULTS) wanted[key] = value.slice(0, 40);
  if (root && !query) return publish();
  state.asked = wanted;
  try {
    choices ??= await get("/api/profile-choices");
  } catch (error) {
    say(error.message, true);
    return undefined;
  }
  root = panel;
  build();
  return ask();
}

const publish = () => remember("profile", new URLSearchParams(state.asked).toString());

function build() {
  const { asked } = state;
  const inputs = {
    model: select(choices.models, asked.model, null, { name: "model" }),
    gpu: select(choices.gpus, asked.gpu, null, { name: "gpu" }),
    weights: select(choices.weights, asked.weights, null, { name: "weights" }),
    tokens: number(asked.tokens, 1, 1048576, null, { name: "tokens" }),
    batch: number(asked.batch, 1, 16, null, { name: "batch" }),
    context: number(asked.context, 0, 1000000, null, { name: "context" }),
  };
  const names = { model: "Model", gpu: "GPU", weights: "Weights", tokens: "Prompt tokens", batch: "Sequences", context: "Tokens before" };
  const form = h(
    "form",
    {
      class: "bar trace-settings",
      "aria-label": "Choose a model and a GPU",
      onsubmit: (event) => {
        event.preventDefault();
        for (const [key, input] of Object.entries(inputs)) state.asked[key] = input.value;
        ask();
      },
    },
    ...Object.entries(inputs).map(([key, input]) => field(names[key], input)),
    h("button", { type: "submit", class: "primary", id: "predict" }, "Predict"),
  );
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
    fill(await get("/api/profile", state.asked));
    publish();
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
  parts.rows.replaceChildren(h("h2", {}, `${state.asked.model} on ${state.asked.gpu}`), table(heads, rows));
  const drawn = `data:image/svg+xml;utf8,${encodeURIComponent(found.roofline)}`;
  parts.roofline.replaceChildren(h("h2", {}, "Roofline"), h("img", { src: drawn, class: "roofline", alt: `Roofline of ${state.asked.gpu}` }));
  const chart = new Chart(
    { x: found.m, series: { "gate and up": found.us }, bound: null },
    {
      label: "Time of the gate and up product over its rows", xName: "rows", yName: "µs", logarithmic: false, steps: true,
      yText: (value) => value.toFixed(0),
    },
  );
  parts.stairs.replaceChildren(h("h2", {}, "Staircase: gate and up over rows"), chart.node);
}
