// Live requests, the timeline of one of them, and the happenings at the router.

import { el, keyed, number, seconds, setText } from "./dom.js";
import { call } from "./net.js";
import { choicesOf, secondsByPhase, spansOf } from "./spans.js";

const MOST_HAPPENINGS = 300;

export class Requests {
  constructor(root, { onChosen }) {
    this.root = root;
    this.onChosen = onChosen;
    this.count = el("p", { class: "dim" });
    this.rows = el("tbody");
    this.asked = el("input", { "aria-label": "Request id", placeholder: "request id", spellcheck: "false" });
    this.found = el("div", { class: "timeline" });
    const form = el("form", { class: "row" }, this.asked, el("button", {}, "Show its timeline"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.asked.value.trim()) this.onChosen(this.asked.value.trim());
    });
    const heads = ["request", "replica", "prompt", "output", "age", "first token", "moved"];
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), this.rows);
    root.append(form, this.found, this.count, el("div", { class: "scroll", tabindex: "0" }, table));
  }

  take(state) {
    if (this.root.hidden) return;
    setText(this.count, `${number(state.num_requests)} live${state.num_requests > state.requests.length ? `, the oldest ${state.requests.length} of them` : ""}`);
    keyed(this.rows, state.requests, (request) => request.request_id, (request) => this.#row(request), (row, request) => {
      const values = [
        request.is_parked ? "waits for one" : request.replica_id, number(request.num_prompt_tokens),
        `${number(request.num_output_tokens)} of ${number(request.max_tokens)}`, seconds(request.age),
        seconds(request.time_to_first_token), number(request.num_resubmissions),
      ];
      values.forEach((value, i) => setText(row.children[i + 1], value));
    });
  }

  #row(request) {
    const button = el("button", { class: "plain", type: "button", onclick: () => this.onChosen(request.request_id) }, request.request_id);
    return el("tr", {}, el("td", {}, button), ...Array.from({ length: 6 }, () => el("td")));
  }

  // Asks the replicas what happened to a request, and draws it.
  async show(id) {
    this.asked.value = id;
    try {
      const answer = await call(`console/data/requests/${encodeURIComponent(id)}`);
      const { timelines, unreachable } = await answer.json();
      this.found.replaceChildren(
        ...timelines.flatMap((timeline) => choicesOf(timeline).map((choice) => this.#timeline(timeline, choice))),
        ...unreachable.map((cause) => el("p", { class: "error" }, `not reached: ${cause}`)),
      );
    } catch (error) {
      this.found.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    }
  }

  #timeline(timeline, choice) {
    const spans = spansOf(timeline, choice);
    const whole = Math.max(spans.at(-1)?.end ?? 0, 1e-6);
    const bar = el("div", { class: "bar", role: "img", "aria-label": "Phases" });
    for (const span of spans) {
      const part = el("span", { class: span.phase, title: `${span.phase}: ${seconds(span.end - span.begin)}` });
      part.style.left = `${(100 * span.begin) / whole}%`;
      part.style.width = `${(100 * (span.end - span.begin)) / whole}%`;
      bar.append(part);
    }
    const sums = Object.entries(secondsByPhase(spans)).map(([phase, sum]) => el("li", { class: phase }, `${phase} ${seconds(sum)}`));
    const entries = timeline.entries.filter((entry) => entry.choice === choice).map((entry) => {
      const step = entry.step ? `, step ${entry.step}` : "";
      const reason = entry.reason ? `, ${entry.reason}` : "";
      return el("li", {}, `${entry.time.toFixed(3)} s: ${entry.moment}, ${number(entry.num_tokens)} tokens${step}${reason}`);
    });
    const title = `${timeline.request_id}, choice ${choice}, replica ${timeline.replica_id}: ${seconds(whole)}${timeline.finished ? "" : " so far"}`;
    return el("article", {}, el("h3", {}, title), bar, el("ul", { class: "phases" }, ...sums), el("details", {}, el("summary", {}, "Entries"), el("ol", {}, ...entries)));
  }
}

export class Happenings {
  #seen = new Set();

  constructor(root, { onChosen }) {
    this.onChosen = onChosen;
    this.list = el("ol", { class: "happenings", role: "log", "aria-live": "polite", tabindex: "0" });
    this.withEnds = el("input", { type: "checkbox", checked: true, onchange: () => this.list.classList.toggle("no-ends", !this.withEnds.checked) });
    root.append(el("label", { class: "check" }, this.withEnds, "Show requests that ended"), this.list);
  }

  // Takes what the router tells; after a reconnect it tells again what it still knows.
  take(happenings, routerId) {
    for (const each of happenings) {
      const name = `${routerId}/${each.number}`;
      if (this.#seen.has(name)) continue;
      this.#seen.add(name);
      this.add(each.kind, each.text, each.at, each);
    }
    // In the order of insertion: the oldest go first.
    for (const name of this.#seen) {
      if (this.#seen.size <= 4 * MOST_HAPPENINGS) break;
      this.#seen.delete(name);
    }
  }

  add(kind, text, at = Date.now() / 1000, { request_id: id = "", replica = "" } = {}) {
    const time = new Date(1000 * at);
    const item = el("li", { class: kind }, el("time", { datetime: time.toISOString() }, time.toLocaleTimeString()), el("b", {}, kind), el("span", {}, text));
    if (id) item.append(el("button", { class: "plain", type: "button", onclick: () => this.onChosen(id) }, id));
    else if (replica) item.title = replica;
    this.list.prepend(item);
    while (this.list.children.length > MOST_HAPPENINGS) this.list.lastChild.remove();
  }
}
