// Live requests, the timeline of one of them, and the events at the router.

import { el, number, seconds, setText } from "./dom.js";
import { call } from "./net.js";
import { choicesOf, secondsByPhase, spansOf } from "./spans.js";

// Events that are kept, and how many more there may be before the oldest go.
const MOST_EVENTS = 300;
const SPARE = 50;

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
    const table = el("table", { class: "live" }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), this.rows);
    root.append(form, this.found, this.count, el("div", { class: "scroll", tabindex: "0" }, table));
  }

  take(state) {
    if (this.root.hidden) return;
    setText(this.count, `${number(state.num_requests)} live${state.num_requests > state.requests.length ? `, the oldest ${state.requests.length} of them` : ""}`);
    // A request keeps its row. One that has ended leaves it, dimmed, to the next one, so that no row moves.
    const coming = new Map(state.requests.map((request) => [request.request_id, request]));
    const left = [];
    for (const row of this.rows.children) {
      const request = coming.get(row.requestId);
      row.classList.toggle("gone", !request);
      if (!request) left.push(row);
      else if (coming.delete(row.requestId)) fill(row, request);
    }
    for (const request of coming.values()) fill(left.shift() ?? this.rows.appendChild(this.#row()), request);
    while (this.rows.lastChild?.classList.contains("gone")) this.rows.lastChild.remove();
  }

  #row() {
    const button = el("button", { class: "plain", type: "button" });
    const row = el("tr", {}, el("td", {}, button), ...Array.from({ length: 6 }, () => el("td")));
    button.addEventListener("click", () => this.onChosen(row.requestId));
    return row;
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

function fill(row, request) {
  row.requestId = request.request_id;
  row.classList.remove("gone");
  const values = [
    request.is_parked ? "waits for one" : request.replica_id, number(request.num_prompt_tokens),
    `${number(request.num_output_tokens)} of ${number(request.max_tokens)}`, seconds(request.age),
    seconds(request.time_to_first_token), number(request.num_resubmissions),
  ];
  setText(row.firstChild.firstChild, request.request_id);
  values.forEach((value, i) => setText(row.children[i + 1], value));
}

// The latest ones come last, and the list follows them, unless it was scrolled up: what is being read does not move.
export class EventList {
  #seen = new Set();
  #isFollowing = true;
  #trim = 0;

  constructor(root, { onChosen }) {
    this.root = root;
    this.onChosen = onChosen;
    root.addEventListener("scroll", () => {
      if (!root.hidden) this.#isFollowing = root.scrollHeight - root.scrollTop - root.clientHeight < 40;
    });
    this.list = el("ol", { class: "event-list", role: "log", "aria-live": "polite", tabindex: "0" });
    this.withEnds = el("input", { type: "checkbox", checked: true, onchange: () => this.list.classList.toggle("no-ends", !this.withEnds.checked) });
    root.append(el("label", { class: "check" }, this.withEnds, "Show requests that ended"), this.list);
  }

  // Takes what the router tells; after a reconnect it tells again what it still knows.
  take(events, routerId) {
    for (const each of events) {
      const name = `${routerId}/${each.number}`;
      if (this.#seen.has(name)) continue;
      this.#seen.add(name);
      this.#append(each.kind, each.text, each.at, each);
    }
    this.show();
    // In the order of insertion: the oldest go first.
    for (const name of this.#seen) {
      if (this.#seen.size <= 4 * MOST_EVENTS) break;
      this.#seen.delete(name);
    }
  }

  // Adds one of the page's own.
  add(kind, text) {
    this.#append(kind, text, Date.now() / 1000, {});
    this.show();
  }

  // Shows the latest one, as when the view is opened.
  show() {
    if (this.#isFollowing && !this.root.hidden) this.root.scrollTop = this.root.scrollHeight;
  }

  #append(kind, text, at, { request_id: id = "", replica = "" }) {
    const time = new Date(1000 * at);
    const item = el("li", { class: kind }, el("time", { datetime: time.toISOString() }, time.toLocaleTimeString()), el("b", {}, kind), el("span", {}, text));
    if (id) item.append(el("button", { class: "plain", type: "button", onclick: () => this.onChosen(id) }, id));
    else if (replica) item.title = replica;
    this.list.append(item);
    // Later, by themselves: then the browser keeps what is shown in its place.
    if (this.list.children.length > MOST_EVENTS + SPARE) this.#trim ||= setTimeout(() => this.#drop(), 100);
  }

  #drop() {
    this.#trim = 0;
    while (this.list.children.length > MOST_EVENTS) this.list.firstChild.remove();
  }
}
