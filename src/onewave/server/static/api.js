// Asks the server. Events of an answer come as they are read.

async function refused(answer) {
  const text = await answer.text();
  let message = text.slice(0, 300);
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Not this server's words: shown as they are.
  }
  return Object.assign(new Error(message || `status ${answer.status}`), { status: answer.status });
}

function headers(key) {
  return key ? { "content-type": "application/json", authorization: `Bearer ${key}` } : { "content-type": "application/json" };
}

export async function models(key) {
  const answer = await fetch("/v1/models", { headers: headers(key) });
  if (!answer.ok) throw await refused(answer);
  return (await answer.json()).data;
}

// Yields each event's JSON; an event that holds an error ends it.
export async function* chat(body, key, signal) {
  const answer = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(key), body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw await refused(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}
