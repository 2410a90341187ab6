// The chat: streams an answer, stops it, makes it again, and goes on where it was when the router comes back.

import { Attachments } from "./attachments.js";
import { el, number, seconds, setText, visible } from "./dom.js";
import { Answer, Splitter } from "./fold.js";
import { call, events, HttpError, pause } from "./net.js";

// Seconds for which a lost answer is asked for again.
const PATIENCE = 120;
// Times that the router may say that it failed.
const MOST_FAILURES = 4;
const SETTINGS = [
  ["temperature", "number", "0.7", "0: always the most likely token"],
  ["top_p", "number", "", "1: all tokens"],
  ["top_k", "number", "", "0: all tokens"],
  ["max_tokens", "number", "512", "at most"],
  ["seed", "number", "", "empty: another one each time"],
  ["stop", "text", "", "the output ends before this text"],
];

export class Chat {
  #messages = [];
  #turn = null;
  #abort = null;
  #isSending = false;

  constructor(root, { onRequest }) {
    this.onRequest = onRequest;
    this.log = el("div", { class: "log", role: "log", "aria-live": "off", tabindex: "0", "aria-label": "Conversation" });
    this.input = el("textarea", { rows: "2", placeholder: "Ask something", "aria-label": "Message" });
    this.send = el("button", { class: "primary", title: "Enter" }, "Send");
    this.stop = el("button", { type: "button", title: "Esc", disabled: true, onclick: () => this.#abort?.abort() }, "Stop");
    this.again = el("button", { type: "button", disabled: true, onclick: () => this.#regenerate() }, "Regenerate");
    this.clear = el("button", { type: "button", onclick: () => this.#clear() }, "New chat");
    this.tip = new Tip();
    this.images = new Attachments(root, { held: () => this.#held(), leave: () => this.input.focus() });
    const row = el("div", { class: "row" }, this.send, this.stop, this.again, this.clear, this.images.button);
    const form = el("form", { class: "composer" }, this.images.element, this.input, row);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#submit();
      }
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#abort?.abort();
    });
    root.append(this.#settings(), this.log, form, this.tip.element);
  }

  #settings() {
    this.fields = {};
    const grid = el("div", { class: "grid" });
    for (const [name, type, value, title] of SETTINGS) {
      const field = el("input", { type, value, title, step: "any", name });
      this.fields[name] = field;
      grid.append(el("label", {}, name, field));
    }
    this.system = el("textarea", { rows: "2" });
    this.tools = el("textarea", { rows: "3", placeholder: '[{"type": "function", "function": {"name": ...}}]', spellcheck: "false" });
    this.likely = el("input", { type: "checkbox", checked: true });
    return el(
      "details", { class: "settings" }, el("summary", {}, "Settings"), grid,
      el("label", {}, "System message", this.system), el("label", {}, "Tools (JSON)", this.tools),
      el("label", { class: "check" }, this.likely, "Show how likely each token was"),
    );
  }

  // Returns the body of a request. Throws Error for settings that can't be read.
  #body(seed) {
    const body = { model: "", stream: true, stream_options: { include_usage: true }, seed };
    for (const [name, type] of SETTINGS) {
      const value = this.fields[name].value.trim();
      if (value && name !== "seed") body[name] = type === "number" ? Number(value) : value;
    }
    if (this.likely.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    if (this.tools.value.trim()) {
      try {
        body.tools = JSON.parse(this.tools.value);
      } catch (error) {
        throw new Error(`Tools: ${error.message}`);
      }
    }
    const system = this.system.value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#messages];
    return body;
  }

  async #submit() {
    const text = this.input.value.trim();
    if (!(text || this.images.length) || this.#abort || this.#isSending) return;
    this.#isSending = true;
    this.input.value = "";
    const images = await this.images.take();
    this.#isSending = false;
    const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    if (parts.length && text) parts.push({ type: "text", text });
    this.#messages.push({ role: "user", content: parts.length ? parts : text });
    const shown = el("article", { class: "user" }, el("h3", {}, "You"));
    if (images.length) shown.append(el("div", { class: "images" }, ...images.map(({ picture }) => picture)));
    if (text) shown.append(el("div", { class: "text" }, text));
    this.log.append(shown);
    this.#answer();
  }

  // {count, bytes} of the images in the chat: base64 takes four bytes for three.
  #held() {
    const urls = this.#messages.flatMap(({ content }) => (Array.isArray(content) ? content : [])).flatMap((part) => part.image_url?.url ?? []);
    return { count: urls.length, bytes: urls.reduce((sum, url) => sum + Math.floor((url.length * 3) / 4), 0) };
  }

  #regenerate() {
    if (this.#abort || !this.#turn) return;
    if (this.#messages.at(-1)?.role === "assistant") this.#messages.pop();
    this.#turn.element.remove();
    this.#answer();
  }

  #clear() {
    this.#abort?.abort();
    this.#messages = [];
    this.#turn = null;
    this.log.replaceChildren();
    this.again.disabled = true;
    this.input.focus();
  }

  async #answer() {
    const turn = (this.#turn = new Turn(this.tip, this.onRequest));
    const messages = this.#messages;
    this.log.append(turn.element);
    this.log.scrollTop = this.log.scrollHeight;
    turn.follow = this.log;
    const abort = (this.#abort = new AbortController());
    this.stop.disabled = false;
    this.send.disabled = this.again.disabled = true;
    try {
      const given = this.fields.seed.value.trim();
      await this.#stream(turn, this.#body(given ? Number(given) : random(2 ** 31)), abort.signal);
      turn.end("");
    } catch (error) {
      turn.end(error.name === "AbortError" ? "stopped" : "", error.name === "AbortError" ? "" : error.message);
    }
    if (turn.shown.length && messages === this.#messages) this.#messages.push(turn.shown.message);
    this.#abort = null;
    this.stop.disabled = true;
    this.send.disabled = this.again.disabled = false;
  }

  // Streams an answer. With its seed the same request gives the same tokens: if the router is lost, the page asks
  // again, and shows the new answer from where the old one ended.
  async #stream(turn, body, signal) {
    const until = Date.now() + 1000 * PATIENCE;
    let failures = 0;
    for (let attempt = 0; ; attempt += 1) {
      try {
        await this.#attempt(turn, body, attempt, signal);
        return;
      } catch (error) {
        if (error.told) failures += 1;
        if (!error.retry || failures > MOST_FAILURES || Date.now() > until) throw error;
        turn.note(`${error.message}; goes on when it is back`);
        await pause(Math.min(250 * 2 ** attempt, 2000));
        if (signal.aborted) throw new DOMException("stopped", "AbortError");
      }
    }
  }

  async #attempt(turn, body, attempt, signal) {
    turn.id = `${hex(8)}${attempt ? `-${attempt}` : ""}`;
    const answer = await call("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "content-type": "application/json", "x-request-id": turn.id },
      signal,
    });
    const fold = new Answer();
    for await (const { data } of events(answer)) {
      if (data === "[DONE]") {
        turn.show(fold);
        return;
      }
      const chunk = JSON.parse(data);
      // The router stops, or has lost all replicas for too long: it may be back soon.
      if (chunk.error?.type === "server_error") throw Object.assign(new HttpError(503, chunk.error.message), { told: true });
      fold.take(chunk);
      if (fold.length >= turn.shown.length) turn.show(fold);
    }
    throw new HttpError(0, "the answer broke off");
  }
}

// One answer on the page.
class Turn {
  shown = new Answer();
  follow = null;
  #splitter = new Splitter();
  #drawn = null;
  #frame = 0;
  #began = performance.now();
  #first = 0;

  constructor(tip, onRequest) {
    this.tip = tip;
    this.onRequest = onRequest;
    this.tokens = el("span");
    this.rest = document.createTextNode("");
    this.thoughts = el("div", { class: "text" });
    this.reasoning = el("details", { hidden: true, class: "reasoning" }, el("summary", {}, "Reasoning"), this.thoughts);
    this.body = el("div", { class: "text answer", tabindex: "0", "aria-label": "Answer; arrow keys show how likely its tokens were" });
    this.body.append(this.tokens, this.rest);
    this.calls = el("div");
    this.meta = el("div", { class: "meta" });
    this.error = el("div", { class: "error", role: "alert" });
    this.element = el("article", { class: "model" }, el("h3", {}, "Answer"), this.reasoning, this.body, this.calls, this.error, this.meta);
    this.body.addEventListener("pointerover", (event) => this.#tell(event.target));
    this.body.addEventListener("pointerleave", () => this.tip.hide());
    this.body.addEventListener("blur", () => this.tip.hide());
    this.body.addEventListener("keydown", (event) => this.#move(event));
  }

  // Shows an answer at the next frame.
  show(answer) {
    if (!this.#first && answer.length) this.#first = performance.now();
    this.shown = answer;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
    // A hidden page has no frames.
    if (document.hidden) this.#draw();
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const answer = this.shown;
    const log = this.follow;
    const atEnd = log && log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (this.#drawn !== answer) {
      this.#drawn = answer;
      this.#splitter = new Splitter();
      this.tokens.replaceChildren();
    }
    const made = this.#splitter.take(answer.text, answer.tokens).map(({ text, token }) => {
      const span = el("span", { class: `token p${grade(token.logprob)}` }, text);
      span.token = token;
      return span;
    });
    this.tokens.append(...made);
    this.rest.data = visible(answer.text.slice(this.#splitter.at));
    this.reasoning.hidden = !answer.reasoning;
    setText(this.thoughts, answer.reasoning);
    const calls = answer.calls.filter(Boolean);
    while (this.calls.children.length < calls.length) this.calls.append(el("pre", { class: "call" }));
    calls.forEach((each, i) => setText(this.calls.children[i], `${each.name}(${each.arguments})`));
    this.#tellRate();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  #tellRate(state = "") {
    const { usage, finish, tokens } = this.shown;
    const count = usage?.completion_tokens ?? tokens.length;
    const spent = ((this.ended ?? performance.now()) - this.#first) / 1000;
    const parts = [];
    if (this.#first) parts.push(`first token after ${seconds((this.#first - this.#began) / 1000)}`);
    if (count > 1 && spent > 0) parts.push(`${number(count)} tokens, ${number((count - 1) / spent)} a second`);
    if (usage?.prompt_tokens_details?.cached_tokens) parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens cached`);
    if (state || finish) parts.push(state || finish);
    setText(this.meta, parts.join(" · "));
  }

  note(text) {
    setText(this.meta, text);
  }

  // Ends it: state, if it was stopped; error, if it failed.
  end(state, error = "") {
    this.ended = performance.now();
    this.#draw();
    this.#tellRate(state);
    setText(this.error, error);
    this.meta.append(" ", el("button", { class: "plain", type: "button", onclick: () => this.onRequest(this.id) }, "timeline"));
  }

  #tell(target) {
    if (target.token) this.tip.show(target);
    else this.tip.hide();
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this.tokens.children.length) return;
    event.preventDefault();
    const at = [...this.tokens.children].indexOf(this.tip.target);
    const next = this.tokens.children[Math.max(0, Math.min(this.tokens.children.length - 1, at + step))];
    next.scrollIntoView({ block: "nearest" });
    this.tip.show(next);
  }
}

// Tells how likely a token was, and what else was.
class Tip {
  target = null;
  element = el("div", { class: "tip", role: "tooltip", hidden: true });

  show(span) {
    if (this.target === span) return;
    this.hide();
    this.target = span;
    span.classList.add("current");
    const { text, logprob, top } = span.token;
    const rows = top.some((each) => each.token === text) ? top : [{ token: text, logprob }, ...top];
    this.element.replaceChildren(
      ...rows.map((each) => {
        const bar = el("meter", { min: "0", max: "1", value: String(Math.exp(each.logprob)) });
        return el("div", { class: each.token === text ? "chosen" : "" }, el("code", {}, JSON.stringify(each.token)), bar, `${(100 * Math.exp(each.logprob)).toFixed(1)}%`);
      }),
    );
    this.element.hidden = false;
    const at = span.getBoundingClientRect();
    const size = this.element.getBoundingClientRect();
    const left = Math.max(4, Math.min(at.left, innerWidth - size.width - 4));
    const top_ = at.bottom + size.height + 8 < innerHeight ? at.bottom + 4 : at.top - size.height - 4;
    this.element.style.left = `${left}px`;
    this.element.style.top = `${Math.max(4, top_)}px`;
  }

  hide() {
    this.target?.classList.remove("current");
    this.target = null;
    this.element.hidden = true;
  }
}

// 0: unlikely, to 4: as good as certain.
function grade(logprob) {
  const p = Math.exp(logprob);
  return p > 0.9 ? 4 : p > 0.6 ? 3 : p > 0.3 ? 2 : p > 0.1 ? 1 : 0;
}

function random(below) {
  return crypto.getRandomValues(new Uint32Array(1))[0] % below;
}

function hex(bytes) {
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
