// What the Decode and the Profile page share: a question in the address, what the server offers for it, and its form.

import { get } from "./api.js";
import { field, h, say } from "./dom.js";
import { remember } from "./route.js";

// A page's question. asked: its values; choices: what the server offers at `path`; publish() writes it into the address.
export class Question {
  constructor(view, path, defaults) {
    Object.assign(this, { view, path, defaults, asked: { ...defaults }, choices: null });
  }

  // Takes the values from an address's query. False where the server has said no.
  async read(query) {
    this.asked = { ...this.defaults };
    for (const [key, value] of new URLSearchParams(query)) if (key in this.defaults) this.asked[key] = value.slice(0, 40);
    try {
      this.choices ??= await get(this.path);
    } catch (error) {
      say(error.message, true);
      return false;
    }
    return true;
  }

  publish = () => remember(this.view, new URLSearchParams(this.asked).toString());

  // inputs: [label, input named as a value]. go() runs once the values are those of the form.
  form(label, inputs, submit, go) {
    const onsubmit = (event) => {
      event.preventDefault();
      for (const [, input] of inputs) this.asked[input.name] = input.value;
      go();
    };
    return h("form", { class: "bar trace-settings", "aria-label": label, onsubmit }, ...inputs.map(([text, input]) => field(text, input)), submit);
  }
}
