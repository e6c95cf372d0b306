// Small helpers for building the page. Text always goes in as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

// A labelled control; `make` builds the input for the given id.
let ids = 0;
export function field(label, control) {
  control.id ||= `field-${++ids}`;
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
}

export const number = (value, least, most, onchange, more = {}) =>
  h("input", { type: "number", inputmode: "numeric", value, min: least, max: most, onchange, ...more });

export function select(options, value, onchange, more = {}) {
  const pairs = Array.isArray(options) ? options.map((name) => [name, name]) : Object.entries(options);
  const node = h(
    "select",
    { onchange, ...more },
    pairs.map(([key, text]) => h("option", { value: key }, text)),
  );
  node.value = value;
  return node;
}

export const button = (text, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, text);

const MAX_FILE = 60 * 1024 * 1024; // the server takes 64 MiB

export function withinSize(file) {
  if (file.size <= MAX_FILE) return true;
  say(`${file.name}: ${whole.format(file.size)} bytes; allowed: up to ${whole.format(MAX_FILE)}.`, true);
  return false;
}

// A button that asks for a JSON file and hands it on.
export function fileButton(text, id, open) {
  const input = h("input", { type: "file", accept: ".json,application/json", class: "hush", id });
  input.addEventListener("change", async () => {
    const [file] = input.files;
    if (file && withinSize(file)) await open(file);
    input.value = "";
  });
  return h("label", { class: "like-button" }, text, input);
}

// A table that scrolls by itself where it is too wide. rows: {head, cells, kind}; all but the first column are numbers.
export function table(heads, rows) {
  const title = (text, i) => h("th", { scope: "col", class: i ? "n" : false }, text);
  const number = (cell) => h("td", { class: "n" }, cell);
  const line = ({ head, cells, kind }) =>
    h("tr", { class: kind || false }, h("th", { scope: "row" }, head), cells.map(number));
  const body = h("tbody", {}, rows.map(line));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map(title))), body));
}

export function save(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const whole = new Intl.NumberFormat("en");
export const percent = (share) => (share === 0 ? "0 %" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB"];
  let at = 0;
  for (; value >= 1000 && at < 3; at++) value /= 1000;
  return `${value < 10 && at ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

// A colour of the style sheet as the canvas takes it, in the scheme that is shown now.
const probe = document.createElement("i");
export function css(variable) {
  if (!probe.isConnected) {
    probe.hidden = true;
    document.body.append(probe);
  }
  probe.style.color = `var(${variable})`;
  return getComputedStyle(probe).color;
}

// One line at the foot of the page, read out by screen readers.
export function say(text, isError = false) {
  const box = document.getElementById("message");
  box.textContent = text;
  box.classList.toggle("error", isError);
  box.hidden = !text;
  clearTimeout(say.timer);
  if (text) say.timer = setTimeout(() => say(""), isError ? 12_000 : 4000);
}
