// A line chart with logarithmic axes, read by pointer, arrow keys or as a table.

import { button, h, svg, table } from "./dom.js";

export const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8", "--s9", "--s10"];
const DASHES = ["", "7 4", "2 4"];
const EDGE = { left: 64, right: 12, top: 12, bottom: 46 };

const scale = (low, high, from, to, logarithmic) => {
  const turn = logarithmic ? Math.log : (value) => value;
  const [a, b] = [turn(low), turn(high)];
  return (value) => (b === a ? (from + to) / 2 : from + ((turn(value) - a) / (b - a)) * (to - from));
};

// Axis marks: of 1, 2, 5 times powers of ten, at most about `most` of them.
function marks(low, high, logarithmic, most = 7) {
  if (!logarithmic) {
    const power = 10 ** Math.floor(Math.log10(Math.max(high, 1e-9) / most));
    const step = [1, 2, 5, 10].find((factor) => high / (factor * power) <= most) * power;
    return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
  }
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
      for (const factor of factors)
        if (factor * power >= low * 0.999 && factor * power <= high * 1.001) found.push(factor * power);
    }
    if (found.length <= most + 3) return found.length > 1 ? found : [low, high];
  }
  return [low, high];
}

export class Chart {
  // data: {x: [...], series: {name: [...]}, bound: [...] or null}. options: label, xName, axis, yName,
  // xText(value), yText(value), logarithmic, steps, thumb(name) -> node or null, titles: {name: text}.
  constructor(data, options) {
    this.data = data;
    this.options = {
      xText: String,
      yText: String,
      logarithmic: true,
      steps: false,
      titles: {},
      thumb: () => null,
      ...options,
    };
    // A drawing's letters shrink with it, so a narrow screen gets a smaller drawing.
    [this.width, this.height] = matchMedia("(max-width: 720px)").matches ? [380, 300] : [720, 400];
    this.at = null;
    this.hidden = new Set();
    this.strong = null;
    this.drawing = svg("svg", {
      class: "chart",
      viewBox: `0 0 ${this.width} ${this.height}`,
      tabindex: 0,
      role: "img",
      "aria-label": `${this.options.label}. Left and right arrows read off values; a table follows.`,
    });
    this.legend = h("ul", { class: "legend" });
    this.place = h("p", { class: "soft legend-head", "aria-live": "polite" });
    this.rows = h("details", {}, h("summary", {}, "Show as table"));
    this.rows.addEventListener("toggle", () => this.rows.open && this.table());
    this.node = h(
      "div",
      { class: "chart-pair" },
      h("div", { class: "stack" }, this.drawing, this.rows),
      h("div", {}, this.place, this.legend),
    );
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerdown", (event) => this.point(event));
    this.drawing.addEventListener("keydown", (event) => this.key(event));
    this.draw();
  }

  draw() {
    const { x, series, bound } = this.data;
    const { logarithmic, steps, xText, yText, xName, axis, yName } = this.options;
    const shown = Object.entries(series).filter(([name]) => !this.hidden.has(name));
    const values = [...shown.flatMap(([, column]) => column), ...(bound ?? [])].filter((value) => value !== null);
    const most = 1.04 * Math.max(...values, 1);
    const least = logarithmic ? 0.93 * Math.max(Math.min(...values), 1e-9) : 0;
    this.x = scale(x[0], x.at(-1), EDGE.left, this.width - EDGE.right, logarithmic);
    const y = scale(least, most, this.height - EDGE.bottom, EDGE.top, logarithmic);
    const text = (at, content, more) => svg("text", { ...at, ...more }, content);
    const frame = [
      ...marks(least, most, logarithmic).flatMap((value) => [
        svg("path", { class: "grid", d: `M${EDGE.left} ${y(value)}H${this.width - EDGE.right}` }),
        text({ x: EDGE.left - 8, y: y(value) }, yText(value), { class: "left" }),
      ]),
      ...marks(x[0], x.at(-1), logarithmic).flatMap((value) => [
        svg("path", { class: "grid", d: `M${this.x(value)} ${this.height - EDGE.bottom}v5` }),
        // The last one would stand out on the right.
        text({ x: Math.min(this.x(value), this.width - 22), y: this.height - EDGE.bottom + 17 }, xText(value), {
          class: "below",
        }),
      ]),
      text({ x: (EDGE.left + this.width) / 2, y: this.height - 8 }, axis ?? xName, { class: "below name" }),
      text({ x: 0, y: 0, transform: `translate(13 ${this.height / 2 - 20}) rotate(-90)` }, yName, {
        class: "below name",
      }),
    ];
    const path = (column) =>
      column
        .map((value, i) => {
          const point = `${this.x(x[i]).toFixed(1)} ${y(value).toFixed(1)}`;
          return steps && i ? `H${this.x(x[i]).toFixed(1)}V${y(value).toFixed(1)}` : `${i ? "L" : "M"}${point}`;
        })
        .join("");
    const lines = Object.keys(series).map((name, i) => {
      if (this.hidden.has(name)) return null;
      const faded = this.strong && this.strong !== name;
      return svg("path", {
        class: `line${this.strong === name ? " strong" : ""}${faded ? " faded" : ""}`,
        d: path(series[name]),
        "stroke-dasharray": DASHES[Math.floor(i / COLOURS.length)],
        style: { stroke: `var(${COLOURS[i % COLOURS.length]})` },
      });
    });
    if (bound) lines.push(svg("path", { class: "line limit", d: path(bound) }));
    this.ruler = svg("path", { class: "ruler" });
    this.drawing.replaceChildren(...frame, ...lines.filter(Boolean), this.ruler);
    this.read();
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * this.width;
    let nearest = 0;
    this.data.x.forEach((value, i) => {
      if (Math.abs(this.x(value) - at) < Math.abs(this.x(this.data.x[nearest]) - at)) nearest = i;
    });
    if (nearest === this.at) return;
    this.at = nearest;
    this.read();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(this.data.x.length - 1, (this.at ?? (step > 0 ? -1 : this.data.x.length)) + step));
    this.read();
  }

  read() {
    const { x, series, bound } = this.data;
    const { xName, xText, yText, titles, thumb } = this.options;
    const at = this.at ?? Math.floor(x.length / 2);
    this.ruler.setAttribute("d", `M${this.x(x[at])} ${EDGE.top}V${this.height - EDGE.bottom}`);
    this.place.textContent = `At ${xText(x[at])} ${xName}:`;
    const names = Object.keys(series);
    const sorted = [...names].sort((a, b) => series[a][at] - series[b][at]);
    const entry = (name) => {
      const i = names.indexOf(name);
      const mark = svg(
        "svg",
        { viewBox: "0 0 28 10", class: "mark", "aria-hidden": "true" },
        svg("path", {
          d: "M1 5H27",
          "stroke-dasharray": DASHES[Math.floor(i / COLOURS.length)],
          style: { stroke: `var(${COLOURS[i % COLOURS.length]})` },
        }),
      );
      return h(
        "li",
        {},
        button(
          [
            mark,
            thumb(name, `var(${COLOURS[i % COLOURS.length]})`),
            h("span", {}, name),
            h("b", {}, yText(series[name][at])),
          ].filter(Boolean),
          () => this.toggle(name),
          {
            "aria-pressed": String(!this.hidden.has(name)),
            title: titles[name] ?? "",
            "data-name": name,
            onpointerenter: () => this.stress(name),
            onpointerleave: () => this.stress(null),
          },
        ),
      );
    };
    const focused = this.legend.contains(document.activeElement) ? document.activeElement.dataset.name : null;
    this.legend.replaceChildren(
      ...sorted.map(entry),
      ...(bound
        ? [
            h(
              "li",
              { class: "limit" },
              svg(
                "svg",
                { viewBox: "0 0 28 10", class: "mark", "aria-hidden": "true" },
                svg("path", { class: "limit", d: "M1 5H27" }),
              ),
              h("span", {}, "lower bound"),
              h("b", {}, yText(bound[at])),
            ),
          ]
        : []),
    );
    if (focused) this.legend.querySelector(`[data-name="${focused}"]`)?.focus();
  }

  stress(name) {
    this.strong = name;
    Object.keys(this.data.series)
      .filter((other) => !this.hidden.has(other))
      .forEach((other, i) => {
        const line = this.drawing.querySelectorAll(".line:not(.limit)")[i];
        line.classList.toggle("strong", name === other);
        line.classList.toggle("faded", name !== null && name !== other);
      });
  }

  toggle(name) {
    if (this.hidden.has(name)) this.hidden.delete(name);
    else if (this.hidden.size < Object.keys(this.data.series).length - 1) this.hidden.add(name);
    this.draw();
  }

  table() {
    const { x, series, bound } = this.data;
    const { xName, xText, yText } = this.options;
    const line = (head, column) => ({ head, cells: column.map(yText) });
    const lines = Object.entries(series).map(([name, column]) => line(name, column));
    if (bound) lines.push(line("lower bound", bound));
    this.rows.replaceChildren(this.rows.firstChild, table([xName, ...x.map(xText)], lines));
  }
}
