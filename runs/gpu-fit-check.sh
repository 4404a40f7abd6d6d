#!/usr/bin/env bash
# Trains on the bundled model's states on the CPU and on GPUs, compares the loss curves, continues a
# run bit for bit, and trains by two processes, which share a GPU where there is one only. Prints a
# short table last.
#
#   runs/gpu-fit-check.sh FOLDER [several]
#
# `several` leaves out what one process does alone. FOLDER holds the binaries `extractor` and
# `trainer`. Logs go to $AERIE_LOGS, or to a new folder under /tmp. Exit code: 0 if everything passed.
set -uo pipefail

bin=$(cd "${1:?a folder with the binaries}" && pwd) || exit 78
part=${2:-all}
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-fit.XXXXXX)}
. runs/steps.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for dtype in bf16 fp8; do
    step "extract $dtype" 60 'tokens in' "$bin/extractor" run --model models/nano-kimi --device cuda \
        --prompts data/prompts.jsonl --max-tokens 1024 --dtype $dtype --dataset "$work/data-$dtype"
done

fit=(--held-out 0.1 --max-tokens 2048 --draft-vocab-size 2048 --ttt-steps 4 --lr 2e-3 --epochs 20
    --max-steps 200 --checkpoint-every 100 --keep-last 9 --eval-every 100)
# train NAME DTYPE FLAGS...
train() {
    local name=$1 dtype=$2
    shift 2
    step "fit $name" 240 'acceptance length' "$bin/trainer" fit "${fit[@]}" \
        --dataset "$work/data-$dtype" --run-dir "$work/$name" "$@"
}
# The largest relative difference of two runs' losses has to be below a tolerance.
compare() {
    local name=$1 other=$2 tolerance=$3
    losses() { grep -o '"train/loss":[0-9.e-]*' "$work/$1/metrics.jsonl" | cut -d: -f2; }
    step "losses of $name and $other" 10 worst awk -v tolerance="$tolerance" '
        { d = ($1 - $2) / $2; d = d < 0 ? -d : d; if (d > worst) worst = d; n++ }
        END { print "worst difference " worst + 0 " of " n " steps"; exit !(n == 200 && worst < tolerance) }
    ' <(paste <(losses "$name") <(losses "$other"))
}

# continued NAME: the run from its middle on, again; every byte has to be the same.
continued() {
    mkdir -p "$work/again-$1/checkpoints"
    cp -r "$work/$1/checkpoints/step-00000100" "$work/again-$1/checkpoints/"
    cp "$work/$1/metrics.jsonl" "$work/again-$1/"
    step "continue $1" 120 'acceptance length' "$bin/trainer" fit --resume "$work/again-$1" --device cuda
    for file in weights optimizer; do
        step "$1 $file bit for bit" 10 nothing cmp "$work/$1/checkpoints/step-00000200/$file.safetensors" \
            "$work/again-$1/checkpoints/step-00000200/$file.safetensors"
    done
}
if [ "$part" != several ]; then
    train cpu bf16
    train cuda-f32 bf16 --device cuda --compute f32
    train cuda-bf16 bf16 --device cuda
    train cpu-fp8 fp8
    train cuda-fp8 fp8 --device cuda --compute f32
    compare cuda-f32 cpu 0.01
    compare cuda-bf16 cpu 0.01
    compare cuda-fp8 cpu-fp8 0.01
    for seed in 1 2; do
        train cpu-seed-$seed bf16 --seed $seed
        train cuda-seed-$seed bf16 --seed $seed --device cuda
        compare cuda-seed-$seed cpu-seed-$seed 0.01
    done
    for name in noise norms lk; do
        flags=$([ $name = lk ] && echo --loss lk --ema 0.99 || echo)
        [ $name = noise ] && flags="--noise 0.05 --noise-kind normal"
        [ $name = norms ] && flags="--fc-norm --norm-output"
        train $name bf16 --device cuda $flags
    done
    for name in cuda-bf16 lk noise; do continued $name; done
fi

# place RANK SIZE COMMAND...: one process as torchrun starts it, each on its own GPU as long as there are
# enough. NCCL refuses two processes on one GPU of one host; where they share one it is told that they
# are hosts of their own, which talk through sockets.
place() {
    local rank=$1 size=$2
    shift 2
    local -x RANK=$rank WORLD_SIZE=$size LOCAL_RANK=$((rank % gpus))
    if [ "$gpus" -lt "$size" ]; then
        local -x NCCL_HOSTID=host-$rank NCCL_SOCKET_IFNAME=lo
    fi
    "$@"
}
# processes SIZE COMMAND...: all but the first, whose place is given to `step` below, in the background.
processes() {
    local size=$1 rank
    shift
    pids=()
    for ((rank = 1; rank < size; rank++)); do
        place $rank "$size" timeout 240 "$@" >"$logs/rank-$rank.log" 2>&1 &
        pids+=($!)
    done
}
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29517
# all PATTERN SIZE NAME COMMAND...: every process has to end well.
all() {
    local pattern=$1 size=$2 name=$3 pid
    shift 3
    processes "$size" "$@"
    place 0 "$size" step "$name" 240 "$pattern" "$@"
    for pid in "${pids[@]}"; do wait "$pid" || { failed=1; tail -3 "$logs"/rank-*.log; }; done
}
# exchange WAY SIZE
exchange() {
    all gather "$2" "exchange by $1 of $2" "$bin/trainer" check --exchange "$1" --device cuda --compute bf16
}
# together WAY NAME FLAGS...: two processes
together() {
    local way=$1 name=$2
    shift 2
    all 'acceptance length' 2 "fit $name" "$bin/trainer" fit "${fit[@]}" --accumulate 2 --exchange "$way" \
        --dataset "$work/data-bf16" --run-dir "$work/$name" --device cuda "$@"
}
train one-f32 bf16 --device cuda --compute f32 --accumulate 2
train one-bf16 bf16 --device cuda --accumulate 2
for way in copies nccl; do
    exchange $way 2
    exchange $way 3
    together $way two-f32-$way --compute f32
    compare two-f32-$way one-f32 0.001
    together $way two-bf16-$way
    compare two-bf16-$way one-bf16 0.01
done

finish
exit $failed
