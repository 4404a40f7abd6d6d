#!/usr/bin/env bash
# Trains drafts for SmolLM2-135M-Instruct on its own answers and measures their acceptance; prints a
# table last.
#
#   runs/smollm2.sh BIN MODEL CONVERSATIONS EVALUATION WORK [SEEDS]
#
# BIN            folder with the binaries `extractor` and `trainer`
# MODEL          the model's directory (HuggingFaceTB/SmolLM2-135M-Instruct: config.json, tokenizer.json,
#                tokenizer_config.json, generation_config.json, model.safetensors)
# CONVERSATIONS  JSONL rows with `conversations` whose answers the model wrote, `truncated` where the
#                answer was cut off (then its end is not trained)
# EVALUATION     JSON list of the model's greedy answers: `set`, `prompt` and `answer` token ids, `loops`
#                where the answer repeats itself (left out)
# WORK           a folder for data sets and runs: about 20 GB
# SEEDS          how many seeds each variant is trained with; 2 by default
#
# From the environment: DEVICE (cuda), EPOCHS (3.6), VARIANTS (names below; all), GPUS (that drafts are
# trained on in turn; 1), JOBS (drafts trained at a time, which lowers the tokens/s of each on a shared GPU; 1),
# FIT (more flags of `trainer fit` for all variants), LIMIT (lines of CONVERSATIONS; all), LIVE (prompts of each
# set decoded live with the best draft; 20). What is there already is not done again. Everything runs without a
# network. Exit code: 0 if every step passed.
set -euo pipefail

[ $# -ge 5 ] || { sed -n '5,23p' "$0"; exit 2; }
bin=$(cd "$1" && pwd) model=$(cd "$2" && pwd) conversations=$(realpath "$3") evaluation=$(realpath "$4")
mkdir -p "$5"
work=$(cd "$5" && pwd)
seeds=${6:-2}
device=${DEVICE:-cuda}
sets=(mt_bench gsm8k humaneval)

# The shape of the draft, and a schedule over the same number of passes for every variant.
shape=(--draft-vocab-size 8192 --ttt-steps 7 --step-decay 0.8 --warmup-steps 50
    --max-tokens 4096 --lr 2e-3 --held-out 0.01 --verify never --prefetch 8 --checkpoint-every 100000
    --eval-every 100000)
variant() {
    case $1 in
    base) ;;
    lk) echo --loss lk ;;
    norms) echo --fc-norm --norm-output ;;
    norms-lk | long) echo --fc-norm --norm-output --loss lk ;;
    *) echo "unknown variant $1" >&2; return 2 ;;
    esac
}

# Passes over the samples: twice as many for `long`.
passes() {
    awk -v passes="${EPOCHS:-3.6}" -v name="$1" 'BEGIN { print name == "long" ? 2 * passes : passes }'
}

extract() {
    local out=$1
    shift
    "$bin/extractor" run --model "$model" --device "$device" --layers 1,14,26,29 --max-tokens 1024 \
        --dataset "$out" "$@"
}

echo "== states of the conversations"
time extract "$work/train" --prompts "$conversations" --batch-tokens 32768 ${LIMIT:+--limit "$LIMIT"}
"$bin/extractor" audit "$work/train" --verify all

echo "== states of the greedy answers"
python3 - "$evaluation" "$work" <<'PY'
import collections, json, sys
rows = collections.defaultdict(list)
for answer in json.load(open(sys.argv[1])):
    if not answer["loops"]:
        mask = [0] * len(answer["prompt"]) + [1] * len(answer["answer"])
        row = {"input_ids": answer["prompt"] + answer["answer"], "loss_mask": mask}
        rows[answer["set"]].append(json.dumps(row) + "\n")
for name, lines in rows.items():
    open(f"{sys.argv[2]}/{name}.jsonl", "w").writelines(lines)
PY
for set in "${sets[@]}"; do
    extract "$work/eval-$set" --prompts "$work/$set.jsonl"
done

table=$work/table.txt
printf '%-8s %4s %6s %8s' variant seed steps tokens/s >"$table"
for set in "${sets[@]}"; do printf ' %11s' "$set" >>"$table"; done
printf '   by position, chain of 3\n' >>"$table"

# number FILE KEY: the value of a key at the top of a JSON object on one line.
number() { grep -oE "\"$2\":[0-9.e+-]+" "$1" | head -1 | cut -d: -f2; }

measure() {
    local name=$1 seed=$2 run=$work/run-$1-$2 row
    row=$(printf '%-8s %4s %6s %8.0f' "$name" "$seed" "$(number "$run.json" steps)" \
        "$(echo "$(number "$run.json" tokens) $(number "$run.json" seconds)" | awk '{print $1 / $2}')")
    local rates=""
    for set in "${sets[@]}"; do
        local said=$work/chain-$name-$seed-$set.json
        "$bin/trainer" evaluate "$run" --dataset "$work/eval-$set" --all --chain 3,7 --json >"$said" 2>/dev/null
        row+=$(python3 -c '
import json, sys
three, seven = json.load(open(sys.argv[1]))["chains"]
print(" %5.3f/%5.3f" % (three["acceptance_length"], seven["acceptance_length"]))' "$said")
        rates+=$(python3 -c '
import json, sys
print("  " + " ".join("%.3f" % r for r in json.load(open(sys.argv[1]))["chains"][0]["acceptance_rate"]))' "$said")
    done
    echo "$row $rates" | tee -a "$table"
}

train() {
    local name=$1 seed=$2 run=$work/run-$1-$2 flags more
    read -ra flags <<<"$(variant "$name")"
    read -ra more <<<"${FIT:-}"
    if [ ! -s "$run.json" ]; then
        echo "== $name, seed $seed: ${flags[*]} ${more[*]}"
        "$bin/trainer" fit --dataset "$work/train" --device "$device" --run-dir "$run" --seed "$seed" \
            --epochs "$(passes "$name")" "${shape[@]}" "${flags[@]}" "${more[@]}" --json >"$run.json" 2>"$run.log" ||
            { tail -3 "$run.log"; rm -f "$run.json"; return 1; }
    fi
    measure "$name" "$seed"
}

failed=0 started=0
for name in ${VARIANTS:-long base lk norms norms-lk}; do
    for seed in $(seq 1 "$seeds"); do
        while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-1}" ]; do wait -n || failed=1; done
        [ "${GPUS:-1}" -gt 1 ] && export CUDA_VISIBLE_DEVICES=$((started++ % GPUS))
        train "$name" "$seed" &
    done
done
while [ -n "$(jobs -rp)" ]; do wait -n || failed=1; done

if [ "${LIVE:-20}" -gt 0 ]; then
    best=$work/run-$(tail -n +2 "$table" | sort -rk6 | awk 'NR == 1 { print $1 "-" $2 }')
    for set in "${sets[@]}"; do
        echo "== live, $set: $best"
        "$bin/trainer" evaluate "$best" --live --model "$model" --device "$device" \
            --prompts "$work/$set.jsonl" --limit "${LIVE:-20}" --max-new-tokens 128 || failed=1
    done
    [ -d "$work/export" ] || "$bin/trainer" export "$best" "$work/export"
fi

echo
echo "chain of 3 / chain of 7, bonus token included; asked for: 5 % above 1.792, 2.349, 1.847"
cat "$table"
exit $failed
