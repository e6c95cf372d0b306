// How many workers are busy over the whole trace, with a window onto the part that is shown.

import { css, h } from "./dom.js";

export class Overview {
  // slide(from, to): the window was moved to these times.
  constructor(slide) {
    this.slide = slide;
    this.canvas = h("canvas", { class: "overview", "aria-hidden": "true", title: "Busy workers; drag to move" });
    this.lanes = null;
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    window.addEventListener("themechange", () => this.draw());
    const drag = (event) => {
      if (!this.lanes || !(event.buttons & 1)) return;
      const at = (event.offsetX / this.canvas.clientWidth) * this.wide;
      const span = this.to - this.from;
      this.slide(at - span / 2, at + span / 2);
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      drag(event);
    });
    this.canvas.addEventListener("pointermove", drag);
  }

  load(lanes, wide) {
    Object.assign(this, { lanes, wide, from: 0, to: wide });
    this.shape = lanes.load(600);
    this.draw();
  }

  look(from, to) {
    Object.assign(this, { from, to });
    this.draw();
  }

  draw() {
    const { canvas, lanes } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!lanes || !width) return;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const x = (time) => (time / this.wide) * width;
    context.fillStyle = css("--idle-tint");
    context.fillRect(0, 0, x(lanes.makespan), height);
    context.fillStyle = css("--s1");
    const each = x(lanes.makespan) / this.shape.length;
    context.beginPath();
    context.moveTo(0, height);
    this.shape.forEach((share, i) => {
      context.lineTo(i * each, height * (1 - share));
      context.lineTo((i + 1) * each, height * (1 - share));
    });
    context.lineTo(x(lanes.makespan), height);
    context.fill();
    const [left, right] = [Math.max(0, x(this.from)), Math.min(width, x(this.to))];
    context.fillStyle = css("--card");
    context.globalAlpha = 0.65;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    context.strokeStyle = css("--ink");
    context.lineWidth = 2;
    context.strokeRect(left + 1, 1, Math.max(right - left - 2, 2), height - 2);
  }
}
