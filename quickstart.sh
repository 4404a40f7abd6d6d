#!/usr/bin/env bash
# The main job on the bundled model: conversations -> hidden states and manifest -> audit ->
# trained draft head -> acceptance on held-out conversations -> a checkpoint for vLLM and SGLang.
# Usage: ./quickstart.sh [OUT_DIR]     needs a Rust toolchain and a C compiler, nothing else
set -euo pipefail
cd "$(dirname "$0")"

out="${1:-out/quickstart}"
if [ -e "$out" ]; then
    echo "$out exists: remove it or name another folder" >&2
    exit 2
fi
mkdir -p "$out"

cargo build --release --locked --bin extractor --bin trainer
bin="${CARGO_TARGET_DIR:-target}/release"
started=$SECONDS

echo "== hidden states of 400 conversations through nano-kimi at TP=8"
"$bin/extractor" run --config configs/nano-kimi.toml --dataset "$out/dataset"
"$bin/extractor" audit "$out/dataset" --verify all

echo "== draft head"
"$bin/trainer" fit --config configs/nano-kimi-fit.toml --dataset "$out/dataset" --run-dir "$out/run"

echo "== acceptance on held-out conversations"
"$bin/trainer" evaluate "$out/run" --dataset "$out/dataset" | tee "$out/acceptance.txt"
"$bin/trainer" evaluate "$out/run" --live --model models/nano-kimi --prompts data/held_out.jsonl --max-new-tokens 64 \
    | tee "$out/live.txt"

echo "== checkpoint for vLLM and SGLang"
"$bin/trainer" export "$out/run" "$out/draft" --layout llama

echo
echo "done in $((SECONDS - started)) s:"
echo "  data set      $out/dataset      (sqlite3 $out/dataset/manifest.sqlite 'SELECT * FROM v_shards')"
echo "  training run  $out/run          (metrics.jsonl, checkpoints)"
echo "  draft head    $out/draft        (config.json, model.safetensors)"
