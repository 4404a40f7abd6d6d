#!/usr/bin/env bash
# Checks and benches the trainer on a GPU, and prints a short table last.
#
#   runs/gpu-train-check.sh FOLDER [checks|benches]
#
# FOLDER holds the binary `trainer`: cargo build --release -p trainer && strip target/release/trainer
# and, if it is there, `trainer_tests`.
# With a data set in $AERIE_DATASET, 50 steps are trained too. Logs go to $AERIE_LOGS, or to a new
# folder under /tmp. Exit code: 0 if everything passed.
set -uo pipefail

bin=$(cd "${1:?a folder with the binary}" && pwd) || exit 78
part=${2:-all}
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-train.XXXXXX)}
. runs/steps.sh

# The largest difference of a log of `trainer check`.
worst() {
    local value
    value=$(grep -E '^  .*[0-9]e-?[0-9]+' "$logs/${1// /-}.log" | sed 's/  above.*//' |
        awk '{ print $NF, $0 }' | sort -g | tail -1 | cut -d' ' -f2- | tr -s ' ')
    echo "         worst: $value" | tee -a "$table"
}

if [ "$part" != benches ]; then
    goldens=(tests/fixtures/ttt_*.safetensors)
    step "operations f32" 180 nothing "$bin/trainer" check --ops --device cuda --compute f32
    worst "operations f32"
    step "goldens f32" 180 nothing "$bin/trainer" check --device cuda --golden "${goldens[@]}"
    worst "goldens f32"
    step "goldens f32 dense" 180 nothing "$bin/trainer" check --device cuda --dense --golden "${goldens[@]}"
    worst "goldens f32 dense"
    step "operations bf16" 180 nothing "$bin/trainer" check --ops --device cuda --compute bf16
    worst "operations bf16"
    step "cosines bf16" 180 nothing "$bin/trainer" check --cosines --device cuda --compute bf16
    worst "cosines bf16"
    # Tests of the trainer that ask for a GPU: cargo test --release -p trainer --lib --no-run
    [ -x "$bin/trainer_tests" ] && step "a GPU that breaks" 120 '^test result' \
        "$bin/trainer_tests" --ignored --test-threads 1
    if [ -n "${AERIE_DATASET:-}" ]; then
        fit=(--dataset "$AERIE_DATASET" --max-steps 50 --warmup-steps 5 --lr 1e-3)
        step "fit cpu" 300 'acceptance length' "$bin/trainer" fit "${fit[@]}" --run-dir "$logs/run-cpu"
        step "fit cuda f32" 300 'acceptance length' "$bin/trainer" fit "${fit[@]}" --device cuda \
            --compute f32 --run-dir "$logs/run-f32"
        step "fit cuda bf16" 300 'acceptance length' "$bin/trainer" fit "${fit[@]}" --device cuda \
            --run-dir "$logs/run-bf16"
    fi
fi

if [ "$part" != checks ]; then
    kimi=(--hidden 7168 --intermediate 18432 --heads 64 --kv-heads 64 --head-dim 128 --vocab 163840
        --draft-vocab 32000 --steps 7 --repeat 5)
    bench() {
        local name=$1
        shift
        step "$name" 240 '^tokens' "$bin/trainer" bench --device cuda "${kimi[@]}" "$@"
        cat "$logs/${name// /-}.log"
    }
    bench "kimi 2048 all" --tokens 2048 --document 2048 --answer-fraction 1
    bench "kimi 4096 all" --tokens 4096 --document 4096 --answer-fraction 1
    bench "kimi 4096 half" --tokens 4096 --document 4096 --answer-fraction 0.5
fi

finish
exit $failed
