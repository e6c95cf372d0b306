// The board: row panels of A on the left, column panels of B above, the tiles of C between them, and the path.

import { button, h, percent, svg } from "./dom.js";
import { name } from "./model.js";

const MAX_CELLS = 8; // panels with more tiles along K are drawn as one bar

export class Board {
  // choose(row, col): a tile was chosen. look(row, col), or look(null): a tile is under the pointer or has the focus.
  constructor(setting, room, choose, look) {
    this.setting = setting;
    const { m, n, k } = setting;
    const gap = Math.max(m, n) <= 12 ? 6 : Math.max(m, n) <= 24 ? 3 : 2;
    const along = k <= MAX_CELLS ? k : 1;
    const thick = along === 1 ? 26 : Math.max(10, Math.min(22, Math.floor(88 / along)));
    const beside = along * (thick + 2) + 40;
    const least = matchMedia("(pointer: coarse)").matches ? 34 : 22;
    const fit = Math.floor((Math.min(room.width - beside, 620) - n * gap) / n);
    const high = Math.floor((room.height - beside - m * gap) / m);
    this.size = Math.max(least, Math.min(76, fit, Math.max(high, 30)));
    this.gap = gap;
    this.grain = along === k ? "cells" : "bar";
    this.node = h("div", {
      class: "board",
      role: "group",
      "aria-label": `C, ${m} rows of ${n} tiles`,
      style: { "--size": `${this.size}px`, "--gap": `${gap}px`, "--rows": m, "--cols": n, "--thick": `${thick}px` },
    });
    this.cells = [];
    this.boxes = new Map();
    this.node.append(h("div", { class: "corner", "aria-hidden": "true" }, "A × B = C"));
    for (let col = 0; col < n; col++) this.node.append(this.panel("B", col, along));
    for (let row = 0; row < m; row++) {
      this.node.append(this.panel("A", row, along));
      for (let col = 0; col < n; col++) this.node.append(this.tile(row, col, choose, look));
    }
    this.path = svg("svg", {
      class: "path",
      "aria-hidden": "true",
      viewBox: `0 0 ${this.pixels(n)} ${this.pixels(m)}`,
    });
    this.path.style.width = `${this.pixels(n)}px`;
    this.path.style.height = `${this.pixels(m)}px`;
    this.node.append(this.path);
  }

  pixels(count) {
    return count * (this.size + this.gap) - this.gap;
  }

  panel(letter, at, along) {
    const boxes = Array.from({ length: along }, () => h("i"));
    this.boxes.set(`${letter}${at}`, boxes);
    return h(
      "div",
      { class: `panel panel-${letter}`, "data-panel": `${letter}${at}` },
      this.size >= 24 ? h("b", {}, `${letter}${at}`) : null,
      boxes,
    );
  }

  tile(row, col, choose, look) {
    const cell = button("", () => choose(row, col), {
      class: "tile",
      "data-tile": `${row},${col}`,
      tabindex: row || col ? -1 : 0,
      onkeydown: (event) => this.step(event, row, col),
      onpointerenter: () => look(row, col),
      onpointerleave: () => look(null),
      onfocus: () => look(row, col),
      onblur: () => look(null),
    });
    this.cells.push(cell);
    return cell;
  }

  // Arrow keys move between tiles, as in any grid; only one tile is a stop of the Tab key.
  step(event, row, col) {
    const { m, n } = this.setting;
    const to = {
      ArrowUp: [row - 1, col],
      ArrowDown: [row + 1, col],
      ArrowLeft: [row, col - 1],
      ArrowRight: [row, col + 1],
      Home: [row, 0],
      End: [row, n - 1],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    const cell = this.cells[Math.min(m - 1, Math.max(0, to[0])) * n + Math.min(n - 1, Math.max(0, to[1]))];
    for (const other of this.cells) other.tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
  }

  draw(steps, at, resident) {
    this.drawTiles(steps, at);
    this.drawPath(steps, at);
    this.drawPanels(steps[at - 1], resident);
  }

  drawTiles(steps, at) {
    const { n } = this.setting;
    const place = new Map(steps.map((step, index) => [step.tile[0] * n + step.tile[1], index]));
    this.cells.forEach((cell, id) => {
      const where = `C(${Math.floor(id / n)}, ${id % n})`;
      const index = place.get(id);
      if (index === undefined) {
        cell.className = "tile";
        cell.textContent = "";
        cell.setAttribute("aria-label", where);
        return;
      }
      const { loads, hits } = steps[index];
      const cost = loads.length === 0 ? "free" : hits.length ? "half" : "full";
      cell.className = index >= at ? "tile ahead" : `tile done ${cost}${index === at - 1 ? " now" : ""}`;
      cell.setAttribute("aria-label", `${where}, number ${index + 1}, ${loads.length} loads`);
      cell.textContent = this.size >= 20 ? index + 1 : "";
      if (this.size >= 42 && index < at) cell.append(h("small", {}, `+${loads.length}`));
    });
  }

  drawPath(steps, at) {
    const centre = (place) => (place + 0.5) * (this.size + this.gap) - this.gap / 2;
    const head = Math.max(3, Math.min(7, this.size / 8));
    const lines = { done: "", ahead: "" };
    for (let i = 1; i < steps.length; i++) {
      const [from, to] = [steps[i - 1].tile, steps[i].tile];
      const [x0, y0, x1, y1] = [centre(from[1]), centre(from[0]), centre(to[1]), centre(to[0])];
      lines[i < at ? "done" : "ahead"] += arrow([x0, y0], [x1, y1], this.size, head);
    }
    this.path.replaceChildren(
      svg("path", { d: lines.ahead, class: "ahead" }),
      svg("path", { d: lines.done, class: "done" }),
    );
    this.path.dataset.arrows = Math.max(0, Math.min(at, steps.length) - 1);
  }

  // Which box of which panel an id belongs to: "A3" and its place along K.
  box(id) {
    const { setting } = this;
    const label = name(setting, id);
    if (setting.unit === "panels") return [label, null];
    const [first, second] = label.slice(1).split(",").map(Number);
    return label[0] === "A" ? [`A${first}`, second] : [`B${second}`, first];
  }

  drawPanels(now, resident) {
    const { k, unit } = this.setting;
    const count = new Map();
    const put = (kind, id) => {
      const [panel, along] = this.box(id);
      const boxes = this.boxes.get(panel);
      const places = along === null ? boxes.keys() : [this.grain === "cells" ? along : 0];
      for (const place of places) {
        const key = `${panel}:${place}`;
        const seen = count.get(key) ?? { in: 0, loaded: 0, hit: 0, evicted: 0 };
        seen[kind] += 1;
        count.set(key, seen);
      }
    };
    for (const id of resident) put("in", id);
    for (const kind of ["loads", "hits", "evictions"]) {
      for (const id of now?.[kind] ?? []) put({ loads: "loaded", hits: "hit", evictions: "evicted" }[kind], id);
    }
    const whole = this.grain === "cells" || unit === "panels" ? 1 : k;
    for (const [panel, boxes] of this.boxes) {
      let inside = 0;
      boxes.forEach((box, place) => {
        const seen = count.get(`${panel}:${place}`);
        const share = (seen?.in ?? 0) / whole;
        inside += share / boxes.length;
        box.style.setProperty("--share", share.toFixed(3));
        const kind = seen?.loaded ? " loaded" : seen?.hit ? " hit" : seen?.evicted ? " evicted" : "";
        box.className = (share ? "in" : "") + kind;
      });
      const where = inside ? `${percent(Math.min(inside, 1))} in the cache` : "in memory only";
      boxes[0].parentElement.title = `${panel}: ${where}`;
    }
  }
}

// From border to border, so that the numbers stay readable; a jump bends, so as not to strike out the tiles between.
function arrow([x0, y0], [x1, y1], size, head) {
  const far = Math.hypot(x1 - x0, y1 - y0);
  const bend = far > 1.6 * size + 8 ? 0.42 * size : 0;
  const [cx, cy] = [(x0 + x1) / 2 + (bend * (y1 - y0)) / far, (y0 + y1) / 2 - (bend * (x1 - x0)) / far];
  const reach = Math.hypot(cx - x0, cy - y0);
  const off = Math.min((size < 40 ? 0.46 : 0.36) * size, far / 2 - 2);
  const [ax, ay] = [x0 + ((cx - x0) / reach) * off, y0 + ((cy - y0) / reach) * off];
  const [dx, dy] = [(x1 - cx) / reach, (y1 - cy) / reach];
  const [bx, by] = [x1 - dx * off, y1 - dy * off];
  const text = (...numbers) => numbers.map((number) => number.toFixed(1)).join(" ");
  const wing = (side) => text(bx - head * (dx + side * 0.7 * dy), by - head * (dy - side * 0.7 * dx));
  const line = bend ? `Q${text(cx, cy, bx, by)}` : `L${text(bx, by)}`;
  return `M${text(ax, ay)}${line}M${wing(1)}L${text(bx, by)}L${wing(-1)}`;
}
