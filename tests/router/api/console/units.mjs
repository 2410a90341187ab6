// Unit tests of the console's modules that know no page; tests/router/api/test_console_files.py runs them.

import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";
import { test } from "node:test";

const from = (name) => import(pathToFileURL(`${process.env.STATIC}/${name}`));
const { whyNot, whyNotSize } = await from("attachments.js");
const { Answer, Splitter } = await from("fold.js");
const { EventParser } = await from("net.js");
const { visible } = await from("dom.js");
const { choicesOf, secondsByPhase, spansOf } = await from("spans.js");

const chunk = (delta, more = {}) => ({ choices: [{ index: 0, delta, ...more }] });

test("an answer folds text, reasoning, tool calls and usage", () => {
  const answer = new Answer();
  answer.take(chunk({ role: "assistant", content: "" }));
  answer.take(chunk({ reasoning: "hm" }));
  answer.take(chunk({ content: "a" }));
  answer.take(chunk({ content: "b" }));
  answer.take(chunk({ tool_calls: [{ index: 0, id: "x", function: { name: "f", arguments: '{"' } }] }));
  answer.take(chunk({ tool_calls: [{ index: 0, function: { arguments: 'a":1}' } }] }, { finish_reason: "tool_calls" }));
  answer.take({ choices: [], usage: { completion_tokens: 3 } });
  assert.equal(answer.text, "ab");
  assert.equal(answer.reasoning, "hm");
  assert.equal(answer.finish, "tool_calls");
  assert.equal(answer.usage.completion_tokens, 3);
  assert.deepEqual(answer.message.tool_calls, [{ id: "x", type: "function", function: { name: "f", arguments: '{"a":1}' } }]);
  assert.throws(() => answer.take({ error: { message: "broken" } }), /broken/);
});

test("tokens split the text that they made, piece by piece", () => {
  const splitter = new Splitter();
  const tokens = [{ text: "Hel" }];
  assert.deepEqual(splitter.take("Hel", tokens).map((piece) => piece.text), ["Hel"]);
  tokens.push({ text: "lo" }, { text: "" }, { text: "!" });
  assert.deepEqual(splitter.take("Hello!", tokens).map((piece) => piece.text), ["lo", "!"]);
  assert.equal(splitter.at, 6);
});

test("tokens that do not add up leave the rest whole, and never go to the wrong place", () => {
  const splitter = new Splitter();
  // Reasoning comes before the text; then a character's bytes are in two tokens.
  const tokens = ["<think>", "a", "\ufffd", "\ufffd", "a"].map((text) => ({ text }));
  assert.deepEqual(splitter.take("a\u00e9a", tokens).map((piece) => piece.text), ["a"]);
  assert.equal(splitter.at, 1);
  assert.deepEqual(splitter.take("a\u00e9a", tokens), []);
});

test("events are split wherever the pieces end", () => {
  const whole = 'event: state\ndata: {"a": 1}\n\n: ping\n\ndata: x\r\ndata: y\r\n\r\ndata: [DONE]\n\n';
  const expected = [{ event: "state", data: '{"a": 1}' }, { event: "message", data: "x\ny" }, { event: "message", data: "[DONE]" }];
  for (let at = 0; at <= whole.length; at += 1) {
    const parser = new EventParser();
    assert.deepEqual([...parser.push(whole.slice(0, at)), ...parser.push(whole.slice(at))], expected, `cut at ${at}`);
  }
});

test("what would move or hide text is shown by name", () => {
  assert.equal(visible("a\u202eb\u001b[31m\u0000"), "a[U+202E]b\u241b[31m\u2400");
  assert.equal(visible("<script>alert(1)</script>\n\tok é 漢字"), "<script>alert(1)</script>\n\tok é 漢字");
});

test("phases follow the entries of a timeline", () => {
  const entry = (moment, time, choice = 0, reason = "") => ({ moment, time, choice, reason });
  const timeline = {
    now: 9,
    entries: [
      entry("queued", 0), entry("admitted", 1), entry("chunked", 1), entry("scheduled", 2), entry("decoding", 3),
      entry("preempted", 4, 0, "no_blocks"), entry("resumed", 6), entry("decoding", 7), entry("queued", 0, 1),
    ],
  };
  const spans = spansOf(timeline, 0);
  assert.deepEqual(spans.map((span) => [span.phase, span.begin, span.end]), [
    ["queued", 0, 1], ["prefill", 1, 3], ["decode", 3, 4], ["preempted", 4, 6], ["prefill", 6, 7], ["decode", 7, 9],
  ]);
  assert.deepEqual(secondsByPhase(spans), { queued: 1, prefill: 3, decode: 3, preempted: 2 });
  assert.deepEqual(choicesOf(timeline), [0, 1]);
  assert.equal(spansOf({ ...timeline, entries: [...timeline.entries, entry("finished", 8)] }, 0).at(-1).end, 8);
});

test("images are refused by what the router told, and by name", () => {
  const terms = { why_not: "", count: 2, item_bytes: 3 * 2 ** 20, request_bytes: 4 * 2 ** 20, pixels: 1000, width: 0, height: 20 };
  const none = { count: 0, bytes: 0 };
  const file = { name: "cat.png", type: "image/png", size: 2 ** 20 };
  assert.equal(whyNot(file, terms, none), "");
  assert.equal(whyNot(file, terms, { count: 1, bytes: 3 * 2 ** 20 }), "");
  assert.match(whyNot(file, null, none), /not connected/);
  assert.equal(whyNot(file, { ...terms, why_not: "m takes text only" }, none), "m takes text only");
  assert.match(whyNot({ ...file, type: "image/svg+xml" }, terms, none), /cat.png is image\/svg\+xml: use PNG/);
  assert.match(whyNot({ ...file, type: "" }, terms, none), /unknown type/);
  assert.match(whyNot({ ...file, size: 0 }, terms, none), /empty/);
  assert.match(whyNot({ ...file, size: 3 * 2 ** 20 + 1 }, terms, none), /has 3.0 MiB: an image may have 3.0 MiB/);
  assert.match(whyNot(file, terms, { count: 2, bytes: 0 }), /image 3 of this chat, which may have 2/);
  assert.match(whyNot(file, terms, { count: 1, bytes: 3 * 2 ** 20 + 1 }), /may have 4.0 MiB together, and 3.0 MiB are taken/);
  assert.equal(whyNotSize({ name: "a", width: 50, height: 20 }, terms), "");
  assert.match(whyNotSize({ name: "a", width: 51, height: 20 }, terms), /51 x 20 pixels: an image may have 1000/);
  assert.match(whyNotSize({ name: "a", width: 5, height: 21 }, terms), /it may be 20 high/);
});
