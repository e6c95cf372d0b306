// Chains: two launches of one program side by side, tile by tile, and every order under every sync policy.

import { get } from "./api.js";
import { bytes, button, field, h, number, percent, say, select } from "./dom.js";
import { time } from "./lanes.js";
import { copyLink, remember } from "./route.js";
import { Stages } from "./stages.js";
import { TIMELINE_KEYS, Timeline } from "./timeline.js";

const PROGRAMS = { gemms: "Two GEMMs: H = X W0, Y = H W1", attention: "Attention → projection → FFN" };
const SIZES = {
  gemms: { rows: "Row blocks", cols: "Columns of Y", inner: "Columns of H" },
  attention: { rows: "Row blocks", cols: "Heads", inner: "FFN columns" },
};
const DEFAULTS = {
  program: "gemms",
  rows: 4,
  cols: 4,
  inner: 4,
  workers: 6,
  cache: 24,
  a: "sequential.none",
  b: "half-row.tile",
};
const LEAST = { rows: 1, cols: 1, inner: 1, workers: 1, cache: 4 };
const MOST = { rows: 32, cols: 32, inner: 32, workers: 132, cache: 100000 };
const state = { ...DEFAULTS, at: 0, sides: { a: null, b: null } };
let choices = null;
let root = null;
let parts = {};
let timer = 0;

export async function show(panel, query) {
  if (root && !query) {
    publish();
    return;
  }
  const wanted = read(query);
  if (root && Object.keys(DEFAULTS).every((key) => wanted[key] === state[key])) return;
  Object.assign(state, wanted);
  try {
    choices ??= await get("/api/choices");
  } catch (error) {
    say(error.message, true);
    return;
  }
  root = panel;
  build();
  await refresh();
}

function read(query) {
  const found = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(query)) {
    if (key in LEAST) {
      const size = Number(value);
      if (Number.isInteger(size) && size >= LEAST[key] && size <= MOST[key]) found[key] = size;
      else
        say(
          `The link's ${key} is not a whole number from ${LEAST[key]} to ${MOST[key]}; it starts as ${DEFAULTS[key]}.`,
          true,
        );
    } else if (key === "program" && value in PROGRAMS) found.program = value;
    else if ((key === "a" || key === "b") && /^[a-z0-9-]+\.[a-z0-9-]+$/.test(value)) found[key] = value;
  }
  return found;
}

const publish = () =>
  remember("chains", new URLSearchParams(Object.keys(DEFAULTS).map((key) => [key, state[key]])).toString());

function build() {
  const change = (key) => (event) => {
    const { target } = event;
    if (target.type === "number" && !(Number.isInteger(target.valueAsNumber) && target.checkValidity())) {
      say(`${target.labels[0].textContent} must be a whole number from ${target.min} to ${target.max}.`, true);
      target.value = state[key];
      return;
    }
    state[key] = target.type === "number" ? target.valueAsNumber : target.value;
    if (key === "program") build();
    refresh();
  };
  const size = (key, label) => field(label, number(state[key], LEAST[key], MOST[key], change(key), { name: key }));
  const labels = SIZES[state.program];
  const settings = h(
    "form",
    { class: "card bar chain-settings", "aria-label": "Chain settings", onsubmit: (event) => event.preventDefault() },
    field("Program", select(PROGRAMS, state.program, change("program"), { name: "program" })),
    Object.entries(labels).map(([key, label]) => size(key, label)),
    size("workers", "Workers"),
    size("cache", "Cache (tiles)"),
    button("Share", async () => {
      publish();
      say(await copyLink());
    }),
  );
  parts = {
    slider: h("input", {
      type: "range",
      min: 0,
      max: 1000,
      value: 0,
      "aria-label": "Moment of the launch",
      id: "moment",
      oninput: (event) => seek(event.target.valueAsNumber / 1000),
    }),
    place: h("output", { for: "moment" }),
    play: button("Play", toggle, { id: "chain-play" }),
    a: side("a"),
    b: side("b"),
    matrix: h("section", { class: "card", "aria-label": "All orders and policies" }),
  };
  root.replaceChildren(
    h(
      "div",
      { class: "intro" },
      h("h1", {}, "Chains"),
      h(
        "p",
        { class: "soft" },
        "One program, two launches: who waits how long depends on the order of the tiles and on what they wait by.",
      ),
    ),
    settings,
    h("div", { class: "card replay" }, parts.play, parts.slider, parts.place),
    h("div", { class: "pair" }, parts.a.node, parts.b.node),
    parts.matrix,
  );
}

function side(key) {
  const [order, sync] = state[key].split(".");
  const others = Object.keys(choices.orders).filter((name) => !choices.interleavings.includes(name));
  const set = () => {
    state[key] = `${orders.value}.${policy.value}`;
    refresh();
  };
  const option = (name) => h("option", { value: name, title: choices.orders[name] }, name);
  const orders = h(
    "select",
    { onchange: set, name: `order-${key}` },
    h("optgroup", { label: "Interleavings" }, choices.interleavings.map(option)),
    h("optgroup", { label: "Stage by stage" }, others.map(option)),
  );
  orders.value = order;
  const policy = select(choices.policies, sync, set, { name: `sync-${key}` });
  policy.value = sync;
  const made = {
    orders,
    policy,
    facts: h("div", { class: "figures" }),
    note: h("p", { class: "hint", "aria-live": "polite" }),
    stages: new Stages(),
    timeline: new Timeline({
      label: `Launch ${key.toUpperCase()}: a lane per worker. ${TIMELINE_KEYS}`,
      height: 300,
      onpick: (index) => told(made, index),
    }),
  };
  made.node = h(
    "section",
    { class: "card stack side", "aria-label": `Launch ${key.toUpperCase()}` },
    h(
      "div",
      { class: "bar" },
      h("h2", { class: `badge badge-${key}` }, key.toUpperCase()),
      field("Order", orders),
      field("Waits by", policy),
    ),
    made.facts,
    made.stages.node,
    made.timeline.canvas,
    made.note,
  );
  return made;
}

let turn = 0;
async function refresh() {
  const mine = ++turn;
  stop();
  publish();
  const sizes = Object.fromEntries(["program", ...Object.keys(LEAST)].map((key) => [key, state[key]]));
  const launch = async (key) => {
    const [order, sync] = state[key].split(".");
    try {
      return await get("/api/chain", { ...sizes, order, sync });
    } catch (error) {
      return { error: error.message };
    }
  };
  const [a, b] = await Promise.all([launch("a"), launch("b")]);
  if (mine !== turn) return;
  state.sides = { a, b };
  const wide = Math.max(a.makespan ?? 0, b.makespan ?? 0, 1);
  for (const key of ["a", "b"]) fill(parts[key], state.sides[key], wide);
  parts.slider.disabled = parts.play.disabled = Boolean(a.error && b.error);
  seek(state.at);
  await matrix(mine, sizes);
}

function fill(made, found, wide) {
  const broken = Boolean(found.error);
  made.stages.node.hidden = made.timeline.canvas.hidden = made.facts.hidden = broken;
  made.note.textContent = found.error ?? "";
  made.note.classList.toggle("bad", broken);
  if (broken) return;
  const figure = (text, label, kind) =>
    h("div", { class: "figure" }, h("b", { class: kind ?? "" }, text), h("span", {}, label));
  made.facts.replaceChildren(
    figure(time(found.makespan, "ns"), "from launch to end"),
    figure(percent(found.idle_share), "of the workers' time idle", found.idle_share > 0.005 ? "bad" : ""),
    figure(bytes(found.moved), "through device memory"),
  );
  made.timeline.options.wide = wide;
  made.timeline.load(found.trace);
  made.stages.load(found);
}

function told(made, index) {
  const { lanes } = made.timeline;
  made.note.classList.remove("bad");
  if (index < 0) {
    made.note.textContent = "";
    made.stages.mark(-1);
    return;
  }
  made.stages.mark(lanes.source[index]);
  const waited = lanes.start[index] - lanes.wait[index];
  const [starts, runs] = [lanes.start[index], lanes.end[index] - lanes.start[index]].map((value) => time(value, "ns"));
  const after = waited > 0 ? `after waiting ${time(waited, "ns")}` : "without waiting";
  const task = `${lanes.name[index]} ${lanes.task[index]} on worker ${lanes.worker[index]}`;
  made.note.textContent = `${task}: starts at ${starts}, runs ${runs}, ${after}.`;
}

const wideTime = () => Math.max(state.sides.a?.makespan ?? 0, state.sides.b?.makespan ?? 0, 1);

function seek(share) {
  state.at = Math.max(0, Math.min(1, share));
  const now = state.at * wideTime();
  parts.slider.value = Math.round(state.at * 1000);
  parts.place.textContent = time(now, "ns");
  parts.slider.setAttribute("aria-valuetext", parts.place.textContent);
  for (const key of ["a", "b"]) {
    if (state.sides[key].error) continue;
    parts[key].stages.draw(now);
    parts[key].timeline.cursor = now;
    parts[key].timeline.redraw();
  }
}

function toggle() {
  if (timer) {
    stop();
    return;
  }
  let last = performance.now();
  if (state.at >= 1) seek(0);
  const frame = (now) => {
    seek(state.at + (now - last) / 9000);
    last = now;
    if (state.at >= 1 || !root.isConnected || root.hidden) stop();
    else timer = requestAnimationFrame(frame);
  };
  timer = requestAnimationFrame(frame);
  parts.play.textContent = "Pause";
}

function stop() {
  cancelAnimationFrame(timer);
  timer = 0;
  if (parts.play) parts.play.textContent = "Play";
}

async function matrix(mine, sizes) {
  const title = h("h2", {}, "Every order under every policy");
  const tasks = (state.sides.a.places ?? state.sides.b.places)?.length ?? Infinity;
  if (tasks > choices.max_matrix_tasks) {
    const text = `For chains of up to ${choices.max_matrix_tasks} tasks. Choose fewer tiles to see it.`;
    parts.matrix.replaceChildren(title, h("p", { class: "soft" }, text));
    return;
  }
  let found;
  try {
    found = await get("/api/chain-matrix", sizes);
  } catch (error) {
    if (mine === turn) parts.matrix.replaceChildren(title, h("p", { class: "soft" }, error.message));
    return;
  }
  if (mine !== turn) return;
  const times = Object.values(found.cells)
    .flat()
    .filter(Boolean)
    .map((cell) => cell.makespan);
  const [least, most] = [Math.min(...times), Math.max(...times)];
  const cell = (order, sync, result) => {
    if (!result)
      return h("td", { class: "n bad", title: "The workers would all hold tasks that wait for later ones" }, "hangs");
    const part = most > least ? (result.makespan - least) / (most - least) : 0;
    const title = `${percent(result.idle_share)} idle, ${bytes(result.moved)} moved. Show as launch B`;
    return h(
      "td",
      { class: "n heat", style: { "--heat": part.toFixed(3) } },
      button((result.makespan / 1000).toFixed(1), () => take(order, sync), {
        class: "link",
        title,
        "aria-label": `${order}, ${sync}: ${time(result.makespan, "ns")}. ${title}`,
      }),
    );
  };
  const rows = Object.entries(found.cells).map(([order, cells]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", title: choices.orders[order] }, order),
      cells.map((result, i) => cell(order, found.policies[i], result)),
      h("td", { class: "n soft" }, bytes(cells.find(Boolean)?.moved ?? 0)),
    ),
  );
  parts.matrix.replaceChildren(
    title,
    h("p", { class: "soft" }, `Time from launch to end in µs, ${found.tasks} tasks. Choose one to see it as B.`),
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "matrix" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "order"),
            found.policies.map((name) => h("th", { scope: "col", class: "n" }, name)),
            h("th", { scope: "col", class: "n" }, "moved"),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
  );
}

function take(order, sync) {
  parts.b.orders.value = order;
  parts.b.policy.value = sync;
  state.b = `${order}.${sync}`;
  refresh();
  parts.b.node.scrollIntoView({
    block: "nearest",
    behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth",
  });
}

window.addEventListener("themechange", () => root && state.sides.a && seek(state.at));
