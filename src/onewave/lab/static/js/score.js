// The score beside the board: loads and stores so far, other orders at the same point, the bound, and the cache.

import { button, h, percent, svg, whole } from "./dom.js";
import { name } from "./model.js";

const COLOURS = { you: "--s1", row: "--s2", snake: "--s3", best: "--s5", bound: "--soft" };

// others: [{label, steps, loads, path}]; best: {label, loads, steps, path, proven}; bound: {name, loads} or null each.
export function drawScore(node, { setting, counted, at, others, best, bound, take }) {
  const tiles = setting.m * setting.n;
  const unit = setting.unit === "panels" ? "panel" : "tile";
  const sofar = at ? counted.steps[at - 1].total : 0;
  const complete = counted.steps.length === tiles;
  const figure = (value, label, id) =>
    h("div", { class: "figure" }, h("b", { id }, whole.format(value)), h("span", {}, label));
  const inTiles = setting.unit === "panels" && setting.k > 1 ? ` (${whole.format(sofar * setting.k)} tiles)` : "";
  const rows = [{ key: "you", label: "you", steps: counted.steps, loads: complete ? counted.loads : null, at }];
  for (const other of others) rows.push({ ...other, key: other.label });
  if (best) rows.push({ ...best, key: "best", label: best.proven ? "best, proven" : `best: ${best.label}` });
  node.replaceChildren(
    h("h2", {}, "Device memory"),
    h(
      "div",
      { class: "figures" },
      figure(sofar, `${unit} loads${inTiles}`, "loads"),
      figure(at, "stores of C", "stores"),
      figure(tiles - at, "tiles left", "left"),
    ),
    complete && at === tiles ? verdict(counted.loads, best, bound) : "",
    chart(rows, bound, tiles, at),
    table(rows, bound, at, take),
  );
}

function verdict(loads, best, bound) {
  const optimal = bound && loads <= bound.loads;
  const proven = best?.proven && loads <= best.loads;
  const text =
    optimal || proven
      ? `${loads} loads: optimal. No order does with fewer.`
      : best && best.loads < loads
        ? `${loads} loads. ${best.loads} are possible.`
        : best
          ? `${loads} loads, as few as any order that is known.`
          : `${loads} loads.`;
  return h("p", { class: `verdict${optimal || proven ? " best" : ""}`, id: "verdict" }, text);
}

function chart(rows, bound, tiles, at) {
  const most = Math.max(1, bound?.loads ?? 0, ...rows.map((row) => row.steps?.at(-1)?.total ?? 0));
  const [width, height] = [360, 100];
  const x = (place) => (place / tiles) * width;
  const y = (loads) => height - (loads / most) * height;
  const line = (steps) =>
    steps.reduce((d, step, i) => `${d}L${x(i + 1).toFixed(1)} ${y(step.total).toFixed(1)}`, `M0 ${height}`);
  const drawn = rows.filter((row) => row.steps).reverse();
  const ends = rows.map((row) => `${row.label}: ${row.steps?.at(-1)?.total ?? row.loads}`);
  const label = `Loads so far against tiles computed. ${ends.join("; ")}`;
  return svg(
    "svg",
    {
      class: "running",
      viewBox: `-2 -4 ${width + 4} ${height + 8}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    bound
      ? svg("path", { class: "bound", style: { "--swatch": "var(--soft)" }, d: `M0 ${y(bound.loads)}H${width}` })
      : null,
    drawn.map((row) =>
      svg("path", {
        class: row.key,
        style: { "--swatch": `var(${COLOURS[row.key]})` },
        d: line(row.key === "you" ? row.steps.slice(0, at) : row.steps),
      }),
    ),
    svg("path", { style: { "--swatch": "var(--edge)" }, "stroke-dasharray": "2 4", d: `M${x(at)} 0V${height}` }),
  );
}

function table(rows, bound, at, take) {
  const gap = (loads) => (bound && loads !== null ? `+${percent(loads / bound.loads - 1)}` : "");
  const swatch = (key) => h("span", { class: "swatch", style: { "--swatch": `var(${COLOURS[key]})` } });
  const body = rows.map((row) =>
    h(
      "tr",
      { class: row.key, "data-row": row.key },
      h(
        "th",
        { scope: "row" },
        swatch(row.key),
        row.path
          ? button(row.label, () => take(row.path), { class: "link", title: "Put this order on the board" })
          : row.label,
      ),
      h("td", { class: "n" }, row.steps ? whole.format(at && row.steps[at - 1] ? row.steps[at - 1].total : 0) : "–"),
      h("td", { class: "n" }, row.loads === null ? "–" : whole.format(row.loads)),
      h("td", { class: "n soft" }, gap(row.loads)),
    ),
  );
  if (bound) {
    body.push(
      h(
        "tr",
        { "data-row": "bound" },
        h("th", { scope: "row" }, swatch("bound"), "lower bound"),
        h("td", { class: "n" }, "–"),
        h("td", { class: "n" }, whole.format(bound.loads)),
        h("td", { class: "n soft" }, bound.name),
      ),
    );
  }
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "score" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "order"),
          h("th", { scope: "col", class: "n" }, "so far"),
          h("th", { scope: "col", class: "n" }, "whole"),
          h("th", { scope: "col", class: "n" }, "over bound"),
        ),
      ),
      h("tbody", {}, body),
    ),
  );
}

const MAX_CHIPS = 120;

export function drawCache(node, { setting, now, slots, order }) {
  const fresh = new Set(now?.loads ?? []);
  const used = new Set(now?.hits ?? []);
  const next = setting.policy !== "belady" && order.length >= setting.slots ? order[0] : null;
  const chip = (id, kind) => h("li", { class: `chip ${name(setting, id)[0]} ${kind}` }, name(setting, id));
  const shown = slots.slice(0, MAX_CHIPS).map((id) => {
    if (id === null) return h("li", { class: "chip empty" }, h("span", { class: "hush" }, "empty"));
    const made = chip(id, (fresh.has(id) ? "loaded" : used.has(id) ? "hit" : "") + (id === next ? " next" : ""));
    const said = [fresh.has(id) ? "loaded now" : used.has(id) ? "hit now" : "", id === next ? "goes next" : ""]
      .filter(Boolean)
      .join(", ");
    if (said) made.append(h("span", { class: "hush" }, ` ${said}`));
    return made;
  });
  const spare = Math.min(Math.max(setting.slots - slots.length, 0), Math.max(MAX_CHIPS - shown.length, 0), 24);
  for (let i = 0; i < spare; i++) shown.push(h("li", { class: "chip empty" }, h("span", { class: "hush" }, "empty")));
  const hidden = order.length - slots.slice(0, MAX_CHIPS).filter((id) => id !== null).length;
  const gone = now?.evictions ?? [];
  const key = (kind, text) => h("li", {}, h("span", { class: `key ${kind}` }), text);
  node.replaceChildren(
    h("h2", {}, `Cache: ${whole.format(order.length)} of ${whole.format(setting.slots)} ${setting.unit}`),
    h(
      "ul",
      { class: "chips", id: "cache", "aria-label": "Cache slots" },
      shown,
      hidden > 0 ? h("li", { class: "soft" }, `and ${whole.format(hidden)} more`) : null,
    ),
    gone.length
      ? h(
          "div",
          { class: "gone" },
          "Evicted:",
          h(
            "ul",
            { class: "chips", id: "evicted", "aria-label": "Evicted by this step" },
            gone.slice(0, 16).map((id) => chip(id, "evicted")),
            gone.length > 16 ? h("li", {}, `and ${gone.length - 16} more`) : null,
          ),
        )
      : "",
    h(
      "ul",
      { class: "keys" },
      key("hit", `hit ${now?.hits.length ?? 0}`),
      key("loaded", `loaded ${now?.loads.length ?? 0}`),
      key("evicted", `evicted ${gone.length}`),
      next === null ? null : key("next", "goes next"),
    ),
  );
}
