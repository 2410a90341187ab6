// The cluster as it works: figures of the last seconds, and a card a replica.

import { area, blocks, steps } from "./charts.js";
import { el, keyed, number, seconds, setText, share } from "./dom.js";

// Seconds of history, and steps, that are drawn.
const ROOM = 300;
const STEPS = 128;

export class Cluster {
  #history = [];
  #tiles = {};
  #last = null;

  constructor(root) {
    this.root = root;
    this.closed = el("p", { class: "dim", hidden: true }, "The cluster is shown to API keys with `admin: true`; Requests shows yours.");
    this.tiles = el("div", { class: "tiles" });
    this.chart = el("canvas", { class: "wide", role: "img", "aria-label": "Output tokens a second over the last five minutes" });
    this.cards = el("div", { class: "cards" });
    root.append(this.closed, this.tiles, el("figure", {}, this.chart, el("figcaption", {}, "output tokens a second, the last five minutes")), this.cards);
    new ResizeObserver(() => this.#draw()).observe(root);
  }

  take(state) {
    this.closed.hidden = state.is_admin;
    this.tiles.hidden = this.chart.parentNode.hidden = this.cards.hidden = !state.is_admin;
    if (!state.is_admin) return;
    this.#last = state;
    this.#history.push(state.rates.output_tokens);
    if (this.#history.length > ROOM) this.#history.shift();
    if (!this.root.hidden) this.#draw();
  }

  // Draws the latest state, as when the view is opened.
  show() {
    this.#draw();
  }

  #draw() {
    const state = this.#last;
    if (!state || this.root.hidden) return;
    const { rates, router, replicas } = state;
    const sum = (name) => replicas.reduce((total, replica) => total + replica[name], 0);
    this.#tile("output tokens/s", number(rates.output_tokens));
    this.#tile("prompt tokens/s", number(rates.prompt_tokens));
    this.#tile("TTFT p50 / p95 / p99", quantiles(rates.time_to_first_token));
    this.#tile("inter-token p50 / p95 / p99", quantiles(rates.inter_token_latency));
    this.#tile("live requests", `${router.num_streams}`);
    this.#tile("running / waiting", `${sum("num_running")} / ${sum("num_waiting")}`);
    this.#tile("waiting for a replica", `${router.num_parked_streams}`);
    this.#tile("router lag p99", seconds(rates.lag?.p99));
    area(this.chart, this.#history, ROOM);
    keyed(this.cards, replicas, (replica) => replica.address, () => new Card().element, (element, replica) => element.card.take(replica));
  }

  #tile(name, value) {
    if (!this.#tiles[name]) {
      this.#tiles[name] = el("b");
      this.tiles.append(el("div", {}, this.#tiles[name], el("span", {}, name)));
    }
    setText(this.#tiles[name], value);
  }
}

class Card {
  constructor() {
    this.name = el("h3");
    this.state = el("span", { class: "state" });
    this.about = el("p", { class: "dim" });
    this.facts = el("dl");
    this.map = el("canvas", { class: "map", role: "img", "aria-label": "Map of KV blocks" });
    this.legend = el("span");
    this.steps = el("canvas", { class: "steps", role: "img", "aria-label": "Tokens of the latest steps" });
    this.stepLegend = el("span");
    this.ranks = el("ul", { class: "ranks" });
    this.element = el(
      "article", { class: "card" }, el("div", { class: "row" }, this.name, this.state), this.about, this.facts,
      el("figure", {}, this.map, el("figcaption", {}, this.legend, ...swatches("used", "cached"))),
      el("figure", {}, this.steps, el("figcaption", {}, this.stepLegend, ...swatches("decode", "draft", "prefill"))), this.ranks,
    );
    this.element.card = this;
    this.values = {};
  }

  take(replica) {
    const { rates } = replica;
    setText(this.name, `Replica ${replica.replica_id || "?"}`);
    setText(this.state, replica.state);
    this.state.className = `state ${replica.state}`;
    setText(this.about, replica.description);
    this.#fact("output / prompt tokens/s", `${number(rates.output_tokens)} / ${number(rates.prompt_tokens)}`);
    this.#fact("running / waiting", `${replica.num_running} of ${replica.max_num_seqs} / ${replica.num_waiting}`);
    this.#fact("queued prompt tokens", number(replica.num_queued_tokens));
    this.#fact("step p50 / p99", `${seconds(rates.step_seconds?.p50)} / ${seconds(rates.step_seconds?.p99)}`);
    this.#fact("prefix hit rate", share(rates.hit_rate));
    this.#fact("drafts accepted", share(rates.acceptance));
    this.#fact("preemptions", `${number(replica.num_preemptions)} (${number(rates.preemptions)}/s)`);
    this.#fact("step loop lag p99", seconds(rates.lag?.p99));
    const used = replica.num_blocks - replica.num_available_blocks;
    setText(this.legend, `${number(replica.num_blocks)} KV blocks of ${replica.block_size} tokens: ${number(used)} used, ${number(replica.num_cached_blocks)} cached`);
    blocks(this.map, bytes(replica.used_blocks), bytes(replica.cached_blocks));
    setText(this.stepLegend, `the latest ${replica.steps.length} steps, of ${number(replica.max_num_batched_tokens)} tokens at most (square-root scale)`);
    steps(this.steps, replica.steps, replica.max_num_batched_tokens, STEPS);
    keyed(this.ranks, replica.ranks, (rank) => rank.rank, () => el("li"), (item, rank) => {
      setText(item, `rank ${rank.rank} (pid ${rank.pid}): ${rank.state}, step ${number(rank.step)}, heard ${seconds(rank.silence)} ago`);
    });
  }

  #fact(name, value) {
    if (!this.values[name]) {
      this.values[name] = el("dd");
      this.facts.append(el("div", {}, el("dt", {}, name), this.values[name]));
    }
    setText(this.values[name], value);
  }
}

function swatches(...names) {
  return names.map((name) => el("span", { class: `swatch ${name}` }, el("span", {}, name)));
}

function quantiles(values) {
  return values ? [values.p50, values.p95, values.p99].map(seconds).join(" / ") : "–";
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
}
