// Streams a completion from the .proto alone, loaded at run time: npm install, then
//
//   node client.js ADDRESS[,ADDRESS...] PROMPT [MAX_TOKENS [SEED]]
//
// If the connection breaks or a router stops, it resumes at the next address with what it has: no token is lost or
// repeated.
"use strict";

const path = require("node:path");
const { setTimeout: sleep } = require("node:timers/promises");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTO = path.join(__dirname, "..", "..", "..", "protos", "inference.proto");
const MOST_FAILURES = 10; // in a row, without a message in between

// gRPC itself retries what a full router refuses, after the delay in grpc-retry-pushback-ms, a limited number of times.
const RETRY_POLICY = {
  maxAttempts: 5,
  initialBackoff: "1s",
  maxBackoff: "30s",
  backoffMultiplier: 2,
  retryableStatusCodes: ["RESOURCE_EXHAUSTED"],
};
const SERVICE_CONFIG = JSON.stringify({
  methodConfig: [{ name: [{ service: "octavo.v1.Inference" }], retryPolicy: RETRY_POLICY }],
  retryThrottling: { maxTokens: 10, tokenRatio: 0.1 },
});

// Fields keep their names; 64-bit numbers are strings, since a seed has more bits than a JavaScript number. Without
// `defaults`, unset fields are absent, so a message that is sent back is unchanged.
const definition = protoLoader.loadSync(PROTO, { keepCase: true, longs: String });
const { Inference } = grpc.loadPackageDefinition(definition).octavo.v1;

// What a client holds of a stream of one choice: all that a resume elsewhere needs.
class Held {
  started = null;
  attempt = 0;
  tokenIds = [];
  textBytes = 0;
  finished = false;

  // Takes a message and returns its new text.
  add(response) {
    if (response.started) {
      this.started = response.started;
      this.attempt = Math.max(this.attempt, response.started.attempt ?? 0);
    }
    if (!response.chunk) return "";
    const { first_token: firstToken = 0, token_ids: tokenIds = [], text = "", finish } = response.chunk;
    if (firstToken < this.tokenIds.length) return ""; // already received
    if (firstToken > this.tokenIds.length) {
      throw new Error(`tokens ${this.tokenIds.length} to ${firstToken - 1} are missing`);
    }
    this.tokenIds.push(...tokenIds);
    this.textBytes += Buffer.byteLength(text);
    this.finished = finish != null;
    return text;
  }

  // Returns `first` until a stream has started, then its resume.
  request(first) {
    if (this.started === null) return first;
    this.attempt += 1;
    const { request_id, model, sampling, prompt_token_ids, fingerprint } = this.started;
    const choice = {
      index: 0,
      output_token_ids: this.tokenIds,
      text_bytes_delivered: this.textBytes,
      finished: this.finished,
    };
    const resume = { attempt: this.attempt, prompt_token_ids, choices: [choice], fingerprint };
    return { request_id, model, sampling, resume };
  }
}

// A server that shuts down may drop a call that has just come, with CANCELLED as status and as the whole message.
function serverWent(error) {
  const dropped = error.code === grpc.status.CANCELLED && error.details === "CANCELLED";
  return dropped || error.code === grpc.status.UNAVAILABLE;
}

async function main(addresses, prompt, maxTokens = "64", seed = "0") {
  const options = { "grpc.service_config": SERVICE_CONFIG };
  const clients = addresses
    .split(",")
    .map((address) => new Inference(address, grpc.credentials.createInsecure(), options));
  const first = { prompt, sampling: { max_tokens: Number(maxTokens), seed } };
  const held = new Held();
  for (let failures = 0, turn = 0; !held.finished; ) {
    try {
      for await (const response of clients[turn % clients.length].Generate(held.request(first))) {
        failures = 0;
        process.stdout.write(held.add(response));
      }
    } catch (error) {
      failures += 1;
      if (!serverWent(error) || failures === MOST_FAILURES) throw error;
      process.stderr.write(`\n[${error.details}; going on at token ${held.tokenIds.length}]\n`);
      turn += 1;
      await sleep(Math.min(100 * 2 ** failures, 2000));
    }
  }
  for (const client of clients) client.close();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
