// The tile game: its settings, its path with undo and replay, and the questions that it asks the server.

import { get, post } from "./api.js";
import { Board } from "./board.js";
import { button, field, fileButton, h, number, save, say, select, whole } from "./dom.js";
import { DEFAULTS, POLICIES, cacheAt, decode, encode, explain, name, play, problem, touches } from "./model.js";
import { readOrder, writeOrder } from "./orderfile.js";
import { copyLink, remember } from "./route.js";
import { drawCache, drawScore } from "./score.js";

const MAX_HISTORY = 500;
const state = {
  setting: DEFAULTS,
  path: [],
  past: [],
  future: [],
  at: 0,
  overview: null,
  best: null,
  explained: false,
};
let counted = play(DEFAULTS, []);
let root = null;
let parts = {};
let board = null;
let timer = 0;

export function show(panel, query) {
  if (root && !query) {
    publish();
    return;
  }
  const { setting, path, note } = decode(query);
  const known = root && encode(state.setting, state.path) === encode(setting, path);
  root = panel;
  if (known) return;
  stopReplay();
  Object.assign(state, { setting, path, past: [], future: [], at: path.length, overview: null, best: null });
  build();
  publish();
  if (note) say(note, true);
  ask();
}

function build() {
  const { setting } = state;
  const change = (key) => (event) =>
    apply({ [key]: event.target.type === "number" ? event.target.valueAsNumber : event.target.value });
  const sized = (label, key, least, most) =>
    field(label, number(setting[key], least, most, change(key), { name: key }));
  const settings = h(
    "form",
    { class: "card bar settings", "aria-label": "Game settings", onsubmit: (event) => event.preventDefault() },
    sized("M: tile rows of C", "m", 1, 64),
    sized("N: tile columns", "n", 1, 64),
    sized("K: tiles deep", "k", 1, 64),
    sized("Cache slots", "slots", 2, 100000),
    field(
      "A slot holds",
      select({ panels: "a panel", tiles: "a tile" }, setting.unit, change("unit"), { name: "unit" }),
    ),
    field("Evicts by", select(POLICIES, setting.policy, change("policy"), { name: "policy" })),
  );
  parts = {
    board: h("div", { class: "board-scroll" }),
    score: h("section", { class: "card", "aria-label": "Score" }),
    cache: h("section", { class: "card", "aria-label": "Cache" }),
    hint: h("p", { class: "hint", id: "hint" }),
    text: h("p", { class: "explain", "aria-live": "polite", id: "explanation", hidden: true }),
    slider: h("input", {
      type: "range",
      min: 0,
      id: "replay",
      "aria-label": "Replay: step",
      oninput: (event) => seek(event.target.valueAsNumber),
    }),
    place: h("output", { for: "replay", id: "place" }),
    undo: button("Undo", undo, { title: "Ctrl+Z or U", id: "undo" }),
    redo: button("Redo", redo, { title: "Ctrl+Y or R", id: "redo" }),
    clear: button("Clear", () => act([]), { id: "clear" }),
    best: button("Best from here", bestFromHere, { class: "primary", id: "best" }),
    explain: button(
      "Explain this step",
      () => {
        state.explained = !state.explained;
        draw();
      },
      { id: "explain", "aria-pressed": "false" },
    ),
    play: button("Play", toggleReplay, { id: "play", title: "Replay the path" }),
  };
  const tools = h(
    "div",
    { class: "tools" },
    parts.undo,
    parts.redo,
    parts.clear,
    parts.best,
    parts.explain,
    button("Share", share, { id: "share", title: "Copy a link to this game" }),
    button("Export", exportOrder, { id: "export", title: "Save the order as JSON" }),
    fileButton("Open…", "open-order", openOrder),
  );
  root.replaceChildren(
    h(
      "div",
      { class: "intro" },
      h("h1", {}, "Tile game"),
      h(
        "p",
        { class: "soft" },
        "Compute all tiles of C in any order. Each needs its row of A and its column of B. Load as little as you can.",
      ),
    ),
    settings,
    h(
      "div",
      { class: "split" },
      h(
        "section",
        { class: "card board-card", "aria-label": "Board" },
        parts.board,
        parts.hint,
        parts.text,
        h("div", { class: "replay" }, parts.play, parts.slider, parts.place),
        tools,
      ),
      h("div", { class: "stack" }, parts.score, parts.cache),
    ),
  );
  layBoard();
  recount();
  draw();
}

function layBoard() {
  const width = parts.board.clientWidth || 600;
  const height = Math.max(240, window.innerHeight - 430);
  board = new Board(state.setting, { width: width - 10, height }, choose, look);
  parts.board.replaceChildren(board.node);
}

function apply(change) {
  const setting = { ...state.setting, ...change };
  const wrong = problem(setting);
  if (wrong) {
    say(wrong, true);
    for (const key of Object.keys(change)) root.querySelector(`[name=${key}]`).value = state.setting[key];
    return;
  }
  say("");
  stopReplay();
  const keep = setting.m === state.setting.m && setting.n === state.setting.n;
  Object.assign(state, { setting, best: null, overview: null }, keep ? {} : { path: [], past: [], future: [], at: 0 });
  layBoard();
  recount();
  draw();
  publish();
  ask();
}

// ---- what the server knows: other orders, the bound, the best ----

let turn = 0;
async function ask() {
  const mine = ++turn;
  const { setting } = state;
  try {
    const overview = await get("/api/game", setting);
    if (mine !== turn) return;
    for (const key of ["row", "snake"]) overview.orders[key].steps = play(setting, overview.orders[key].path).steps;
    state.overview = overview;
    const [label, found] = Object.entries(overview.orders).sort((a, b) => a[1].loads - b[1].loads)[0];
    offerBest({ label, path: found.path, loads: found.loads, proven: found.loads <= overview.bound.loads });
    draw();
    if (setting.m * setting.n > 1024) return;
    // A search takes the server up to two seconds: not for every step of a spin button.
    await new Promise((resume) => setTimeout(resume, 250));
    if (mine !== turn) return;
    const best = await post("/api/best", { ...setting, order: [] });
    if (mine !== turn) return;
    offerBest({ label: "searched", path: best.order, loads: best.loads, proven: best.proven });
    draw();
  } catch (error) {
    if (mine === turn) say(error.message, true);
  }
}

function offerBest(found) {
  const better =
    !state.best ||
    found.loads < state.best.loads ||
    (found.proven && found.loads === state.best.loads && !state.best.proven);
  if (better) state.best = { ...found, steps: play(state.setting, found.path).steps };
}

async function bestFromHere() {
  const prefix = state.path.slice(0, state.at);
  const { setting } = state;
  parts.best.disabled = true;
  parts.best.setAttribute("aria-busy", "true");
  try {
    const found = await post("/api/best", { ...setting, order: prefix });
    if (setting !== state.setting) return;
    if (!prefix.length) offerBest({ label: "searched", path: found.order, loads: found.loads, proven: found.proven });
    act(found.order);
    const loads = `${whole.format(found.loads)} loads`;
    const known = `the fewest of ${whole.format(found.tried)} tries; ${whole.format(found.bound)} or more are needed`;
    say(found.proven ? `${loads}: the fewest possible from here.` : `${loads}, ${known}.`);
    if (found.order.length > prefix.length && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      seek(prefix.length);
      toggleReplay();
    }
  } catch (error) {
    say(error.message, true);
  } finally {
    parts.best.disabled = false;
    parts.best.removeAttribute("aria-busy");
  }
}

// ---- the path ----

function recount() {
  counted = play(state.setting, state.path);
}

function put(path, at = path.length) {
  stopReplay();
  Object.assign(state, { path, at });
  recount();
  draw();
  publish();
}

// Something a person did: undo takes it back.
function act(path, at = path.length) {
  if (
    path.length === state.path.length &&
    path.every(([row, col], i) => row === state.path[i][0] && col === state.path[i][1])
  ) {
    seek(at);
    return;
  }
  state.past = [...state.past.slice(-MAX_HISTORY), state.path];
  state.future = [];
  put(path, at);
}

function choose(row, col) {
  // A click while looking at the past goes on from there.
  const path = state.path.slice(0, state.at);
  const found = path.findIndex(([r, c]) => r === row && c === col);
  if (found < 0) act([...path, [row, col]]);
  else say(`C(${row}, ${col}) is computed already, as number ${found + 1}.`);
}

function undo() {
  // A path that came with a link has no past: it is taken back tile by tile.
  if (!state.past.length && !state.path.length) return;
  state.future = [state.path, ...state.future];
  put(state.past.length ? state.past.pop() : state.path.slice(0, -1));
}

function redo() {
  if (!state.future.length) return;
  state.past = [...state.past, state.path];
  put(state.future.shift());
}

function seek(at) {
  state.at = Math.max(0, Math.min(at, state.path.length));
  draw();
}

function toggleReplay() {
  if (timer) {
    stopReplay();
    return;
  }
  if (state.at >= state.path.length) seek(0);
  const pause = Math.max(40, Math.min(350, 8000 / Math.max(state.path.length - state.at, 1)));
  timer = setInterval(() => (state.at < state.path.length ? seek(state.at + 1) : stopReplay()), pause);
  parts.play.textContent = "Pause";
}

function stopReplay() {
  clearInterval(timer);
  timer = 0;
  if (parts.play) parts.play.textContent = "Play";
}

function publish() {
  remember("game", encode(state.setting, state.path));
}

async function share() {
  publish();
  say(await copyLink());
}

function exportOrder() {
  save("order.json", writeOrder(state.setting, state.path, counted.loads));
}

async function openOrder(file) {
  try {
    const { setting, path } = readOrder(await file.text());
    show(root, encode(setting, path));
    say(`${file.name}: ${path.length} tiles.`);
  } catch (error) {
    say(`${file.name}: ${error.message}`, true);
  }
}

// On the document: where a button took the focus and went away, keys still work.
document.addEventListener("keydown", (event) => {
  if (!root || root.hidden || event.altKey || event.target.matches?.("input, select")) return;
  const key = event.key.toLowerCase();
  const held = event.ctrlKey || event.metaKey;
  if ((key === "z" && held && !event.shiftKey) || (key === "u" && !held)) undo();
  else if ((key === "y" && held) || (key === "z" && held) || (key === "r" && !held)) redo();
  else return;
  event.preventDefault();
});

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (!root || root.hidden || width === window.innerWidth) return;
  width = window.innerWidth;
  layBoard();
  draw();
});

// ---- drawing ----

function look(row, col) {
  parts.hint.textContent = row === null ? rest() : preview(row, col);
}

function rest() {
  const { path, at, setting } = state;
  if (!path.length) return "Choose a tile to begin. Arrow keys move, Enter computes.";
  if (at < path.length) return `Step ${at} of ${path.length}: choosing a tile goes on from here.`;
  return path.length === setting.m * setting.n ? "All tiles are computed." : "";
}

function preview(row, col) {
  const { setting, path, at } = state;
  const prefix = path.slice(0, at);
  if (prefix.some(([r, c]) => r === row && c === col)) return `C(${row}, ${col}) is computed.`;
  const tile = [row, col];
  if ((prefix.length + 1) * 2 * setting.k > 20_000) return `C(${row}, ${col})`;
  const { loads } = play(setting, [...prefix, tile]).steps.at(-1);
  const unit = setting.unit === "panels" ? "panel" : "tile";
  const names =
    loads
      .slice(0, 4)
      .map((id) => name(setting, id))
      .join(", ") + (loads.length > 4 ? ", …" : "");
  return loads.length
    ? `C(${row}, ${col}) would load ${loads.length} ${unit}${loads.length > 1 ? "s" : ""}: ${names}.`
    : `C(${row}, ${col}) is free: all ${touches(setting, tile).flat().length} it needs are in the cache.`;
}

function draw() {
  const { setting, path, at, overview } = state;
  const now = counted.steps[at - 1];
  const { slots, order } = cacheAt(setting, counted.steps, at);
  board.draw(counted.steps, at, order);
  const others = overview ? ["row", "snake"].map((label) => ({ label, ...overview.orders[label] })) : [];
  drawScore(parts.score, {
    setting,
    counted,
    at,
    others,
    best: state.best,
    bound: overview?.bound ?? null,
    take: (found) => act(found.map((tile) => [...tile])),
  });
  drawCache(parts.cache, { setting, now, slots, order });
  parts.slider.max = path.length;
  parts.slider.value = at;
  parts.slider.setAttribute("aria-valuetext", `step ${at} of ${path.length}`);
  parts.slider.disabled = parts.play.disabled = !path.length;
  parts.place.textContent = `${at} / ${path.length}`;
  // Not "disabled": a button that has the focus keeps it.
  for (const [key, idle] of [
    ["undo", !path.length && !state.past.length],
    ["redo", !state.future.length],
    ["clear", !path.length],
  ]) {
    parts[key].setAttribute("aria-disabled", String(idle));
  }
  parts.explain.setAttribute("aria-pressed", String(state.explained));
  parts.text.hidden = !state.explained;
  parts.hint.hidden = state.explained;
  if (state.explained) parts.text.textContent = explain(setting, counted.steps, at - 1);
  parts.hint.textContent = rest();
}
