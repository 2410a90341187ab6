// OpenAI's SDK for Node.

import OpenAI from "openai";
import { CASE, MESSAGES, TOOL_SCHEMA, check, same, trying } from "./report.mjs";

const client = new OpenAI({ baseURL: `${CASE.url}/v1`, apiKey: CASE.key });
const CHAT = { model: CASE.model, messages: MESSAGES, temperature: 0, max_tokens: CASE.max_tokens };
const ASKED = { model: CASE.model, input: CASE.question, temperature: 0, max_output_tokens: CASE.max_tokens };
const create = (more = {}) => client.chat.completions.create({ ...CHAT, ...more });

await trying("chat", async () => {
  same((await create()).choices[0].message.content, CASE.answer);
});
await trying("chat, streamed", async () => {
  let text = "";
  for await (const chunk of await create({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
  same(text, CASE.answer);
});
await trying("`chat.completions.stream`", async () => {
  same(await client.chat.completions.stream(CHAT).finalContent(), CASE.answer);
});
await trying("completion, streamed", async () => {
  const asked = { model: CASE.model, prompt: CASE.prompt, temperature: 0, max_tokens: CASE.max_tokens, stream: true };
  let text = "";
  for await (const chunk of await client.completions.create(asked)) text += chunk.choices[0].text;
  same(text, CASE.continuation);
});
await trying("`withResponse`", async () => {
  const { data, response } = await create().withResponse();
  same([data.choices[0].message.content, response.status], [CASE.answer, 200]);
});
await trying("`responses.create`, also streamed", async () => {
  same((await client.responses.create(ASKED)).output_text, CASE.answer);
  let text = "";
  for await (const event of await client.responses.create({ ...ASKED, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  same(text, CASE.answer);
});
await trying("`previous_response_id`", async () => {
  const first = await client.responses.create(ASKED);
  const asked = { ...ASKED, input: "And of Italy?", previous_response_id: first.id };
  const next = await client.responses.create(asked);
  check(next.output_text.includes("Rome"), next.output_text);
});
await trying("retries: 429 with `Retry-After`, then the answer", async () => {
  let requests = 0;
  const counted = (...args) => (requests++, fetch(...args));
  const slow = new OpenAI({ baseURL: `${CASE.url}/v1`, apiKey: CASE.slow_key, fetch: counted });
  for (let calls = 1; calls <= 20; calls++) {
    await slow.chat.completions.create({ ...CHAT, max_tokens: 1 });
    if (requests > calls) return;
  }
  throw new Error("20 requests without a retry");
});
await trying("`AuthenticationError`", async () => {
  const wrong = new OpenAI({ baseURL: `${CASE.url}/v1`, apiKey: "wrong" });
  const error = await wrong.chat.completions.create(CHAT).catch((caught) => caught);
  check(error instanceof OpenAI.AuthenticationError, error);
});
const schema = { name: "capital", schema: TOOL_SCHEMA, strict: true };
await trying("`response_format: json_schema`", () => create({ response_format: { type: "json_schema", json_schema: schema } }), {
  isToCome: true,
});
const tools = [{ type: "function", function: { name: "capital", parameters: TOOL_SCHEMA } }];
await trying("`tool_choice: required`", () => create({ tools, tool_choice: "required" }), { isToCome: true });
