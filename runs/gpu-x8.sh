#!/usr/bin/env bash
# Every GPU of one host at once: goldens, one rank's shape with real sums, an extraction, the
# data-parallel trainer. Prints a short table last; at most 9 minutes on eight H200.
#
#   runs/gpu-x8.sh FOLDER
#
# FOLDER holds the binaries `extractor` and `trainer` (cargo build --release), and if the end of a run
# with a failing rank is to be seen the extractor's tests as `extractor_tests`
# (cargo test --release -p extractor --lib --no-run). Runs with as many ranks as there
# are GPUs. $AERIE_FORMATS may name a folder with nano-kimi-bf16, nano-kimi-fp8, nano-kimi-nvfp4 and
# golden/nano_kimi_{bf16,fp8,nvfp4}.safetensors. Logs go to $AERIE_LOGS, or to a new folder under /tmp.
# Exit code: 0 if everything passed.
set -uo pipefail

bin=$(cd "${1:?a folder with the binaries}" && pwd) || exit 78
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-x8.XXXXXX)}
. runs/steps.sh
models=${AERIE_FORMATS:-}

# every_rank COMMAND...: the command once a GPU, as torchrun starts it; the first rank's output.
every_rank() {
    local rank pids=() code=0 pid
    export WORLD_SIZE=$gpus MASTER_ADDR=127.0.0.1 MASTER_PORT=29517
    for ((rank = 1; rank < gpus; rank++)); do
        RANK=$rank LOCAL_RANK=$rank "$@" >"$logs/rank-$rank.log" 2>&1 &
        pids+=($!)
    done
    RANK=0 LOCAL_RANK=0 "$@" || code=$?
    for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
    return $code
}

check() {
    local model=$1 golden=$2 name=$3 compute tp
    for compute in f32 bf16; do
        for tp in 1 "$gpus"; do
            step "$name $compute tp$tp" 60 '^worst' "$bin/extractor" check --model "$model" \
                --golden "$golden" --device cuda --compute "$compute" --tp "$tp"
        done
    done
}

check models/nano-kimi tests/fixtures/golden/nano_kimi_int4.safetensors int4
for format in bf16 fp8 nvfp4; do
    [ -d "$models/nano-kimi-$format" ] || continue
    check "$models/nano-kimi-$format" "$models/golden/nano_kimi_$format.safetensors" $format
done

for tokens in 32768 65536; do
    for exchange in nccl copies; do
        name="kimi-k2.5 $gpus GPUs $exchange $tokens"
        step "$name" 120 '^layers|^node' "$bin/extractor" bench --device cuda --shape kimi-k2.5 \
            --layers 6 --of "$gpus" --gpus "$gpus" --tokens $tokens --seq-len 2048 \
            --exchange $exchange
        cat "$logs/${name// /-}.log"
    done
done

dataset=$logs/dataset
# Equal conversations would be taken once: each copy gets a number.
for copy in 1 2 3 4 5; do
    sed "s/\"content\": \"/&$copy. /" data/prompts.jsonl
done >"$logs/prompts.jsonl"
step "extract 2000" 120 'samples' "$bin/extractor" run --config configs/nano-kimi.toml --device cuda \
    --tp "$gpus" --prompts "$logs/prompts.jsonl" --batch-tokens 32768 --dataset "$dataset"
step "audit 2000" 60 . "$bin/extractor" audit "$dataset"
[ -x "$bin/extractor_tests" ] && step "a rank fails" 90 'test result' "$bin/extractor_tests" \
    --ignored --exact pipeline::tests::on_a_gpu_too_a_rank_that_dies_ends_the_run_with_75

if [ -x "$bin/trainer" ]; then
    export -f every_rank
    export gpus logs
    step "trainer bench $gpus" 150 '^tokens' bash -c 'every_rank "$@"' every_rank \
        "$bin/trainer" bench --device cuda --hidden 7168 --intermediate 18432 --heads 64 \
        --kv-heads 64 --head-dim 128 --vocab 163840 --draft-vocab 32000 --steps 7 --repeat 5 \
        --tokens 4096 --document 4096 --answer-fraction 1
    cat "$logs/trainer-bench-$gpus.log"
fi

finish
grep -hE '^node' "$logs"/kimi*.log 2>/dev/null
exit $failed
