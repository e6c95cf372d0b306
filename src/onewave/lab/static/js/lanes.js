// A trace as sorted columns, and painting it: every lane is one row of pixels, made once and copied to its height.
// The work of a frame is bounded by what is visible, so it does not grow with the trace.

export const PALETTE = ["--s1", "--s3", "--s5", "--s6", "--s7", "--s9", "--s8", "--s4", "--s2", "--s10"];

export class Lanes {
  // trace: the server's JSON. Columns end up ordered by worker, then start; `source[i]` is the i-th one's place in it.
  constructor(trace) {
    const { worker, wait_start: wait, start, end, task, name, phase } = trace.tasks;
    const count = worker.length;
    this.workers = trace.workers;
    this.unit = trace.unit;
    this.source = Uint32Array.from({ length: count }, (_, i) => i).sort(
      (a, b) => worker[a] - worker[b] || start[a] - start[b] || end[a] - end[b],
    );
    const sorted = (column, Kind) => Kind.from(this.source, (from) => column[from]);
    this.worker = sorted(worker, Int32Array);
    this.wait = sorted(wait ?? start, Float64Array);
    this.start = sorted(start, Float64Array);
    this.end = sorted(end, Float64Array);
    this.task = sorted(task, Float64Array);
    this.name = Array.from(this.source, (from) => name[from] || "task");
    this.phase = Array.from(this.source, (from) => (phase ?? name)[from] || "task");
    this.phases = [...new Set((phase ?? name).map((text) => text || "task"))];
    const place = new Map(this.phases.map((text, i) => [text, i]));
    this.colour = Uint16Array.from(this.phase, (text) => place.get(text));
    this.makespan = this.end.reduce((most, value) => Math.max(most, value), 0);
    this.first = new Uint32Array(this.workers + 1);
    for (const w of this.worker) this.first[w + 1]++;
    for (let w = 0; w < this.workers; w++) this.first[w + 1] += this.first[w];
    // A measured lane may overlap by a tick: the latest end so far stays monotonic.
    this.latest = Float64Array.from(this.end);
    for (let w = 0; w < this.workers; w++) {
      for (let i = this.first[w] + 1; i < this.first[w + 1]; i++)
        this.latest[i] = Math.max(this.latest[i], this.latest[i - 1]);
    }
    this.busy = this.end.reduce((sum, end, i) => sum + end - this.start[i], 0);
    this.waited = this.start.reduce((sum, start, i) => sum + start - this.wait[i], 0);
  }

  get length() {
    return this.worker.length;
  }

  // The first task of a lane that ends after `time`.
  after(lane, time) {
    let [low, high] = [this.first[lane], this.first[lane + 1]];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.latest[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The task at a point of a lane, its wait included, or -1.
  at(lane, time, slack = 0) {
    if (lane < 0 || lane >= this.workers) return -1;
    for (let i = this.after(lane, time - slack); i < this.first[lane + 1] && this.wait[i] <= time + slack; i++)
      return i;
    return -1;
  }

  // Busy workers at `columns` moments, for the overview: 0 to 1 each.
  load(columns) {
    const change = new Float64Array(columns + 1);
    const scale = columns / Math.max(this.makespan, 1e-9);
    for (let i = 0; i < this.length; i++) {
      const [from, to] = [this.start[i] * scale, this.end[i] * scale];
      const [a, b] = [Math.floor(from), Math.min(Math.floor(to), columns - 1)];
      if (a >= b) change[Math.min(a, columns - 1)] += to - from;
      else {
        change[a] += a + 1 - from;
        for (let x = a + 1; x < b; x++) change[x] += 1;
        change[b] += to - b;
      }
    }
    return Array.from(change.subarray(0, columns), (value) => value / this.workers);
  }
}

// "rgb(1, 2, 3)" as one little-endian pixel.
export function pixel(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
  return (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);
}

export const isDark = (colour) => {
  const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b < 140;
};

// Paint lanes into an ImageData. view: {from, to (times), top (pixels scrolled), lane (pixels a lane with its gap)}.
// colours: {paper, idle, wait, tasks: pixels}; `colourOf`, where given, is a pixel per task instead of its phase's.
export function paint(image, lanes, view, colours, colourOf) {
  const { width, height } = image;
  const pixels = new Int32Array(image.data.buffer);
  pixels.fill(colours.paper);
  const scale = width / (view.to - view.from);
  const gap = view.lane >= 6 ? Math.max(1, Math.round(view.lane / 8)) : view.lane >= 3 ? 1 : 0;
  const row = new Int32Array(width);
  const x = (time) => Math.max(0, Math.min(width, Math.round((time - view.from) * scale)));
  const lanesShown = Math.min(lanes.workers, Math.ceil((view.top + height) / view.lane));
  for (let lane = Math.max(0, Math.floor(view.top / view.lane)); lane < lanesShown; lane++) {
    row.fill(colours.paper);
    row.fill(colours.idle, x(0), x(lanes.makespan));
    const last = lanes.first[lane + 1];
    for (let i = lanes.after(lane, view.from); i < last && lanes.wait[i] < view.to; i++) {
      const begin = x(lanes.start[i]);
      if (lanes.wait[i] < lanes.start[i]) row.fill(colours.wait, x(lanes.wait[i]), begin);
      const end = Math.max(begin + 1, x(lanes.end[i]));
      // A seam between neighbours, where there is room for one.
      row.fill(
        colourOf ? colourOf[i] : colours.tasks[lanes.colour[i] % colours.tasks.length],
        begin,
        end - begin >= 4 ? end - 1 : end,
      );
    }
    const from = Math.max(0, Math.round(lane * view.lane - view.top));
    const to = Math.min(height, Math.max(from + 1, Math.round((lane + 1) * view.lane - view.top - gap)));
    for (let y = from; y < to; y++) pixels.set(row, y * width);
  }
}

// Round times for an axis: about one every `room` pixels.
export function ticks(from, to, width, room = 90) {
  const rough = ((to - from) / Math.max(width, 1)) * room;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
  return { step, found };
}

// A time in the trace's unit as people write it.
export function time(value, unit, step = 0) {
  if (unit === "cycles") return `${Math.round(value).toLocaleString("en")} cycles`;
  const ns = unit === "us" ? value * 1000 : value;
  const stepNs = unit === "us" ? step * 1000 : step;
  const [name, size] =
    Math.abs(ns) >= 1e6 ? ["ms", 1e6] : Math.abs(ns) >= 1000 || stepNs >= 1000 ? ["µs", 1000] : ["ns", 1];
  const digits = step
    ? Math.max(0, Math.min(6, Math.ceil(-Math.log10(stepNs / size) - 1e-9)))
    : size === 1
      ? 0
      : Math.abs(ns / size) < 10
        ? 2
        : 1;
  return `${(ns / size).toFixed(digits)} ${name}`;
}
