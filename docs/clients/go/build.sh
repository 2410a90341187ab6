#!/bin/sh
# Generates the messages from the .proto, then builds the programs, in the folder given (default: build). Needs go 1.19
# or newer and protoc; PROTOC sets another protoc command, such as "python -m grpc_tools.protoc".
#
# Fetches gRPC's modules. With GO111MODULE=off it takes them from Debian's packages instead: golang-google-grpc-dev,
# golang-github-golang-protobuf-1-5-dev, protoc-gen-go, protoc-gen-go-grpc.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:-$here/build}"
build=$(cd "${1:-$here/build}" && pwd)
case ${GO111MODULE:-} in
    off) source=$build/src/octavo-client-example ;;
    *) source=$build ;;
esac
mkdir -p "$source/inference" "$source/tools" "$source/image"
cp "$here/main.go" "$here/go.mod" "$source"
cp "$here/tools/main.go" "$source/tools"
cp "$here/image/main.go" "$source/image"
cd "$source"
if [ "$source" = "$build" ]; then
    GOBIN=$build/bin go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.30.0
    GOBIN=$build/bin go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.3.0
    PATH=$build/bin:$PATH
else
    export GOPATH="$build:/usr/share/gocode"
    # Older than the package credentials/insecure.
    sed -i -e '/credentials\/insecure"/d' -e 's/grpc.WithTransportCredentials(insecure.NewCredentials())/grpc.WithInsecure()/' \
        main.go tools/main.go image/main.go
fi
package=Minference.proto=octavo-client-example/inference
${PROTOC:-protoc} -I"$here/../../../protos" --go_out=inference --go_opt=paths=source_relative --go_opt=$package \
    --go-grpc_out=inference --go-grpc_opt=paths=source_relative --go-grpc_opt=$package inference.proto
if [ "$source" = "$build" ]; then
    go mod tidy
fi
go build -o "$build/client" .
go build -o "$build/with_tools" ./tools
go build -o "$build/with_image" ./image
