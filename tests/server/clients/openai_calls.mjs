// Sixty calls with OpenAI's Node client: node openai_calls.mjs BASE_URL MODEL. Prints their number.
// The client is found in NODE_PATH's way: run it where `npm install openai` was run.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "Say héllo 😀" },
];
const chats = [
  {},
  { temperature: 0 },
  { temperature: 0.7, top_p: 0.5, seed: 1 },
  { n: 3, seed: 2 },
  { stop: "e" },
  { stop: ["qq", "zz"] },
  { logprobs: true },
  { logprobs: true, top_logprobs: 5 },
  { frequency_penalty: 1.5, presence_penalty: -1 },
  { logit_bias: { 5: 2, 6: -100 } },
  { user: "someone", metadata: { a: "b" }, store: false },
  { max_tokens: undefined, max_completion_tokens: 3 },
  { messages: [{ role: "developer", content: "Be kind." }, { role: "user", content: "hi" }] },
  { messages: [{ role: "user", content: [{ type: "text", text: "a" }, { type: "text", text: "b" }] }] },
  { min_p: 0.1, top_k: 4, repetition_penalty: 1.1 },
  { min_tokens: 4, ignore_eos: true },
  { priority: -1, cache_salt: "salt" },
];
const completions = [
  {},
  { temperature: 0 },
  { prompt: ["one", "two", "three"] },
  { prompt: [10, 11, 12] },
  { prompt: [[10, 11], [12]], n: 2, seed: 4 },
  { echo: true },
  { echo: true, logprobs: 2 },
  { logprobs: 5, stop: ["e"] },
  { max_tokens: 0, echo: true, logprobs: 1 },
  { return_token_ids: true },
];
let count = 0;

for (const more of chats) {
  const asked = { model, messages, max_tokens: 8, ...more };
  const whole = await client.chat.completions.create(asked);
  assert.equal(whole.choices.length, asked.n ?? 1);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  const said = whole.choices.map(() => "");
  let usage = null;
  for await (const chunk of stream) {
    for (const choice of chunk.choices) said[choice.index] += choice.delta.content ?? "";
    usage = chunk.usage;
  }
  assert.equal(usage.prompt_tokens, whole.usage.prompt_tokens);
  if (asked.temperature === 0 || "seed" in asked) {
    assert.deepEqual(said, whole.choices.map((choice) => choice.message.content));
  }
  count += 2;
}
for (const more of completions) {
  const asked = { model, prompt: "Once upon", max_tokens: 8, ...more };
  const whole = await client.completions.create(asked);
  const texts = whole.choices.map(() => "");
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  }
  if (asked.temperature === 0 || "seed" in asked || asked.max_tokens === 0) {
    assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
  }
  count += 2;
}
assert.deepEqual((await client.models.list()).data.map((entry) => entry.id), [model]);
assert.equal((await client.models.retrieve(model)).id, model);
const helper = client.chat.completions.stream({ model, messages, max_tokens: 8, temperature: 0 });
let heard = "";
helper.on("content", (delta) => (heard += delta));
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, heard);
const left = await client.chat.completions.create({ model, messages, max_tokens: 64, stream: true });
for await (const chunk of left) {
  assert.ok(chunk);
  break; // which closes the connection
}
for (const [kind, asked] of [
  [OpenAI.NotFoundError, { model: "other", messages }],
  [OpenAI.BadRequestError, { model, messages: [] }],
  [OpenAI.BadRequestError, { model, messages, no_such_field: 1 }],
]) {
  await assert.rejects(client.chat.completions.create(asked), kind);
}
await assert.rejects(client.embeddings.create({ model, input: "text" }), OpenAI.BadRequestError);
console.log(count + 8);
