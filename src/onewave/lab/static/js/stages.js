// The tiles of a chain's stages at one moment: done, running, waiting on a worker, ready, blocked.

import { h, svg } from "./dom.js";
import { PALETTE } from "./lanes.js";

const KINDS = {
  running: "running",
  waiting: "waiting",
  ready: "ready",
  blocked: "blocked",
  done: "done",
};

export class Stages {
  constructor() {
    this.grids = h("div", { class: "grids" });
    this.counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, h("b", {}, "0")]));
    this.node = h(
      "div",
      { class: "stages" },
      this.grids,
      h(
        "ul",
        { class: "keys" },
        Object.entries(KINDS).map(([kind, text]) =>
          h("li", {}, h("span", { class: `swatch state-${kind}` }), `${text} `, this.counts[kind]),
        ),
      ),
    );
    this.marked = -1;
  }

  // found: the server's chain. A tile that is computed in several steps along K is drawn in as many strips.
  load(found) {
    const { tasks } = found.trace;
    this.start = tasks.start;
    this.end = tasks.end;
    this.wait = tasks.wait_start;
    this.worker = tasks.worker;
    this.ready = found.producers.map((list) => list.reduce((latest, task) => Math.max(latest, tasks.end[task]), 0));
    const extent = found.stages.map(() => [0, 0, 0]);
    for (const [stage, ...place] of found.places)
      place.forEach((at, i) => {
        extent[stage][i] = Math.max(extent[stage][i], at + 1);
      });
    const size = Math.max(11, Math.min(34, 130 / Math.max(...extent.map(([rows, cols]) => Math.max(rows, cols)))));
    this.boxes = [];
    // The colour that the timeline gives the stage's tasks.
    const phases = [...new Set(tasks.phase)];
    const swatch = (stage) => {
      const phase = tasks.phase[found.places.findIndex((place) => place[0] === stage)];
      const colour = `var(${PALETTE[phases.indexOf(phase) % PALETTE.length]})`;
      return h("span", { class: "swatch", style: { "--swatch": colour } });
    };
    const frames = extent.map(([rows, cols], stage) => {
      const drawing = svg("svg", {
        width: cols * size,
        height: rows * size,
        viewBox: `0 0 ${cols * size} ${rows * size}`,
        "aria-hidden": "true",
      });
      return { drawing, node: h("figure", {}, h("figcaption", {}, swatch(stage), found.stages[stage]), drawing) };
    });
    found.places.forEach(([stage, row, col, split], task) => {
      const strip = (size - 2) / extent[stage][2];
      const box = svg("rect", {
        x: col * size + 1 + split * strip,
        y: row * size + 1,
        width: Math.max(strip - (extent[stage][2] > 1 ? 0.5 : 0), 0.8),
        height: size - 2,
        rx: Math.min(3, strip / 3),
        "stroke-width": strip < 5 ? 0 : 1,
      });
      const label =
        strip >= 18 ? svg("text", { x: col * size + 1 + (split + 0.5) * strip, y: row * size + size / 2 + 1 }) : null;
      frames[stage].drawing.append(box, ...(label ? [label] : []));
      this.boxes[task] = { box, label, kind: "" };
    });
    this.grids.replaceChildren(...frames.map(({ node }) => node));
    this.marked = -1;
  }

  kind(task, now) {
    if (this.end[task] <= now) return "done";
    if (this.start[task] <= now) return "running";
    if (this.wait[task] <= now && this.wait[task] < this.start[task]) return "waiting";
    return this.ready[task] <= now ? "ready" : "blocked";
  }

  draw(now) {
    const count = { running: 0, waiting: 0, ready: 0, blocked: 0, done: 0 };
    this.boxes.forEach((shown, task) => {
      const kind = this.kind(task, now);
      count[kind]++;
      if (shown.kind === kind) return;
      shown.kind = kind;
      shown.box.setAttribute("class", `state-${kind}${task === this.marked ? " marked" : ""}`);
      if (shown.label) {
        shown.label.textContent = kind === "running" || kind === "waiting" ? this.worker[task] : "";
        shown.label.setAttribute("class", `on-${kind}`);
      }
    });
    for (const [kind, node] of Object.entries(this.counts)) node.textContent = count[kind];
    this.node.dataset.done = count.done;
  }

  mark(task) {
    this.boxes[this.marked]?.box.classList.remove("marked");
    this.marked = task;
    this.boxes[task]?.box.classList.add("marked");
  }
}
