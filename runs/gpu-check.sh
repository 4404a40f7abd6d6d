#!/usr/bin/env bash
# Checks and benches everything that needs a GPU, and prints a short table last.
#
#   runs/gpu-check.sh FOLDER [checks|benches]
#
# FOLDER holds the binaries `extractor` and, if kernels are to be checked alone, `cuda_check`:
#   cargo build --release -p extractor && cargo build --release -p kernels --example cuda_check
# Logs go to $AERIE_LOGS, or to a new folder under /tmp. Exit code: 0 if everything passed.
set -uo pipefail

bin=$(cd "${1:?a folder with the binaries}" && pwd) || exit 78
part=${2:-all}
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-check.XXXXXX)}
. runs/steps.sh

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

finish
grep -hE '^node' "$logs"/kimi*.log 2>/dev/null
exit $failed
