// A timeline on a canvas: a lane per worker, pan and zoom by mouse, touch and keys. Draws at most once a frame.

import { css, h } from "./dom.js";
import { Lanes, PALETTE, isDark, paint, pixel, ticks, time } from "./lanes.js";

export const TIMELINE_KEYS = "Arrows move, plus and minus zoom, 0 fits, N and P walk through the tasks.";

const GUTTER = 42;
const AXIS = 22;

export class Timeline {
  // options: label; height: most CSS pixels; lane: CSS pixels a lane (fits when left out); wide: the time that the
  // width shows at first (by default the makespan); onview(view), onpick(index or -1).
  constructor(options) {
    this.options = { height: 420, onview() {}, onpick() {}, ...options };
    this.canvas = h("canvas", {
      class: "timeline",
      tabindex: 0,
      role: "application",
      "aria-roledescription": "timeline",
      "aria-label": options.label,
    });
    this.lanes = null;
    this.picked = -1;
    this.hovered = -1;
    this.cursor = null;
    this.colourOf = null;
    this.frames = 0;
    this.pointers = new Map();
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    window.addEventListener("themechange", () => this.repaint());
  }

  load(trace) {
    this.lanes = trace instanceof Lanes ? trace : new Lanes(trace);
    this.picked = this.hovered = -1;
    this.colourOf = null;
    this.view = { from: 0, to: Math.max(this.options.wide ?? this.lanes.makespan, 1e-9), top: 0, lane: 10 };
    this.resize();
  }

  resize() {
    if (!this.lanes) return;
    const { lane } = this.options;
    // On a phone a finger needs room beside the timeline to scroll the page.
    const height = Math.min(this.options.height, Math.max(0.55 * window.innerHeight, 160));
    const each =
      lane ??
      Math.max(
        matchMedia("(pointer: coarse)").matches ? 6 : 4,
        Math.min(24, Math.floor((height - AXIS) / this.lanes.workers)),
      );
    this.ratio = Math.min(window.devicePixelRatio || 1, 2);
    this.view.lane = each;
    this.tall = Math.min(height - AXIS, each * this.lanes.workers);
    this.canvas.style.height = `${this.tall + AXIS}px`;
    const width = this.canvas.clientWidth;
    if (!width) return;
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round((this.tall + AXIS) * this.ratio);
    this.width = width - GUTTER;
    // A finger that drags scrolls the page where there is nothing to scroll inside.
    this.canvas.style.touchAction = this.most() > 0 ? "none" : "pan-y";
    this.image = null;
    this.repaint();
  }

  most() {
    return Math.max(0, this.view.lane * this.lanes.workers - this.tall);
  }

  repaint() {
    this.colours = null;
    this.redraw();
  }

  redraw() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      if (this.lanes && this.width > 0 && this.canvas.isConnected) this.draw();
    });
  }

  palette() {
    this.colours ??= {
      paper: pixel(css("--card")),
      idle: pixel(css("--idle-tint")),
      wait: pixel(css("--idle")),
      names: PALETTE.map(css),
      tasks: PALETTE.map((name) => pixel(css(name))),
      ink: css("--ink"),
      soft: css("--soft"),
      line: css("--line"),
      card: css("--card"),
    };
    return this.colours;
  }

  draw() {
    const { canvas, ratio, view, lanes } = this;
    const colours = this.palette();
    const context = canvas.getContext("2d");
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.tall * ratio)];
    this.image ??= new ImageData(width, height);
    paint(this.image, lanes, { ...view, top: view.top * ratio, lane: view.lane * ratio }, colours, this.colourOf);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.putImageData(this.image, Math.round(GUTTER * ratio), Math.round(AXIS * ratio));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.drawAxis(context, colours);
    this.drawNames(context, colours);
    for (const [index, colour] of [
      [this.hovered, colours.soft],
      [this.picked, colours.ink],
    ])
      this.outline(context, index, colour);
    if (this.cursor !== null && this.cursor >= view.from && this.cursor <= view.to) {
      context.fillStyle = colours.ink;
      context.fillRect(this.x(this.cursor) - 1, AXIS - 6, 2, this.tall + 6);
    }
    this.frames++;
    Object.assign(canvas.dataset, { frames: this.frames, from: view.from, to: view.to });
  }

  drawAxis(context, colours) {
    const { view, lanes } = this;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const { step, found } = ticks(view.from, view.to, this.width);
    for (const at of found) {
      const x = this.x(at);
      context.fillStyle = colours.line;
      context.fillRect(x, AXIS - 6, 1, 6);
      const text = time(at, lanes.unit, step);
      if (x + context.measureText(text).width < this.width + GUTTER) {
        context.fillStyle = colours.soft;
        context.fillText(text, x + 3, AXIS / 2 - 1);
      }
    }
    context.fillStyle = colours.soft;
    const every = Math.ceil(16 / view.lane);
    context.textAlign = "right";
    for (let lane = 0; lane < lanes.workers; lane += every) {
      const y = AXIS + lane * view.lane - view.top + Math.min(view.lane, 16) / 2;
      if (y > AXIS + 2 && y < AXIS + this.tall) context.fillText(String(lane), GUTTER - 8, y);
    }
    context.textAlign = "left";
  }

  // Names inside tasks that are wide enough; at most a few hundred fit a screen.
  drawNames(context, colours) {
    const { view, lanes } = this;
    if (view.lane < 14) return;
    const scale = this.width / (view.to - view.from);
    context.font = "11px system-ui, sans-serif";
    const first = Math.floor(view.top / view.lane);
    for (let lane = first; lane < Math.min(lanes.workers, first + this.tall / view.lane + 1); lane++) {
      const y = AXIS + (lane + 0.47) * view.lane - view.top;
      if (y < AXIS + 6) continue;
      for (let i = lanes.after(lane, view.from); i < lanes.first[lane + 1] && lanes.start[i] < view.to; i++) {
        const wide = (lanes.end[i] - lanes.start[i]) * scale;
        if (wide < 30) continue;
        const left = Math.max(this.x(lanes.start[i]), GUTTER);
        const right = Math.min(this.x(lanes.end[i]), GUTTER + this.width);
        const text = wide > 90 ? `${lanes.name[i]} ${lanes.task[i]}` : String(lanes.task[i]);
        if (context.measureText(text).width + 8 > right - left) continue;
        context.fillStyle =
          this.colourOf || isDark(colours.names[lanes.colour[i] % PALETTE.length]) ? "#fff" : "#0b1419";
        context.fillText(text, left + 4, y);
      }
    }
  }

  outline(context, index, colour) {
    if (index < 0) return;
    const { view, lanes } = this;
    const y = AXIS + lanes.worker[index] * view.lane - view.top;
    const [left, right] = [this.x(lanes.wait[index]), this.x(lanes.end[index])];
    if (right < GUTTER || left > GUTTER + this.width || y < AXIS - view.lane || y > AXIS + this.tall) return;
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width, this.tall);
    context.clip();
    context.strokeRect(left, y, Math.max(right - left, 3), Math.max(view.lane - 1, 3));
    context.restore();
  }

  x(at) {
    return GUTTER + ((at - this.view.from) / (this.view.to - this.view.from)) * this.width;
  }

  timeAt(x) {
    return this.view.from + ((x - GUTTER) / this.width) * (this.view.to - this.view.from);
  }

  // ---- the view ----

  set(view, quiet = false) {
    const all = Math.max(this.options.wide ?? this.lanes.makespan, 1e-9);
    let span = Math.max(all / 1e6, Math.min(view.to - view.from, all * 1.02));
    if (!Number.isFinite(span)) span = all;
    const from = Math.max(-0.01 * all, Math.min(view.from, all * 1.01 - span));
    Object.assign(this.view, {
      from,
      to: from + span,
      top: Math.max(0, Math.min(view.top ?? this.view.top, this.most())),
    });
    this.redraw();
    if (!quiet) this.options.onview(this.view);
  }

  pan(pixels, down = 0) {
    const shift = (pixels / this.width) * (this.view.to - this.view.from);
    this.set({ from: this.view.from + shift, to: this.view.to + shift, top: this.view.top + down });
  }

  zoom(factor, x = GUTTER + this.width / 2) {
    const at = this.timeAt(x);
    this.set({ from: at - (at - this.view.from) / factor, to: at + (this.view.to - at) / factor });
  }

  fit() {
    this.set({ from: 0, to: this.options.wide ?? this.lanes.makespan, top: 0 });
  }

  pick(index, reveal = false) {
    this.picked = index;
    if (reveal && index >= 0) this.reveal(index);
    this.redraw();
    this.options.onpick(index);
  }

  reveal(index) {
    const { view, lanes } = this;
    const span = view.to - view.from;
    const y = lanes.worker[index] * view.lane;
    const top = y < view.top ? y : y + view.lane > view.top + this.tall ? y + view.lane - this.tall : view.top;
    const hidden = lanes.end[index] < view.from || lanes.start[index] > view.to;
    const from = hidden ? (lanes.start[index] + lanes.end[index] - span) / 2 : view.from;
    this.set({ from, to: from + span, top });
  }

  // ---- mouse, touch, keys ----

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => {
      this.hovered = -1;
      this.redraw();
    });
    canvas.addEventListener("dblclick", (event) => this.zoom(2, event.offsetX));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  wheel(event) {
    if (!this.lanes) return;
    const unit = event.deltaMode === 1 ? 16 : 1;
    const [dx, dy] =
      event.shiftKey && !event.deltaX ? [event.deltaY * unit, 0] : [event.deltaX * unit, event.deltaY * unit];
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-dy / 300), event.offsetX);
    else if (Math.abs(dx) > Math.abs(dy)) this.pan(dx);
    else if (this.most() > 0 && !(dy < 0 && this.view.top <= 0) && !(dy > 0 && this.view.top >= this.most()))
      this.pan(0, dy);
    else return;
    event.preventDefault();
  }

  down(event) {
    if (!this.lanes) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.moved = this.pointers.size > 1;
  }

  move(event) {
    if (!this.lanes) return;
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      this.hover(event.offsetX, event.offsetY);
      return;
    }
    const now = { x: event.offsetX, y: event.offsetY };
    if (!this.moved && Math.hypot(now.x - before.x, now.y - before.y) < 4) return;
    this.moved = true;
    if (this.pointers.size === 1) this.pan(before.x - now.x, before.y - now.y);
    else {
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const spread = (point) => Math.max(Math.abs(point.x - other.x), 12);
      this.zoom(spread(now) / spread(before), (now.x + other.x) / 2);
      this.pan((before.x - now.x) / 2);
    }
    this.pointers.set(event.pointerId, now);
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId) || this.moved || event.type !== "pointerup") return;
    this.pick(this.find(event.offsetX, event.offsetY));
  }

  hover(x, y) {
    const found = this.find(x, y);
    if (found === this.hovered) return;
    this.hovered = found;
    const { lanes } = this;
    this.canvas.title = found < 0 ? "" : this.describe(found);
    this.redraw();
  }

  describe(index) {
    const { name, task, worker, wait, start, end, unit } = this.lanes;
    const [ran, waited] = [end[index] - start[index], start[index] - wait[index]].map((value) => time(value, unit));
    return `${name[index]} ${task[index]}, worker ${worker[index]}: ran ${ran}, waited ${waited}`;
  }

  find(x, y) {
    if (x < GUTTER || y < AXIS) return -1;
    const slack = (2 * (this.view.to - this.view.from)) / this.width;
    return this.lanes.at(Math.floor((y - AXIS + this.view.top) / this.view.lane), this.timeAt(x), slack);
  }

  key(event) {
    if (!this.lanes || event.ctrlKey || event.metaKey || event.altKey) return;
    const { lanes, picked } = this;
    const page = this.width / 6;
    const next = (step) => this.pick(Math.max(0, Math.min(lanes.length - 1, picked < 0 ? 0 : picked + step)), true);
    const act = {
      ArrowLeft: () => this.pan(-page),
      ArrowRight: () => this.pan(page),
      ArrowUp: () => this.pan(0, -3 * this.view.lane),
      ArrowDown: () => this.pan(0, 3 * this.view.lane),
      "+": () => this.zoom(1.5),
      "=": () => this.zoom(1.5),
      "-": () => this.zoom(1 / 1.5),
      0: () => this.fit(),
      Home: () => this.fit(),
      n: () => next(1),
      p: () => next(-1),
      Escape: () => this.pick(-1),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}
