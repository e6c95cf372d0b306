// What the settings say, kept from visit to visit; the key only as long as the tab.

const FIELDS = { temperature: 0.7, max_tokens: "", top_p: "", top_k: "", min_p: "", seed: "", system: "" };
const STORED = "onewave.settings", KEY = "onewave.key";

export function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // Storage that is forbidden, or another's words.
  }
}

export function save(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // Forbidden or full: the page works, and forgets.
  }
}

export class Settings {
  constructor(dialog) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    this.fill({ ...FIELDS, ...load(STORED, {}) });
    try {
      this.form.key.value = sessionStorage.getItem(KEY) ?? "";
    } catch {
      // As above.
    }
    dialog.querySelector("#reset").addEventListener("click", () => this.fill(FIELDS));
    dialog.addEventListener("close", () => this.keep());
    dialog.addEventListener("click", (event) => event.target === dialog && this.form.reportValidity() && dialog.close());
  }

  fill(values) {
    for (const name of Object.keys(FIELDS)) this.form[name].value = values[name];
  }

  keep() {
    save(STORED, Object.fromEntries(Object.keys(FIELDS).map((name) => [name, this.form[name].value])));
    try {
      sessionStorage.setItem(KEY, this.key);
    } catch {
      // As above.
    }
  }

  get key() {
    return this.form.key.value.trim();
  }

  get system() {
    return this.form.system.value.trim();
  }

  // The fields of a request; those left empty, or wrong after Esc, are the server's to choose.
  get sampling() {
    const numbers = Object.keys(FIELDS).filter((name) => name !== "system");
    const given = numbers.filter((name) => this.form[name].value !== "" && this.form[name].validity.valid);
    return Object.fromEntries(given.map((name) => [name, Number(this.form[name].value)]));
  }

  open(focus) {
    this.dialog.showModal();
    if (focus) this.form[focus].focus();
  }
}
