#!/usr/bin/env bash
# Times the vLLM that benchmarks/gpu/vllm/prepare.py packed, on a machine with one Hopper GPU and torch 2.11:
#
#     benchmarks/gpu/vllm/measure.sh          $OUT/vllm.jsonl (default: .first_run/out), a line for each figure
#
# 8B with fp8 weights and KV first, then bf16; each in a process with a timeout, since torch.compile and the capture of
# graphs take 60 to 120 s of a configuration (predicted). LIMIT: seconds for each, default 250.
set -u
cd "$(dirname "$0")/../../.."
python="${PYTHON:-python3}"
OUT="${OUT:-$PWD/.first_run/out}"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
mkdir -p "$OUT"
tar -xJf .first_run/vllm/vllm.tar.xz -C "$site" || exit 1
"$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" .first_run/vllm/*.whl || exit 1
failed=0
for variant in fp8 bf16; do
    # vLLM's processes find it through the environment.
    PYTHONPATH="$site:$PWD" timeout -k 5 "${LIMIT:-250}" "$python" -m benchmarks.gpu.vllm.measure "$variant" \
        >>"$OUT/vllm.jsonl" 2>>"$OUT/vllm.txt" || failed=1
done
cat "$OUT/vllm.jsonl"
exit "$failed"
