#!/usr/bin/env bash
# Checks and benches the trainer on a GPU, and prints a short table last.
#
#   runs/gpu-train-check.sh FOLDER [checks|benches]
#
# FOLDER holds the binary `trainer`: cargo build --release -p trainer && strip target/release/trainer
# With a data set in $AERIE_DATASET, 50 steps are trained too. Logs go to $AERIE_LOGS, or to a new
# folder under /tmp. Exit code: 0 if everything passed.
set -uo pipefail

bin=$(cd "${1:?a folder with the binary}" && pwd) || exit 78
part=${2:-all}
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-train.XXXXXX)}
mkdir -p "$logs"
export AERIE_KERNEL_CACHE=${AERIE_KERNEL_CACHE:-$logs/kernels}

# The libraries of NVIDIA's wheels carry a version in their names only.
links=$(mktemp -d)
places=(/usr/local/cuda/lib64 /usr/lib/x86_64-linux-gnu)
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null)
[ -n "$site" ] && places+=("$site/nvidia/cu13/lib" "$site/nvidia/cublas/lib"
    "$site/nvidia/cuda_nvrtc/lib")
path=$links
for place in "${places[@]}"; do
    [ -d "$place" ] || continue
    path=$path:$place
    for library in cublasLt nvrtc; do
        [ -e "$links/lib$library.so" ] && continue
        found=$(ls "$place"/lib$library.so* 2>/dev/null | grep -v alt | sort | tail -1)
        [ -n "$found" ] && ln -s "$found" "$links/lib$library.so"
    done
done
export LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Headers for the kernels that burn compiles.
if [ -z "${CUDA_PATH:-}" ] && [ ! -d /usr/local/cuda/include ] && [ -d "$site/nvidia/cu13/include" ]; then
    export CUDA_PATH=$site/nvidia/cu13
fi
echo "libraries: $(cd "$links" && for l in *; do readlink "$l"; done | tr '\n' ' ') CUDA_PATH=${CUDA_PATH:-}"

table=$logs/table.txt
: >"$table"
failed=0

# step NAME SECONDS PATTERN COMMAND...: the last line that matches PATTERN goes to the table.
step() {
    local name=$1 limit=$2 pattern=$3 log start code seconds said
    shift 3
    log=$logs/${name// /-}.log
    start=$(date +%s.%N)
    echo "== $name: $*"
    timeout "$limit" "$@" >"$log" 2>&1
    code=$?
    seconds=$(awk -v from="$start" -v to="$(date +%s.%N)" 'BEGIN { print to - from }')
    said=$(grep -E "$pattern" "$log" | tail -1 | tr -s ' ' | cut -c1-150)
    if [ $code -eq 0 ]; then
        printf 'pass     %-26s %6.1f s  %s\n' "$name" "$seconds" "$said" | tee -a "$table"
        return
    fi
    failed=1
    said=${said:-$(grep -E 'ERROR|error|panic' "$log" | tail -1 | cut -c1-200)}
    printf 'FAIL %3d %-26s %6.1f s  %s\n' $code "$name" "$seconds" "$said" | tee -a "$table"
    echo "-- lines above the tolerance, and the end of $log:"
    grep -h 'above the tolerance' "$log" | head -40
    tail -15 "$log"
}

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
    if [ -n "${AERIE_DATASET:-}" ]; then
        fit=(--dataset "$AERIE_DATASET" --max-steps 50 --warmup-steps 5 --lr 1e-3)
        step "fit cpu" 300 'acceptance length' "$bin/trainer" fit "${fit[@]}" --run-dir "$logs/run-cpu"
        step "fit cuda f32" 300 'acceptance length' "$bin/trainer" fit "${fit[@]}" --device cuda \
            --compute f32 --run-dir "$logs/run-f32"
        step "fit cuda bf16" 300 'acceptance length' "$bin/trainer" fit "${fit[@]}" --device cuda \
            --run-dir "$logs/run-bf16"
    fi
    if command -v compute-sanitizer >/dev/null && [ -n "${AERIE_SANITIZE:-}" ]; then
        step "sanitizer" 600 'ERROR SUMMARY' compute-sanitizer "$bin/trainer" check --ops --device cuda
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

echo
echo "== $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
cat "$table"
exit $failed
