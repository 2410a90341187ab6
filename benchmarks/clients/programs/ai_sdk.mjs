// Vercel's AI SDK, by its provider for servers that speak OpenAI's API.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";
import { CASE, MESSAGES, TOOL_SCHEMA, check, same, trying } from "./report.mjs";

const options = { name: "octavo", baseURL: `${CASE.url}/v1`, apiKey: CASE.key };
const octavo = createOpenAICompatible({ ...options, includeUsage: true });
const strict = createOpenAICompatible({ ...options, supportsStructuredOutputs: true });
const ASKED = { messages: MESSAGES, temperature: 0, maxOutputTokens: CASE.max_tokens, maxRetries: 0 };
const model = octavo.chatModel(CASE.model);
const capital = tool({ description: "Looks up the capital.", inputSchema: jsonSchema(TOOL_SCHEMA) });

await trying("`generateText`", async () => {
  const { text, usage, finishReason } = await generateText({ ...ASKED, model });
  same([text, finishReason], [CASE.answer, "stop"]);
  check(usage.outputTokens > 0, JSON.stringify(usage));
});
await trying("`streamText`", async () => {
  const result = streamText({ ...ASKED, model });
  let text = "";
  for await (const part of result.textStream) text += part;
  same(text, CASE.answer);
  check((await result.usage).outputTokens > 0, "no usage");
});
await trying("`completionModel`", async () => {
  const asked = { temperature: 0, maxOutputTokens: CASE.max_tokens, maxRetries: 0 };
  const { text } = await generateText({ ...asked, model: octavo.completionModel(CASE.model), prompt: CASE.prompt });
  check(text.length > 0, "no text");
});
await trying("retries: 429 with `Retry-After`, then the answer", async () => {
  let requests = 0;
  const counted = (...args) => (requests++, fetch(...args));
  const slow = createOpenAICompatible({ ...options, apiKey: CASE.slow_key, fetch: counted }).chatModel(CASE.model);
  for (let calls = 1; calls <= 20; calls++) {
    await generateText({ ...ASKED, model: slow, maxOutputTokens: 1, maxRetries: 5 });
    if (requests > calls) return;
  }
  throw new Error("20 requests without a retry");
});
await trying("tools, `toolChoice: auto`: an answer in text", async () => {
  check((await generateText({ ...ASKED, model, tools: { capital } })).text.length > 0, "no text");
});
await trying("tools, `toolChoice: required`", () => generateText({ ...ASKED, model, tools: { capital }, toolChoice: "required" }), {
  isToCome: true,
});
const output = Output.object({ schema: jsonSchema(TOOL_SCHEMA) });
await trying("`Output.object`", () => generateText({ ...ASKED, model: strict.chatModel(CASE.model), output }), { isToCome: true });
