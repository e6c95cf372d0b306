// A game's order as a file: what Export saves, what `onewave tiles search ... --json` prints, and reading either back.

import { DEFAULTS, POLICIES, problem } from "./model.js";

export function writeOrder(setting, path, loads) {
  const file = { name: "explicit", rows: setting.m, cols: setting.n, order: path, setting, loads };
  return `${JSON.stringify(file)}\n`;
}

// Returns {setting, path}; throws an Error that says what is wrong.
export function readOrder(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("malformed JSON; expected an order as Export saves it");
  }
  const { rows, cols, order } = file ?? {};
  if (!Array.isArray(order)) throw new Error('no "order", a list of [row, column]');
  const given = { ...file.setting, m: rows, n: cols };
  given.slots ??= file.cache_panels;
  given.policy ??= file.policy;
  const setting = { ...DEFAULTS };
  for (const key of ["m", "n", "k", "slots"]) if (given[key] !== undefined) setting[key] = given[key];
  if (["panels", "tiles"].includes(given.unit)) setting.unit = given.unit;
  if (given.policy in POLICIES) setting.policy = given.policy;
  const wrong = problem(setting);
  if (wrong) throw new Error(wrong);
  const seen = new Set();
  for (const tile of order) {
    const [row, col] = Array.isArray(tile) ? tile : [];
    const inside = [row, col].every(Number.isInteger) && row >= 0 && col >= 0 && row < setting.m && col < setting.n;
    const name = JSON.stringify(tile)?.slice(0, 40);
    if (!inside) throw new Error(`tile ${name} is outside the ${setting.m} x ${setting.n} grid`);
    if (seen.has(row * setting.n + col)) throw new Error(`tile ${name} comes twice`);
    seen.add(row * setting.n + col);
  }
  return { setting, path: order.map(([row, col]) => [row, col]) };
}
