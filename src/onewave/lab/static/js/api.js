// Questions to the server. Every failure becomes an Error whose message a person can read.

async function answer(request) {
  let response;
  try {
    response = await request;
  } catch {
    throw new Error("The lab's server does not answer. Is `onewave lab` still running?");
  }
  const body = await response.json().catch(() => ({ error: `answer ${response.status} is not JSON` }));
  if (!response.ok) throw new Error(body.error ?? `answer ${response.status}`);
  return body;
}

export const get = (path, query = {}) => answer(fetch(`${path}?${new URLSearchParams(query)}`));
export const postText = (path, body) =>
  answer(fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body }));
export const post = (path, body) => postText(path, JSON.stringify(body));
