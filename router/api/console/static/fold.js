// Folds the chunks of /v1/chat/completions into an answer. Knows no page: tests run it without a browser.

export class Answer {
  text = "";
  reasoning = "";
  // {text, logprob, top: [{text, logprob}]}, if they were asked for.
  tokens = [];
  // By index: {id, name, arguments}.
  calls = [];
  finish = null;
  usage = null;

  // Takes the JSON of a chunk. Throws Error for one that tells of an error.
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? "the stream failed");
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      if (choice.index) continue;
      const delta = choice.delta ?? {};
      this.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
      this.text += delta.content ?? "";
      for (const call of delta.tool_calls ?? []) this.#call(call);
      for (const each of choice.logprobs?.content ?? []) {
        this.tokens.push({ text: each.token, logprob: each.logprob, top: each.top_logprobs ?? [] });
      }
      if (choice.finish_reason) this.finish = choice.finish_reason;
    }
  }

  #call(part) {
    const call = (this.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }

  // How far it has come: an answer that is computed again replaces the one before once it is as long.
  get length() {
    const calls = this.calls.reduce((sum, call) => sum + (call ? call.name.length + call.arguments.length : 0), 0);
    return this.text.length + this.reasoning.length + calls;
  }

  // The message as the next request sends it back.
  get message() {
    const message = { role: "assistant", content: this.text };
    const calls = this.calls.filter(Boolean);
    if (calls.length) {
      message.tool_calls = calls.map(({ id, name, arguments: text }) => ({
        id,
        type: "function",
        function: { name, arguments: text },
      }));
    }
    return message;
  }
}

// Splits a growing text into the tokens that made it, as far as they add up to it: a stop string that was cut, or bytes
// that were joined to a character, leave the rest as one piece. Tokens before the text, such as reasoning, are skipped.
export class Splitter {
  // Characters that have been split, and tokens that have been used.
  at = 0;
  used = 0;
  #stuck = false;

  // Returns the new pieces: [{text, token}].
  take(text, tokens) {
    const found = [];
    while (!this.#stuck && this.used < tokens.length) {
      const token = tokens[this.used];
      if (token.text && text.startsWith(token.text, this.at)) {
        found.push({ text: token.text, token });
        this.at += token.text.length;
      } else if (token.text && this.at + token.text.length > text.length && this.at > 0) {
        // Its text has not come yet, or was cut.
        break;
      } else if (token.text && this.at > 0) {
        this.#stuck = true;
        break;
      }
      this.used += 1;
    }
    return found;
  }
}
