#!/usr/bin/env bash
# What to run first when a GPU is at hand, in the order of what its answers decide; docs/gpu.md describes the parts.
#
#     benchmarks/gpu/prepare.sh                                   before: wheels, and the kernels of before
#     benchmarks/gpu/first_run.sh                                 all parts, 540 s at most
#     benchmarks/gpu/first_run.sh --only compare,nccl --seconds 180   some parts again
#     benchmarks/gpu/first_run.sh --toy                           all parts without a GPU, in Triton's interpreter
#
# Needs torch, triton, numpy and pytest; .first_run/ has what else a machine may lack. Each part is a process with a
# timeout and files of its own; one that fails, dies or hangs harms no other. $OUT (default: .first_run/out) gets
#
#     summary.txt     a line a part, written as they end, then every figure; always there, however this ends
#     parts.tar.gz    each part's output (PART.txt) and figures (PART.json), and profiles; packed anew every 10 s
#
# since a lent machine may give back no more than 8 files. PYTHON: the interpreter, default python3. PREPARED: what
# prepare.sh filled, default .first_run. --fault PART kills that part as it starts, to see what it does to the others. Exits
# 1 if a part did not end well.
set -u
cd "$(dirname "$0")/../.."

usage() {
    sed -n '2,20s/^# \{0,1\}//p' "$0"
    exit 2
}

toy="" only="" total="" fault=""
while [ $# -gt 0 ]; do
    case "$1" in
    --toy) toy="--toy" ;;
    --only | --seconds | --fault)
        [ $# -ge 2 ] || usage
        case "$1" in --only) only="$2" ;; --seconds) total="$2" ;; *) fault="$2" ;; esac
        shift
        ;;
    *) usage ;;
    esac
    shift
done
total="${total:-$([ -n "$toy" ] && echo 1800 || echo 540)}"
# The rest of the total is for packing at the end.
deadline=$((total - 10))

python="${PYTHON:-python3}"
OUT="${OUT:-$PWD/.first_run/out}"
prepared="${PREPARED:-.first_run}"
mkdir -p "$OUT"
work="$(mktemp -d)"
tell() { echo "$*" | tee -a "$OUT/summary.txt"; }

# 0 rather than unset, so that no test falls back to the interpreter.
export TRITON_INTERPRET="$([ -n "$toy" ] && echo 1 || echo 0)"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$work/site"
# A worker tells its version, which it reads from the metadata of an installation.
version="$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml | head -n 1)"
mkdir -p "$work/site/octavo-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: octavo\nVersion: %s\n' "$version" >"$work/site/octavo-$version.dist-info/METADATA"

pack() {
    tar -czf "$work.tar.gz" --exclude=./site -C "$work" . 2>/dev/null
    mv "$work.tar.gz" "$OUT/parts.tar.gz"
}
# Detached from the output, whose reader would wait for its last sleep.
(while sleep 10; do pack; done) >/dev/null 2>&1 &
packer=$!
part_pid=""
failed=0

finish() {
    trap - EXIT INT TERM HUP
    if [ -n "$part_pid" ]; then
        kill -TERM "$part_pid" 2>/dev/null
        tell "the run was stopped in the middle of $part"
        failed=1
    fi
    kill "$packer" 2>/dev/null
    wait "$packer" 2>/dev/null
    tell "all parts: $SECONDS s of $total"
    timeout 60 "$python" -m benchmarks.gpu.first_run.summary "$work" >"$work/figures.txt" 2>&1
    cat "$work/figures.txt" >>"$OUT/summary.txt"
    pack
    rm -rf "$work"
    tail -c 9000 "$OUT/summary.txt"
    exit "$failed"
}
trap finish EXIT
trap 'failed=1; exit 1' INT TERM HUP
: >"$OUT/summary.txt"

if compgen -G "$prepared/whl/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$prepared"/whl/*.whl \
        >"$work/wheels.txt" 2>&1 || tell "wheels: not installed: $(tail -n 1 "$work/wheels.txt")"
fi

# run PART SECONDS COMMAND...: an exit code of 3 says that the machine lacks a tool.
run() {
    part="$1"
    local limit="$2" left=$((deadline - SECONDS)) began=$SECONDS code how
    shift 2
    case ",${only:-$part}," in *",$part,"*) ;; *) return ;; esac
    [ -z "$toy" ] || limit=$((limit * 4))
    if [ "$left" -lt 10 ]; then
        tell "$(printf '%-14s no time left' "$part")"
        failed=1
        return
    fi
    [ "$limit" -le "$left" ] || limit="$left"
    export LIMIT="$limit"
    if [ "$part" = "$fault" ]; then
        timeout -s KILL 0.2 "$@" >"$work/$part.txt" 2>&1 </dev/null &
    else
        timeout -k 5 "$limit" "$@" >"$work/$part.txt" 2>&1 </dev/null &
    fi
    part_pid=$!
    wait "$part_pid"
    code=$?
    part_pid=""
    case "$code" in
    0) how="done" ;;
    3) how="missing: $(tail -n 1 "$work/$part.txt")" ;;
    124) how="out of time" ;;
    *) how="failed, exit code $code: $(grep -v '^ *$' "$work/$part.txt" | tail -n 1 | cut -c 1-160)" ;;
    esac
    [ "$code" -eq 0 ] || [ "$code" -eq 3 ] || failed=1
    tell "$(printf '%-14s %4d s of %3d  %s' "$part" "$((SECONDS - began))" "$limit" "$how")"
}

# A module with run(report, toy=...), in this part's process; the report stops some seconds before the timeout.
module() {
    run "$1" "$2" bash -c 'exec "$0" -m benchmarks.gpu.processes "$1" --json "$2" --seconds $((LIMIT - 8)) $3' \
        "$python" "benchmarks.gpu.first_run.$3" "$work/$1.json" "$toy"
}

tests() {
    # First those that failed on 2026-11-26 and were mended but not repeated, then all that run kernels. Files of other
    # tests need packages that a GPU machine may lack.
    local selected all
    selected=(tests/kernels/attention/test_paged_triton.py tests/worker/gpu_models/test_families.py
        tests/integration/worker/test_gpu_worker.py tests/integration/worker/test_gpu_runner_as_cpu.py)
    mapfile -t all < <(find tests/kernels -name 'test_*triton*.py' | sort)
    run tests 70 bash -c '
        pytest=("$0" -m pytest -p no:cacheprovider -W ignore::pytest.PytestConfigWarning --tb=short
                --continue-on-collection-errors "${@:2}")
        [ -n "$1" ] || exec "${pytest[@]}" -n 12
        # All imports, and a few tests.
        "${pytest[@]}" --collect-only -q | tail -n 3
        [ "${PIPESTATUS[0]}" -eq 0 ] || exit 1
        exec "${pytest[@]}" -k "step_inputs or rms_norm"' \
        "$python" "$toy" "${selected[@]}" "${all[@]}" tests/worker/gpu tests/worker/gpu_models
}

sanitizer() {
    run sanitizer 40 bash -c '
        command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer"; exit 3; }
        for kernel in e4m3_decode fp8_gemm_one_row int4_gemm prefill; do
            compute-sanitizer --tool memcheck --error-exitcode 1 "$0" -m benchmarks.gpu.first_run.one_kernel "$kernel" \
                --small || failed=1
        done
        exit "${failed:-0}"' "$python"
}

profiles() {
    run profiles 45 bash -c '
        ncu=(ncu --set basic --section MemoryWorkloadAnalysis --section WarpStateStats --clock-control none
             --profile-from-start off --csv --page details)
        [ -z "$1" ] || ncu=()
        [ -n "$1" ] || command -v ncu >/dev/null || { echo "ncu"; exit 3; }
        for kernel in e4m3_decode fp8_gemm_one_row int4_gemm prefill; do
            "${ncu[@]}" "$0" -m benchmarks.gpu.first_run.one_kernel "$kernel" $1 || failed=1
        done
        exit "${failed:-0}"' "$python" "$toy"
}

builds() {
    local what=()
    [ -z "$toy" ] || what=(--op step_inputs)
    run builds 40 "$python" -m benchmarks.kernels.gpu_builds --arch 90 --processes "$(nproc)" --json "${what[@]}"
}

module environment 25 environment
builds
tests
run compare 125 bash -c 'exec "$0" -m benchmarks.gpu.first_run.compare --json "$1" --seconds $((LIMIT - 10)) $2' \
    "$python" "$work/compare.json" "$toy"
profiles
module models_fp8 75 models_fp8
module models_bf16 55 models_bf16
module nccl 30 one_rank
module recover 60 recover
sanitizer
