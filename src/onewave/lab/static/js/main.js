// Which view is shown, and the colour scheme. A view is loaded when it is first opened.

import { say } from "./dom.js";
import { read } from "./route.js";

const LOAD = {
  game: () => import("./game.js"),
  chains: () => import("./chains.js"),
  traces: () => import("./traces.js"),
  orders: () => import("./orders.js"),
  decode: () => import("./decode.js"),
  profile: () => import("./profile.js"),
};
const TITLES = { game: "Game", chains: "Chains", traces: "Traces", orders: "Orders", decode: "Decode", profile: "Profile" };
const loaded = {};
const asked = {};
const opened = read(Object.keys(LOAD), document.documentElement.dataset.opened);
if (opened.query) asked[opened.view] = opened.query;

async function show() {
  const { view, query } = read(Object.keys(LOAD));
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const name of Object.keys(LOAD)) document.getElementById(`view-${name}`).hidden = name !== view;
  document.title = `${TITLES[view]} · onewave tile lab`;
  if (query) asked[view] = query;
  try {
    loaded[view] ??= await LOAD[view]();
  } catch (error) {
    say(`This view failed to open: ${error.message}`, true);
    return;
  }
  // While it loaded, another may have been chosen; its question then waits until it is shown.
  if (read(Object.keys(LOAD)).view !== view) return;
  const question = asked[view] ?? "";
  delete asked[view];
  loaded[view].show(document.getElementById(`view-${view}`), question);
}

const NEXT = { system: "dark", dark: "light", light: "system" };
const NAMES = { system: "as the system has them", dark: "dark", light: "light" };
function theme() {
  const button = document.getElementById("theme");
  const now = () => document.documentElement.dataset.theme ?? "system";
  const label = () => {
    button.setAttribute("aria-label", `Colours: ${NAMES[now()]}`);
    button.title = `Colours: ${NAMES[now()]}`;
  };
  const repaint = () => window.dispatchEvent(new Event("themechange"));
  button.addEventListener("click", () => {
    const next = NEXT[now()];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("onewave-theme", next);
    } catch {
      // Storage may be forbidden; the choice then lasts as long as the page.
    }
    label();
    say(`Colours: ${NAMES[next]}.`);
    repaint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  label();
}

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
window.addEventListener("hashchange", show);
theme();
show();
