// The tile game's rules, without a page: what a path of C tiles finds in the cache, loads and evicts.
//
// A setting is {m, n, k, slots, unit, policy}. unit "panels": a tile of C needs row panel A<i> and column panel B<j>.
// unit "tiles": it walks along K and needs A<i>,<k> and B<k>,<j> at each step. What one step touches is never evicted
// by that step. C's accumulator is in registers; a finished tile is stored once. A test holds these counts to the
// simulator's.

export const POLICIES = { lru: "LRU", fifo: "FIFO", belady: "Belady (sees ahead)" };

export const name = (setting, id) => {
  const { m, n, k, unit } = setting;
  if (unit === "panels") return id < m ? `A${id}` : `B${id - m}`;
  if (id < m * k) return `A${Math.floor(id / k)},${id % k}`;
  const rest = id - m * k;
  return `B${Math.floor(rest / n)},${rest % n}`;
};

// What one tile of C touches, step by step: pairs of ids.
export function touches(setting, [row, col]) {
  const { m, n, k, unit } = setting;
  if (unit === "panels") return [[row, m + col]];
  return Array.from({ length: k }, (_, step) => [row * k + step, m * k + step * n + col]);
}

// Play a path. Returns {steps, loads, hits, stores}: per tile its hits, loads, evictions (ids) and the loads so far.
// Belady sees the whole path.
export function play(setting, path) {
  const stream = path.flatMap((tile) => touches(setting, tile).flat());
  const next = setting.policy === "belady" ? nextUses(stream) : null;
  const resident = new Map(); // id -> when next used (belady); insertion order is age (fifo) or recency (lru)
  const steps = [];
  let place = 0;
  let loads = 0;
  let hits = 0;
  for (const tile of path) {
    const step = { tile, hits: [], loads: [], evictions: [] };
    for (const pair of touches(setting, tile)) {
      for (const id of pair) {
        const pinned = id === pair[0] ? null : pair[0];
        if (resident.has(id)) {
          step.hits.push(id);
          if (setting.policy === "lru") resident.delete(id);
        } else {
          step.loads.push(id);
          if (resident.size >= setting.slots) {
            const gone = victim(resident, pinned, setting.policy);
            resident.delete(gone);
            step.evictions.push(gone);
          }
        }
        resident.set(id, next ? next[place] : 0);
        place++;
      }
    }
    loads += step.loads.length;
    hits += step.hits.length;
    steps.push(Object.assign(step, { total: loads }));
  }
  return { steps, loads, hits, stores: path.length };
}

// The cache after the first `at` steps: slots (an id or null each; nothing moves while it stays resident) and order
// (ids, whatever LRU or FIFO would evict first coming first).
export function cacheAt(setting, steps, at) {
  const slotOf = new Map();
  const free = [];
  let used = 0;
  for (const step of steps.slice(0, at)) {
    const evictions = step.evictions.values();
    for (const id of touches(setting, step.tile).flat()) {
      let slot = slotOf.get(id);
      if (slot === undefined) {
        if (slotOf.size >= setting.slots) {
          const gone = evictions.next().value;
          free.push(slotOf.get(gone));
          slotOf.delete(gone);
        }
        slot = free.pop() ?? used++;
      } else if (setting.policy === "lru") slotOf.delete(id);
      slotOf.set(id, slot);
    }
  }
  const slots = new Array(Math.min(setting.slots, Math.max(used, 1))).fill(null);
  for (const [id, slot] of slotOf) slots[slot] = id;
  return { slots, order: [...slotOf.keys()] };
}

// Who goes. The first of a pair stays while the second comes in.
function victim(resident, pinned, policy) {
  let chosen = null;
  let latest = -1;
  for (const [id, use] of resident) {
    if (id === pinned) continue;
    if (policy !== "belady") return id;
    if (use > latest) [chosen, latest] = [id, use];
  }
  return chosen;
}

// For each access when its id is next touched; after the end, ordered by id, where it never is.
function nextUses(stream) {
  const next = new Array(stream.length);
  const seen = new Map();
  for (let place = stream.length - 1; place >= 0; place--) {
    next[place] = seen.get(stream[place]) ?? stream.length + stream[place];
    seen.set(stream[place], place);
  }
  return next;
}

// One step in words.
export function explain(setting, steps, index) {
  const step = steps[index];
  if (!step) return "Nothing computed yet. Choose a tile of C to begin.";
  const kind = setting.unit === "panels" ? "panel" : "tile";
  const list = (ids) => {
    const names = ids.slice(0, 6).map((id) => name(setting, id));
    return names.join(", ") + (ids.length > 6 ? ` and ${ids.length - 6} more` : "");
  };
  const [row, col] = step.tile;
  const needs =
    setting.unit === "panels" ? `row panel A${row} and column panel B${col}` : `A${row},k and Bk,${col} for every k`;
  const said = [`C(${row}, ${col}) needs ${needs}.`];
  if (step.hits.length) said.push(`In the cache already: ${list(step.hits)}.`);
  if (step.loads.length)
    said.push(
      `Loaded from memory: ${list(step.loads)}, ${step.loads.length} ${kind}${step.loads.length > 1 ? "s" : ""}.`,
    );
  else said.push("Nothing had to be loaded: a free step.");
  if (step.evictions.length) {
    const why = {
      lru: "touched longest ago",
      fifo: "loaded longest ago",
      belady: "needed latest, or never again, on this path",
    }[setting.policy];
    said.push(`The cache was full, so ${list(step.evictions)} had to go (${why}).`);
    const again = steps.slice(index + 1).find((later) => later.loads.some((id) => step.evictions.includes(id)));
    if (again) said.push(`That costs a load again at C(${again.tile.join(", ")}).`);
  }
  const shared =
    index > 0 && (steps[index - 1].tile[0] === row ? "row" : steps[index - 1].tile[1] === col ? "column" : "");
  if (shared) said.push(`It shares its ${shared} with the tile before.`);
  else if (index > 0) said.push("It shares neither row nor column with the tile before.");
  return said.join(" ");
}

const LIMITS = { m: [1, 64], n: [1, 64], k: [1, 64], slots: [2, 100000] };
export const DEFAULTS = { m: 3, n: 3, k: 1, slots: 3, unit: "panels", policy: "lru" };

// A message where a setting can't be played, else "".
export function problem(setting) {
  for (const [key, [least, most]] of Object.entries(LIMITS)) {
    const value = setting[key];
    if (!Number.isInteger(value) || value < least || value > most) {
      const label = { m: "M", n: "N", k: "K", slots: "Cache slots" }[key];
      return `${label} must be a whole number from ${least} to ${most.toLocaleString("en")}.`;
    }
  }
  return 2 * setting.m * setting.n * setting.k > 400000 ? "M × N × K must stay within 200,000 tiles." : "";
}

// The game as text for a link, and back; anything malformed falls back to the defaults, with a note.
export const encode = (setting, path) =>
  new URLSearchParams({
    ...setting,
    path: path.map(([row, col]) => (row * setting.n + col).toString(36)).join("."),
  }).toString();

export function decode(text) {
  const query = new URLSearchParams(text);
  const setting = { ...DEFAULTS };
  for (const key of Object.keys(LIMITS)) if (query.has(key)) setting[key] = Number(query.get(key));
  if (["panels", "tiles"].includes(query.get("unit"))) setting.unit = query.get("unit");
  if (query.get("policy") in POLICIES) setting.policy = query.get("policy");
  const wrong = problem(setting);
  if (wrong) return { setting: { ...DEFAULTS }, path: [], note: `The link's game can't be played: ${wrong}` };
  const seen = new Set();
  const path = [];
  for (const part of (query.get("path") ?? "").split(".").filter(Boolean)) {
    const tile = /^[0-9a-z]{1,4}$/.test(part) ? parseInt(part, 36) : -1;
    if (tile < 0 || tile >= setting.m * setting.n || seen.has(tile)) {
      return { setting, path: [], note: "The link's path does not fit its grid, so the game starts empty." };
    }
    seen.add(tile);
    path.push([Math.floor(tile / setting.n), tile % setting.n]);
  }
  return { setting, path, note: "" };
}
