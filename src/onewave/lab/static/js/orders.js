// Orders: what each order moves against the cache's size, for one GEMM and for chains; and a GEMM's time over M.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { button, bytes, compact, field, h, number, percent, say, select, svg, whole } from "./dom.js";
import { POLICIES } from "./model.js";
import { copyLink, remember } from "./route.js";

const DEFAULTS = {
  m: 16,
  n: 16,
  policy: "lru",
  program: "gemms",
  rows: 6,
  cols: 6,
  inner: 6,
  sn: 4096,
  sk: 4096,
  most: 8192,
  workers: 132,
};
const LIMITS = {
  m: [1, 64],
  n: [1, 64],
  rows: [1, 16],
  cols: [1, 16],
  inner: [1, 16],
  sn: [128, 16384],
  sk: [64, 65536],
  most: [128, 16384],
  workers: [1, 1024],
};
const state = { ...DEFAULTS };
let choices = null;
let thumbs = {};
let root = null;
const boxes = {};

export async function show(panel, query) {
  const first = !root;
  const before = { ...state };
  if (query || first) {
    Object.assign(state, DEFAULTS);
    for (const [key, value] of new URLSearchParams(query)) {
      const size = Number(value);
      if (key in LIMITS && Number.isInteger(size) && size >= LIMITS[key][0] && size <= LIMITS[key][1])
        state[key] = size;
      else if ((key === "policy" && value in POLICIES) || (key === "program" && ["gemms", "attention"].includes(value)))
        state[key] = value;
    }
  }
  publish();
  if (!first && Object.keys(state).every((key) => before[key] === state[key])) return;
  try {
    choices ??= await get("/api/choices");
    const { orders } = await get("/api/game", { m: 5, n: 5, k: 1, slots: 4 });
    thumbs = Object.fromEntries(Object.entries(orders).map(([name, order]) => [name, order.path]));
  } catch (error) {
    say(error.message, true);
    return;
  }
  root = panel;
  build();
  await Promise.all([sweep(), chains(), staircase()]);
}

const publish = () => remember("orders", new URLSearchParams(state).toString());

function build() {
  for (const name of ["sweep", "chains", "stairs"]) boxes[name] = h("div", { class: "chart-box" });
  const size = (key, label, then) =>
    field(
      label,
      number(state[key], ...LIMITS[key], (event) => change(event, key, then), { name: key }),
    );
  const pick = (key, label, options, then) =>
    field(
      label,
      select(options, state[key], (event) => change(event, key, then), { name: key }),
    );
  const card = (title, text, controls, box) =>
    h(
      "section",
      { class: "card stack", "aria-label": title },
      h("h2", {}, title),
      h("p", { class: "soft" }, text),
      h(
        "form",
        { class: "bar", "aria-label": `${title}: settings`, onsubmit: (event) => event.preventDefault() },
        controls,
      ),
      box,
    );
  root.replaceChildren(
    h(
      "div",
      { class: "intro" },
      h("h1", {}, "Orders"),
      h("p", { class: "soft" }, "The same work in another order moves more or less. How much depends on the cache."),
      button("Share", async () => {
        publish();
        say(await copyLink());
      }),
    ),
    card(
      "One GEMM",
      "Whole panels loaded by every order of C's tiles.",
      [size("m", "Tile rows", sweep), size("n", "Tile columns", sweep), pick("policy", "Evicts by", POLICIES, sweep)],
      boxes.sweep,
    ),
    card(
      "Chains",
      "Bytes that every order and interleaving moves, task after task.",
      [
        pick("program", "Program", { gemms: "Two GEMMs", attention: "Attention → FFN" }, chains),
        size("rows", "Row blocks", chains),
        size("cols", "Columns or heads", chains),
        size("inner", "Inner columns", chains),
      ],
      boxes.chains,
    ),
    card(
      "Latency staircase",
      "Time of C[M, N] = A[M, K] B[K, N]: flat while the last wave of tiles fills up, a step where another begins.",
      [
        size("sn", "N", staircase),
        size("sk", "K", staircase),
        size("most", "M up to", staircase),
        size("workers", "Workers", staircase),
      ],
      boxes.stairs,
    ),
  );
}

function change(event, key, then) {
  const { target } = event;
  if (target.type === "number" && !(target.checkValidity() && Number.isInteger(target.valueAsNumber))) {
    say(`${target.labels[0].textContent} must be a whole number from ${target.min} to ${target.max}.`, true);
    target.value = state[key];
    return;
  }
  state[key] = target.type === "number" ? target.valueAsNumber : target.value;
  publish();
  then();
}

const turns = {};
async function fill(name, question, draw) {
  const mine = (turns[name] = (turns[name] ?? 0) + 1);
  boxes[name].setAttribute("aria-busy", "true");
  if (!boxes[name].firstChild) boxes[name].replaceChildren(h("p", { class: "soft" }, "Counting…"));
  try {
    const found = await question;
    if (turns[name] === mine) boxes[name].replaceChildren(...draw(found));
  } catch (error) {
    if (turns[name] === mine) boxes[name].replaceChildren(h("p", { class: "bad" }, error.message));
  }
  boxes[name].removeAttribute("aria-busy");
}

function thumb(name, colour) {
  const path = thumbs[name];
  if (!path) return null;
  const d = path.map(([row, col], i) => `${i ? "L" : "M"}${col * 5 + 3} ${row * 5 + 3}`).join("");
  return svg(
    "svg",
    { viewBox: "0 0 26 26", class: "thumb", "aria-hidden": "true" },
    svg("path", { d, style: { stroke: colour } }),
  );
}

function sweep() {
  return fill("sweep", get("/api/orders", { m: state.m, n: state.n, policy: state.policy }), (found) => [
    new Chart(found, {
      label: "Panel loads of every order against cache size",
      xName: "panels of cache",
      yName: "panel loads",
      yText: (v) => compact.format(v),
      thumb,
      titles: choices.orders,
    }).node,
  ]);
}

function chains() {
  const { program, rows, cols, inner } = state;
  return fill("chains", get("/api/chain-orders", { program, rows, cols, inner }), (found) => [
    new Chart(found, {
      label: "Bytes moved by every order against cache size",
      xName: "of cache",
      axis: "bytes of cache",
      yName: "bytes moved",
      xText: bytes,
      yText: bytes,
      thumb,
      titles: choices.orders,
    }).node,
  ]);
}

function staircase() {
  return fill(
    "stairs",
    get("/api/staircase", { n: state.sn, k: state.sk, max_m: state.most, workers: state.workers }),
    (found) => {
      const chart = new Chart(
        { x: found.m, series: { "time, µs": found.us }, bound: null },
        {
          label: "Time over M",
          xName: "rows (M)",
          yName: "µs",
          logarithmic: false,
          steps: true,
          xText: (v) => whole.format(v),
          yText: (v) => whole.format(Math.round(v * 10) / 10),
        },
      );
      const worst = found.used.indexOf(Math.min(...found.used));
      const waves = (count) => `${whole.format(count)} wave${count > 1 ? "s" : ""}`;
      const [top, low] = [found.m.at(-1), found.m[worst]].map((m) => `M = ${whole.format(m)}`);
      const tiles = `${whole.format(found.tiles[worst])} tiles in ${waves(found.waves[worst])}`;
      const full = `${percent(found.used[worst])} full`;
      const text = `${waves(found.waves.at(-1))} at ${top}. Emptiest: ${low}, ${tiles}, ${full}.`;
      return [chart.node, h("p", { class: "soft" }, text)];
    },
  );
}
