#!/usr/bin/env bash
# Checks and benches everything that needs a GPU, and prints a short table last.
#
#   runs/gpu-check.sh FOLDER [checks|benches]
#
# FOLDER holds the binaries `extractor` and, if kernels are to be checked alone, `cuda_check`:
#   cargo build --release -p extractor && cargo build --release -p kernels --example cuda_check
# and, if faults are to be tried, `extractor_tests`, which this builds:
#   cargo test --release -p extractor --lib --no-run
# Logs go to $AERIE_LOGS, or to a new folder under /tmp. Exit code: 0 if everything passed.
set -uo pipefail

bin=$(cd "${1:?a folder with the binaries}" && pwd) || exit 78
part=${2:-all}
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-check.XXXXXX)}
mkdir -p "$logs"
export AERIE_KERNEL_CACHE=${AERIE_KERNEL_CACHE:-$logs/kernels}
export RUST_LOG=${RUST_LOG:-info}
# Multicast over NVLink can put the GPUs of a shared host out of service.
export NCCL_NVLS_ENABLE=0

# The libraries of NVIDIA's wheels carry a version in their names only.
links=$(mktemp -d)
places=(/usr/local/cuda/lib64 /usr/lib/x86_64-linux-gnu)
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)
[ -n "$site" ] && places+=("$site/nvidia/cu13/lib" "$site/nvidia/nccl/lib" "$site/nvidia/cublas/lib"
    "$site/nvidia/cuda_nvrtc/lib")
path=$links
for place in "${places[@]}"; do
    [ -d "$place" ] || continue
    path=$path:$place
    for library in cublasLt nvrtc nccl; do
        [ -e "$links/lib$library.so" ] && continue
        found=$(ls "$place"/lib$library.so* 2>/dev/null | grep -v alt | sort | tail -1)
        [ -n "$found" ] && ln -s "$found" "$links/lib$library.so"
    done
done
export LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
echo "GPUs: $gpus; libraries: $(cd "$links" && for l in *; do readlink "$l"; done | tr '\n' ' ')"

table=$logs/table.txt
: >"$table"
failed=0

# step NAME SECONDS PATTERN COMMAND...: the last line that matches PATTERN goes to the table.
step() {
    local name=$1 limit=$2 pattern=$3 log start code said took
    shift 3
    log=$logs/${name// /-}.log
    start=$(date +%s%N)
    echo "== $name: $*"
    timeout "$limit" "$@" >"$log" 2>&1
    code=$?
    took=$(( ($(date +%s%N) - start) / 100000000 ))
    took=$((took / 10)).$((took % 10))
    said=$(grep -E "$pattern" "$log" | tail -1 | cut -c1-150)
    if [ $code -eq 0 ]; then
        printf 'pass     %-34s %6.1f s  %s\n' "$name" "$took" "$said"
    else
        failed=1
        printf 'FAIL %3d %-34s %6.1f s  %s\n' $code "$name" "$took" \
            "${said:-$(grep -E 'ERROR|error|panic' "$log" | tail -1 | cut -c1-200)}"
        echo "-- the end of $log:"
        tail -25 "$log"
    fi >>"$table.step"
    cat "$table.step"
    grep -E '^(pass|FAIL)' "$table.step" >>"$table"
    rm -f "$table.step"
}

check() {
    local model=$1 golden=$2 compute=$3 tp=$4
    step "$golden $compute tp$tp" 180 '^worst' "$bin/extractor" check --model "$model" \
        --golden "tests/fixtures/golden/$golden.safetensors" --device cuda --compute "$compute" \
        --tp "$tp"
}

ranks=1
[ "$gpus" -ge 2 ] && ranks="1 2"

if [ "$part" != benches ]; then
    [ -x "$bin/cuda_check" ] && step kernels 400 'passed|failed|checks' "$bin/cuda_check"
    # Tests of the extractor that ask for a GPU: cargo test --release -p extractor --lib --no-run
    [ -x "$bin/extractor_tests" ] && step "faults and fp8" 200 '^test result' \
        "$bin/extractor_tests" --ignored --test-threads 1 --nocapture
    for tp in $ranks; do
        for compute in f32 bf16; do
            check models/nano-kimi nano_kimi_int4 $compute "$tp"
            check tests/fixtures/tiny-odd tiny_odd $compute "$tp"
            check tests/fixtures/stories260k stories260k $compute "$tp"
        done
    done
fi

if [ "$part" != checks ]; then
    bench() {
        local name=$1
        shift
        step "$name" 240 '^layers|^node' "$bin/extractor" bench --device cuda "$@"
        cat "$logs/${name// /-}.log"
    }
    bench "nano-kimi 32k" --model models/nano-kimi --tokens 32768 --seq-len 512
    for tokens in 32768 65536; do
        bench "kimi-k2.5 rank $tokens" --shape kimi-k2.5 --layers 4 --as-rank 0 --of 8 \
            --tokens $tokens --seq-len 2048
    done
    if [ "$gpus" -ge 2 ]; then
        for tokens in 32768 65536; do
            bench "kimi-k2.5 two GPUs $tokens" --shape kimi-k2.5 --layers 4 --of 8 --gpus 2 \
                --tokens $tokens --seq-len 2048
        done
    fi
fi

echo
echo "== $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
cat "$table"
grep -hE '^node' "$logs"/kimi*.log 2>/dev/null
exit $failed
