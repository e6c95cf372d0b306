// The conversation: kept in the browser, sent whole with each message, drawn as it comes.

import { chat, models } from "./api.js";
import { Settings, load, save } from "./settings.js";

const at = (id) => document.getElementById(id);
const STORED = "onewave.talk";
const settings = new Settings(at("settings"));
const talk = load(STORED, []);
let name = null, running = null;

function made(tag, kind, text = "") {
  const found = document.createElement(tag);
  found.className = kind;
  found.textContent = text;
  return found;
}

function button(text, act) {
  const found = made("button", "", text);
  found.type = "button";
  found.addEventListener("click", act);
  return found;
}

// Text with its fenced code as blocks. Nothing a model says becomes HTML.
function fill(box, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  box.replaceChildren(...parts.map((part, index) => (index % 2 ? made("pre", "", part) : document.createTextNode(part))));
}

function figures(said) {
  const found = [];
  if (said.stopped) found.push("stopped");
  if (said.reason === "length") found.push("cut off");
  if (said.tokens) found.push(`${said.tokens} token${said.tokens === 1 ? "" : "s"}`);
  if (said.rate) found.push(`${said.rate.toFixed(1)} tokens/s`);
  if (said.first) found.push(`first after ${Math.round(said.first)} ms`);
  if (said.prompt) found.push(`prompt ${said.prompt}, ${said.cached ?? 0} cached`);
  return found;
}

function draw(said) {
  const item = made("li", said.role);
  if (said.role === "user") {
    item.append(made("div", "text", said.content));
    return item;
  }
  item.classList.toggle("running", said === running?.said);
  if (said.thoughts) {
    const thoughts = document.createElement("details");
    thoughts.append(made("summary", "", "Reasoning"), made("div", "text", said.thoughts));
    item.append(thoughts);
  }
  const text = made("div", "text"), foot = made("div", "foot");
  fill(text, said.content);
  foot.append(...figures(said).map((part) => made("span", "", part)));
  if (said !== running?.said) {
    foot.append(button("Copy", () => navigator.clipboard.writeText(said.content)));
    if (said === talk.at(-1)) foot.append(button("Again", again));
  }
  item.append(text, foot);
  return item;
}

function show() {
  at("talk").replaceChildren(...talk.map(draw));
  at("empty").hidden = talk.length > 0;
  at("send").hidden = running !== null;
  at("stop").hidden = running === null;
  at("talk").setAttribute("aria-busy", String(running !== null));
  follow(true);
}

// Only the answer that comes is drawn anew; the view follows unless it was scrolled up.
function update(said) {
  const near = isNear(), item = at("talk").lastElementChild, before = item.querySelector("details")?.open;
  const fresh = draw(said);
  if (before) fresh.querySelector("details").open = true;
  item.replaceWith(fresh);
  follow(near);
}

function isNear() {
  const main = document.querySelector("main");
  return main.scrollHeight - main.scrollTop - main.clientHeight < 80;
}

function follow(near) {
  const main = document.querySelector("main");
  if (near) main.scrollTop = main.scrollHeight;
}

function complain(error) {
  at("error").textContent = error ? error.message : "";
  at("error").hidden = !error;
  if (error?.status === 401) settings.open("key");
  else if (error) at("error").scrollIntoView({ block: "end" });
}

async function find() {
  try {
    name = (await models(settings.key))[0].id;
    at("model").textContent = name;
    document.title = `${name}, onewave chat`;
    complain(null);
  } catch (error) {
    complain(error);
  }
}

function request() {
  const messages = talk.slice(0, -1).map(({ role, content }) => ({ role, content }));
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  return { model: name, messages, stream: true, stream_options: { include_usage: true }, ...settings.sampling };
}

// Answers what the last message of the user asks.
async function answer() {
  const said = { role: "assistant", content: "", thoughts: "" }, stop = new AbortController();
  talk.push(said);
  running = { said, stop };
  complain(null);
  show();
  const began = performance.now();
  let first = 0, last = 0, frame = 0;
  const redraw = () => { frame = 0; update(said); };
  try {
    for await (const event of chat(request(), settings.key, stop.signal)) {
      for (const { delta, finish_reason } of event.choices) {
        const text = delta.content ?? "", thought = delta.reasoning_content ?? "";
        said.reason = finish_reason ?? said.reason;
        if (!text && !thought) continue;
        said.content += text;
        said.thoughts += thought;
        last = performance.now();
        first ||= last;
        said.first = first - began;
        said.tokens = (said.tokens ?? 0) + 1;
        said.rate = said.tokens > 1 ? (1000 * (said.tokens - 1)) / (last - first) : 0;
      }
      if (event.usage) {
        said.tokens = event.usage.completion_tokens;
        said.prompt = event.usage.prompt_tokens;
        said.cached = event.usage.prompt_tokens_details?.cached_tokens;
        said.rate = said.tokens > 1 ? (1000 * (said.tokens - 1)) / Math.max(last - first, 1) : 0;
      }
      frame ||= requestAnimationFrame(redraw);
    }
  } catch (error) {
    if (stop.signal.aborted) said.stopped = true;
    else complain(error);
  }
  cancelAnimationFrame(frame);
  if (running?.said !== said) return; // A new conversation has begun.
  running = null;
  if (!said.content && !said.thoughts && !said.tokens) {
    // Nothing came: the message may be changed and sent again.
    talk.pop();
    at("text").value ||= talk.pop().content;
  }
  save(STORED, talk);
  show();
}

async function send(event) {
  event?.preventDefault();
  const text = at("text").value;
  if (running || !text.trim()) return;
  if (name === null) await find();
  if (name === null) return;
  talk.push({ role: "user", content: text });
  at("text").value = "";
  save(STORED, talk);
  await answer();
}

function again() {
  if (running) return;
  talk.pop();
  answer();
}

function halt() {
  running?.stop.abort();
}

at("ask").addEventListener("submit", send);
at("stop").addEventListener("click", () => { halt(); at("text").focus(); });
at("open-settings").addEventListener("click", () => settings.open());
at("settings").addEventListener("close", find);
at("new").addEventListener("click", () => {
  halt();
  running = null;
  talk.length = 0;
  save(STORED, talk);
  complain(null);
  show();
  at("text").focus();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !at("settings").open) halt();
});
show();
find();
