// Streams a completion from the .proto alone: make, then
//
//   ./client ADDRESS[,ADDRESS...] PROMPT [MAX_TOKENS [SEED]]
//
// If the connection breaks or a router stops, it resumes at the next address with what it has: no token is lost or
// repeated.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "inference.grpc.pb.h"

namespace {

using octavo::v1::GenerateRequest;
using octavo::v1::GenerateResponse;
using octavo::v1::Inference;

constexpr int kMostFailures = 10;  // in a row, without a message in between

// gRPC itself retries what a full router refuses, after the delay in grpc-retry-pushback-ms, a limited number of times.
constexpr char kServiceConfig[] = R"({
  "methodConfig": [{
    "name": [{"service": "octavo.v1.Inference"}],
    "retryPolicy": {
      "maxAttempts": 5, "initialBackoff": "1s", "maxBackoff": "30s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]
    }
  }],
  "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}
})";

// What a client holds of a stream of one choice: all that a resume elsewhere needs.
struct Held {
  bool has_started = false;
  octavo::v1::Started started;
  uint32_t attempt = 0;
  std::vector<uint32_t> token_ids;
  uint64_t text_bytes = 0;
  bool finished = false;

  // Takes a message and returns its new text.
  std::string Add(const GenerateResponse& response) {
    if (response.has_started()) {
      has_started = true;
      started = response.started();
      attempt = std::max(attempt, started.attempt());
    }
    if (!response.has_chunk()) return "";
    const auto& chunk = response.chunk();
    if (chunk.first_token() < token_ids.size()) return "";  // already received
    if (chunk.first_token() > token_ids.size()) {
      throw std::runtime_error("tokens from " + std::to_string(token_ids.size()) + " on are missing");
    }
    token_ids.insert(token_ids.end(), chunk.token_ids().begin(), chunk.token_ids().end());
    text_bytes += chunk.text().size();
    finished = chunk.has_finish();
    return chunk.text();
  }

  // Returns `first` until a stream has started, then its resume.
  GenerateRequest Request(const GenerateRequest& first) {
    if (!has_started) return first;
    GenerateRequest request;
    request.set_request_id(started.request_id());
    request.set_model(started.model());
    *request.mutable_sampling() = started.sampling();
    auto* resume = request.mutable_resume();
    resume->set_attempt(++attempt);
    *resume->mutable_prompt_token_ids() = started.prompt_token_ids();
    resume->set_fingerprint(started.fingerprint());
    auto* choice = resume->add_choices();
    choice->set_index(0);
    choice->mutable_output_token_ids()->Add(token_ids.begin(), token_ids.end());
    choice->set_text_bytes_delivered(text_bytes);
    choice->set_finished(finished);
    return request;
  }
};

// A server that shuts down may drop a call that has just come, with CANCELLED as status and as the whole message.
bool ServerWent(const grpc::Status& status) {
  const bool dropped = status.error_code() == grpc::StatusCode::CANCELLED && status.error_message() == "CANCELLED";
  return dropped || status.error_code() == grpc::StatusCode::UNAVAILABLE;
}

void Run(const std::string& addresses, const GenerateRequest& first) {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(kServiceConfig);
  std::vector<std::unique_ptr<Inference::Stub>> stubs;
  std::stringstream list(addresses);
  for (std::string address; std::getline(list, address, ',');) {
    stubs.push_back(
        Inference::NewStub(grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments)));
  }
  Held held;
  size_t turn = 0;
  for (int failures = 0; !held.finished;) {
    grpc::ClientContext context;
    auto reader = stubs[turn % stubs.size()]->Generate(&context, held.Request(first));
    GenerateResponse response;
    while (reader->Read(&response)) {
      failures = 0;
      std::cout << held.Add(response) << std::flush;
    }
    const grpc::Status status = reader->Finish();
    if (status.ok()) continue;
    if (!ServerWent(status) || ++failures == kMostFailures) {
      throw std::runtime_error(status.error_message());
    }
    std::cerr << "\n[" << status.error_message() << "; going on at token " << held.token_ids.size() << "]\n";
    ++turn;
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(100 << failures, 2000)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: client ADDRESS[,ADDRESS...] PROMPT [MAX_TOKENS [SEED]]\n";
    return 2;
  }
  GenerateRequest first;
  first.set_prompt(argv[2]);
  first.mutable_sampling()->set_max_tokens(argc > 3 ? std::stoul(argv[3]) : 64);
  first.mutable_sampling()->set_seed(argc > 4 ? std::stoull(argv[4]) : 0);
  try {
    Run(argv[1], first);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
