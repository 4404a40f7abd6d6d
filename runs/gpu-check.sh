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
#
# Further number formats are checked where $AERIE_FORMATS names a folder with nano-kimi-FORMAT/ and
# golden/nano_kimi_FORMAT.safetensors. $AERIE_PROMPTS, a file of conversations, is extracted with
# nano-kimi and audited.
set -uo pipefail

bin=$(cd "${1:?a folder with the binaries}" && pwd) || exit 78
part=${2:-all}
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-check.XXXXXX)}
. runs/steps.sh

# check MODEL GOLDEN COMPUTE TP EXCHANGE [MORE...]
check() {
    local model=$1 golden=$2 compute=$3 tp=$4 exchange=$5 name
    shift 5
    name=$(basename "$golden" .safetensors)
    step "$name $compute tp$tp $exchange${*:+ ${*#--}}" 180 '^worst' "$bin/extractor" check \
        --device cuda --model "$model" --golden "$golden" --compute "$compute" --tp "$tp" \
        --exchange "$exchange" "$@"
}
# Everything for a number of ranks and a way between them.
check_all() {
    local tp=$1 exchange=$2 compute batches model format
    for compute in f32 bf16; do
        # A batch of many equals batches of one: both equal the goldens.
        for batches in "" --together; do
            check models/nano-kimi $golden/nano_kimi_int4.safetensors $compute $tp $exchange $batches
            check tests/fixtures/tiny-odd $golden/tiny_odd.safetensors $compute $tp $exchange $batches
            check tests/fixtures/tiny-qwen3-moe $golden/tiny_qwen3_moe.safetensors $compute $tp $exchange \
                $batches
            check tests/fixtures/stories260k $golden/stories260k.safetensors $compute $tp $exchange \
                $batches
        done
        for model in ${AERIE_FORMATS:+"$AERIE_FORMATS"/nano-kimi-*}; do
            format=${model##*-}
            check "$model" "$AERIE_FORMATS/golden/nano_kimi_$format.safetensors" $compute $tp $exchange
        done
    done
}

if [ "$part" != benches ]; then
    [ -x "$bin/cuda_check" ] && step kernels 400 'passed|failed|checks' "$bin/cuda_check"
    # Tests of the extractor that ask for a GPU: cargo test --release -p extractor --lib --no-run
    [ -x "$bin/extractor_tests" ] && step "faults and fp8" 200 '^test result' \
        "$bin/extractor_tests" --ignored --test-threads 1 --nocapture
    golden=tests/fixtures/golden
    check_all 1 nccl
    [ "$gpus" -ge 2 ] && check_all 2 nccl
    # On one GPU, two ranks share it.
    export AERIE_RANKS_SHARE_GPU=$((gpus < 2))
    check_all 2 copies
    export AERIE_RANKS_SHARE_GPU=0
    if [ -n "${AERIE_PROMPTS:-}" ]; then
        states=$(mktemp -d)
        step "extract" 600 'samples|tokens' "$bin/extractor" run --device cuda \
            --model models/nano-kimi --prompts "$AERIE_PROMPTS" --dataset "$states/data" \
            --batch-tokens 32768 --max-tokens 1024
        step "audit" 300 'clean|finding' "$bin/extractor" audit "$states/data"
        rm -rf "$states"
    fi
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
            for exchange in nccl copies; do
                bench "kimi-k2.5 two GPUs $exchange $tokens" --shape kimi-k2.5 --layers 4 --of 8 \
                    --gpus 2 --exchange $exchange --tokens $tokens --seq-len 2048
            done
        done
    fi
fi

finish
grep -hE '^node' "$logs"/kimi*.log 2>/dev/null
exit $failed
