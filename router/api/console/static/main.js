// Puts the page together: views, the link to the router, the key, and the theme.

import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { setText } from "./dom.js";
import { Feed } from "./feed.js";
import { setKey } from "./net.js";
import { EventList, Requests } from "./requests.js";

const VIEWS = ["chat", "cluster", "requests", "events"];
const $ = (id) => document.getElementById(id);

const chosen = (id) => {
  location.hash = `requests/${encodeURIComponent(id)}`;
};
const chat = new Chat($("chat"), { onRequest: chosen });
const cluster = new Cluster($("cluster"));
const requests = new Requests($("requests"), { onChosen: chosen });
const eventList = new EventList($("events"), { onChosen: chosen });
const feed = new Feed();

function show() {
  const [name, id] = location.hash.slice(1).split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  for (const each of VIEWS) {
    $(each).hidden = each !== view;
    const tab = $(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === view));
    tab.tabIndex = each === view ? 0 : -1;
  }
  if (view === "cluster") cluster.show();
  if (view === "events") eventList.show();
  if (view === "requests" && id) requests.show(decodeURIComponent(id));
  if (view === "chat") chat.input.focus();
}

for (const view of VIEWS) {
  $(`tab-${view}`).addEventListener("click", () => (location.hash = view));
}
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const at = VIEWS.findIndex((view) => $(`tab-${view}`) === document.activeElement);
  const next = VIEWS[(at + step + VIEWS.length) % VIEWS.length];
  location.hash = next;
  $(`tab-${next}`).focus();
});
window.addEventListener("hashchange", show);

// --- The link to the router

let last = null;
feed.addEventListener("state", ({ detail }) => {
  last = detail;
  setText($("model"), detail.router.model);
  chat.images.learn(detail.router.images);
  cluster.take(detail);
  requests.take(detail);
});
feed.addEventListener("events", ({ detail }) => eventList.take(detail, feed.routerId));
feed.addEventListener("restarted", () => eventList.add("router", "another process of the router answers: it was restarted, or is one of several"));
feed.addEventListener("link", ({ detail }) => {
  if ($("link").dataset.state === "live" && detail.state === "lost") eventList.add("router", detail.text);
  $("link").dataset.state = detail.state;
  setText($("link"), detail.text);
});

// --- The key

feed.addEventListener("refused", ({ detail }) => {
  $("link").dataset.state = "lost";
  setText($("link"), detail.status === 401 ? "an API key is needed" : "refused");
  setText($("key-error"), sessionStorage.length || detail.status === 403 ? detail.message : "");
  $("key-form").hidden = false;
  $("key").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  feed.again();
});

// --- The theme

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (last) cluster.show();
}
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem("octavo-theme", next);
  setTheme(next);
});
setTheme(localStorage.getItem("octavo-theme") ?? "");

show();
feed.run();
