// A question about an image from the .proto alone. make, then
//
//   ./with_image ADDRESS FILE QUESTION
//
// client.cc shows how a broken stream resumes. The resume of a stream with images has `resume.items` of Started.items; if
// it ends with FAILED_PRECONDITION, reason ITEMS_NEEDED, the next one has the images in `items`, too.
#include <grpcpp/grpcpp.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "inference.grpc.pb.h"

namespace {

using octavo::v1::GenerateRequest;
using octavo::v1::GenerateResponse;
using octavo::v1::Inference;

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " can't be read");
  std::ostringstream read;
  read << file.rdbuf();
  return read.str();
}

void Run(const std::string& address, const std::string& path, const std::string& question) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(64 << 20);
  const auto stub =
      Inference::NewStub(grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  GenerateRequest request;
  auto* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->add_parts()->mutable_item()->mutable_image()->set_data(Contents(path));
  message->add_parts()->set_text(question);
  request.mutable_sampling()->set_max_tokens(100);
  request.mutable_sampling()->set_seed(5);
  grpc::ClientContext context;
  auto reader = stub->Generate(&context, request);
  for (GenerateResponse response; reader->Read(&response);) std::cout << response.chunk().text() << std::flush;
  if (const grpc::Status status = reader->Finish(); !status.ok()) throw std::runtime_error(status.error_message());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: with_image ADDRESS FILE QUESTION\n";
    return 2;
  }
  try {
    Run(argv[1], argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
