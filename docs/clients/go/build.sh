#!/bin/sh
# Generates the messages from the .proto, then builds the programs, in the folder given (default: build). Needs go 1.19
# or newer and protoc; PROTOC sets another protoc command, such as "python -m grpc_tools.protoc". Modules are fetched. With
# DEBIAN=1 the packages golang-google-grpc-dev and golang-google-protobuf-dev of Debian and Ubuntu are used instead.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:-$here/build}/bin"
build=$(cd "${1:-$here/build}" && pwd)
if [ -n "${DEBIAN:-}" ]; then
    export GO111MODULE=off GOPATH="$build/gopath:/usr/share/gocode"
    sources=$build/gopath/src/octavo-client-example
else
    sources=$build
fi
mkdir -p "$sources/inference" "$sources/tools" "$sources/image"
cp "$here/main.go" "$here/go.mod" "$sources"
cp "$here/tools/main.go" "$sources/tools"
cp "$here/image/main.go" "$sources/image"
cd "$sources"
if [ -n "${DEBIAN:-}" ]; then
    go build -o "$build/bin" google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
else
    GOBIN=$build/bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.30.0
    GOBIN=$build/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.3.0
fi
package=Minference.proto=octavo-client-example/inference
PATH=$build/bin:$PATH ${PROTOC:-protoc} -I"$here/../../../protos" --go_out=inference --go_opt=paths=source_relative \
    --go_opt=$package --go-grpc_out=inference --go-grpc_opt=paths=source_relative --go-grpc_opt=$package inference.proto
[ -n "${DEBIAN:-}" ] || go mod tidy
go build -o "$build/client" .
go build -o "$build/with_tools" ./tools
go build -o "$build/with_image" ./image
