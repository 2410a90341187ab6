#!/bin/sh
# Generates *_pb2* beside each .proto file, into the given folder (default: the repository itself).
# tests/repository/test_protos_drift.py runs this script into a temporary folder and compares.
set -eu
cd "$(dirname "$0")/.."
out=${1:-.}
python=${PYTHON:-.venv/bin/python}
"$python" -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
    protos/*.proto router/compat/protos/*.proto
# Only files with a service need the gRPC module.
rm -f "$out"/protos/step_pb2_grpc.py "$out"/protos/coordination_pb2_grpc.py "$out"/protos/status_pb2_grpc.py
