// Requests to this router alone, with the key of this tab, and the reader of server-sent events.

const KEY = "octavo-key";

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

// An answer that is an error; status: of HTTP, 0 if there was no answer; retry: the request may succeed later.
export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    this.retry = status === 0 || status === 503;
  }
}

// Calls a path of this origin. Throws HttpError, and AbortError if the signal says so.
export async function call(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(options.headers), redirect: "error", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new HttpError(0, "the router does not answer");
  }
  if (!answer.ok) throw new HttpError(answer.status, await messageOf(answer));
  return answer;
}

async function messageOf(answer) {
  const text = await answer.text().catch(() => "");
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `HTTP ${answer.status}`;
  }
}

// Splits a stream of text into server-sent events: {event, data}. Feed it pieces as they come.
export class EventParser {
  #rest = "";

  push(text) {
    const found = [];
    // An event ends with an empty line; \r\n counts as \n.
    const parts = (this.#rest + text).replaceAll("\r\n", "\n").split("\n\n");
    this.#rest = parts.pop();
    for (const part of parts) {
      const event = { event: "message", data: [] };
      for (const line of part.split("\n")) {
        const colon = line.indexOf(":");
        if (colon <= 0) continue;
        const value = line.slice(colon + 1).replace(/^ /, "");
        if (line.startsWith("data:")) event.data.push(value);
        else if (line.startsWith("event:")) event.event = value;
      }
      if (event.data.length) found.push({ event: event.event, data: event.data.join("\n") });
    }
    return found;
  }
}

// Yields the events of an answer. Throws HttpError if the stream breaks. silence: milliseconds after which one that
// says nothing, not even a comment, counts as broken.
export async function* events(answer, silence = 0) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await (silence ? before(reader.read(), silence) : reader.read());
      if (done) return;
      yield* parser.push(value);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof HttpError) throw error;
    throw new HttpError(0, "the connection to the router broke");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function before(promise, milliseconds) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new HttpError(0, "the router is silent")), milliseconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

export function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
