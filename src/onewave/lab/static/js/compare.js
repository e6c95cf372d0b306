// What a trace says in tables, and what two traces say about each other.

import { post } from "./api.js";
import { button, css, h, table, whole } from "./dom.js";
import { PALETTE, pixel, time } from "./lanes.js";

const MAX_PHASES = 40;
const MAX_TASKS = 6;

// Fill `node` with a trace's phases.
export function showPhases(node, lanes, title) {
  const rows = lanes.phases.map((phase) => ({ phase, tasks: 0, busy: 0, waited: 0, first: Infinity, last: 0 }));
  for (let i = 0; i < lanes.length; i++) {
    const row = rows[lanes.colour[i]];
    row.tasks++;
    row.busy += lanes.end[i] - lanes.start[i];
    row.waited += lanes.start[i] - lanes.wait[i];
    row.first = Math.min(row.first, lanes.start[i]);
    row.last = Math.max(row.last, lanes.end[i]);
  }
  const swatch = (i) => h("span", { class: "swatch", style: { "--swatch": `var(${PALETTE[i % PALETTE.length]})` } });
  const shown = rows.slice(0, MAX_PHASES).map((row, i) => {
    const times = [row.busy / row.tasks, row.waited / row.tasks, row.first, row.last];
    return { head: [swatch(i), row.phase], cells: [whole.format(row.tasks), ...times.map((t) => time(t, lanes.unit))] };
  });
  const more = rows.length - shown.length;
  node.replaceChildren(
    h("h2", {}, title),
    table(["phase", "tasks", "mean run", "mean wait", "first start", "last end"], shown),
    more > 0 ? h("p", { class: "soft" }, `and ${more} phases more`) : "",
  );
}

// Fill `node` with how b differs from a, phase by phase, and the tasks that differ most; pick(index) shows one of b's.
export async function showDifferences(node, a, b, pick) {
  node.replaceChildren(h("h2", {}, "B against A"));
  let found;
  try {
    found = await post("/api/compare", { a: a.trace, b: b.trace });
  } catch (error) {
    node.append(h("p", { class: "bad" }, error.message));
    return;
  }
  // Sums of the same times in another order differ in their last digits.
  const noise = 1e-9 * Math.max(a.lanes.busy, b.lanes.busy);
  const signed = (value) => {
    if (Math.abs(value) <= noise) return "same";
    return `${value < 0 ? "−" : "+"}${time(Math.abs(value), a.trace.unit)}`;
  };
  const rows = found.phases.map((row) => ({
    head: row.phase,
    kind: row.phase === "total" ? "you" : "",
    cells: [
      row.busy_ratio === null ? "–" : `${row.busy_ratio.toFixed(3)} ×`,
      signed(row.b_busy - row.a_busy),
      signed(row.b_waited - row.a_waited),
      signed(row.b_span - row.a_span),
    ],
  }));
  const changes = [];
  b.lanes.task.forEach((task, index) => {
    const twin = a.byTask.get(task);
    if (twin !== undefined) changes.push([index, runOf(b.lanes, index) - runOf(a.lanes, twin)]);
  });
  changes.sort((x, y) => Math.abs(y[1]) - Math.abs(x[1]));
  const worth = changes.slice(0, MAX_TASKS).filter(([, change]) => Math.abs(change) > noise);
  const title = worth.length
    ? "Tasks whose run time differs most"
    : `${whole.format(changes.length)} tasks in common, none runs longer or shorter.`;
  const entry = ([index, change]) => {
    const name = `${b.lanes.name[index]} ${b.lanes.task[index]}`;
    return h(
      "li",
      {},
      button(name, () => pick(index), { class: "link" }),
      ` ${signed(change)}`,
    );
  };
  node.replaceChildren(
    h("h2", {}, "B against A"),
    table(["phase", "run, B / A", "run", "wait", "span"], rows),
    h("h3", { class: "above" }, title),
    h("ul", { class: "plain" }, worth.map(entry)),
  );
}

const runOf = (lanes, index) => lanes.end[index] - lanes.start[index];

// A pixel for each of b's tasks: blue where it is faster (or begins earlier) than in a, orange where it is slower
// (later), grey where they agree or a has no such task. kind: "run" or "begin"; null for "phase".
export function shades(a, b, kind) {
  if (kind === "phase") return null;
  const numbers = (name) =>
    css(name)
      .match(/[\d.]+/g)
      .map(Number);
  const [less, same, more] = ["--s6", "--soft", "--s2"].map(numbers);
  const shade = (part) => {
    const to = part < 0 ? less : more;
    const share = Math.min(1, Math.abs(part));
    return pixel(`rgb(${same.map((value, i) => value + (to[i] - value) * share).join(",")})`);
  };
  const { lanes } = b;
  const far = Math.max(0.2 * a.lanes.makespan, 1e-9);
  return Int32Array.from(lanes.task, (task, i) => {
    const twin = a.byTask.get(task);
    if (twin === undefined) return shade(0);
    if (kind === "begin") return shade((lanes.start[i] - a.lanes.start[twin]) / far);
    const [before, after] = [runOf(a.lanes, twin), runOf(lanes, i)];
    // Twice or half the time takes the full colour.
    return shade(before > 0 && after > 0 ? Math.log2(after / before) : Math.sign(after - before));
  });
}
