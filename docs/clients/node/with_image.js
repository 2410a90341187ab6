// A question about an image from the .proto alone. npm install, then
//
//   node with_image.js ADDRESS FILE QUESTION
//
// client.js shows how a broken stream resumes. The resume of a stream with images has `resume.items` of Started.items; if
// it ends with FAILED_PRECONDITION, reason ITEMS_NEEDED, the next one has the images in `items`, too.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTO = path.join(__dirname, "..", "..", "..", "protos", "inference.proto");
const definition = protoLoader.loadSync(PROTO, { keepCase: true, longs: String });
const { Inference } = grpc.loadPackageDefinition(definition).octavo.v1;

async function main(address, file, question) {
  const client = new Inference(address, grpc.credentials.createInsecure(), {
    "grpc.max_send_message_length": 64 * 2 ** 20,
  });
  const parts = [{ item: { image: { data: fs.readFileSync(file) } } }, { text: question }];
  const chat = { messages: [{ role: "user", parts }] };
  for await (const { chunk } of client.Generate({ chat, sampling: { max_tokens: 100, seed: "5" } })) {
    process.stdout.write(chunk?.text ?? "");
  }
  client.close();
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
