#!/bin/sh
# Generates the messages from the .proto, then builds the programs, in the folder given (default: build). Needs go 1.19
# or newer and protoc; PROTOC sets another protoc command, such as "python -m grpc_tools.protoc".
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=${1:-$here/build}
mkdir -p "$build/inference" "$build/bin" "$build/tools" "$build/image"
cp "$here/main.go" "$here/go.mod" "$build"
cp "$here/tools/main.go" "$build/tools"
cp "$here/image/main.go" "$build/image"
cd "$build"
GOBIN=$build/bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.30.0
GOBIN=$build/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.3.0
package=Minference.proto=octavo-client-example/inference
PATH=$build/bin:$PATH ${PROTOC:-protoc} -I"$here/../../../protos" --go_out=inference --go_opt=paths=source_relative \
    --go_opt=$package --go-grpc_out=inference --go-grpc_opt=paths=source_relative --go-grpc_opt=$package inference.proto
go mod tidy
go build -o client .
go build -o with_tools ./tools
go build -o with_image ./image
