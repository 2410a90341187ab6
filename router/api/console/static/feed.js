// What the router tells once a second. Connects again after it was lost, and says so.

import { call, events, pause } from "./net.js";

const FIRST_RETRY = 250;
const LONGEST_RETRY = 4000;
// The router speaks once a second.
const SILENCE = 8000;

export class Feed extends EventTarget {
  routerId = "";
  #again = null;

  // Runs for the life of the page. Dispatches `state`, `events`, `link` ({state, text}) and `refused`.
  async run() {
    let retry = FIRST_RETRY;
    for (;;) {
      try {
        const answer = await call("console/data/feed");
        for await (const { event, data } of events(answer, SILENCE)) {
          retry = FIRST_RETRY;
          this.#take(event, JSON.parse(data));
        }
        this.#tell("link", { state: "lost", text: "router gone, connecting" });
      } catch (error) {
        if (error.status === 401 || error.status === 403) {
          this.#tell("refused", error);
          await new Promise((resolve) => (this.#again = resolve));
          retry = FIRST_RETRY;
          continue;
        }
        this.#tell("link", { state: "lost", text: `${error.message ?? "lost"}, connecting` });
      }
      await pause(retry);
      retry = Math.min(2 * retry, LONGEST_RETRY);
    }
  }

  // Tries again after a refusal, with another key.
  again() {
    this.#again?.();
    this.#again = null;
  }

  #take(event, content) {
    if (event === "state") {
      const id = content.router.id;
      const restarted = this.routerId && this.routerId !== id;
      this.routerId = id;
      this.#tell("link", { state: "live", text: restarted ? "live, another router process" : "live" });
      if (restarted) this.#tell("restarted", content);
    }
    this.#tell(event, content);
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
