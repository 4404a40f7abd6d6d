# What the GPU scripts of this folder share: libraries, steps, the table. Source it.
#
#   logs=FOLDER; . runs/steps.sh
#   step NAME SECONDS PATTERN COMMAND...
#
# Sets LD_LIBRARY_PATH, CUDA_PATH, gpus, table, failed. Knows no check and no bench.

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
# Headers for the kernels that burn compiles.
if [ -z "${CUDA_PATH:-}" ] && [ ! -d /usr/local/cuda/include ] && [ -d "$site/nvidia/cu13/include" ]; then
    export CUDA_PATH=$site/nvidia/cu13
fi
# nvidia-smi lists GPUs that this process may be kept from.
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)
else
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
fi
echo "GPUs: $gpus; libraries: $(cd "$links" && for l in *; do readlink "$l"; done | tr '\n' ' ')"

table=$logs/table.txt
: >"$table"
failed=0

# step NAME SECONDS PATTERN COMMAND...: the last line that matches PATTERN goes to the table.
# The exit code asked for is $expected, or 0.
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
    if [ $code -eq "${expected:-0}" ]; then
        printf 'pass     %-34s %6.1f s  %s\n' "$name" "$seconds" "$said" | tee -a "$table"
        return
    fi
    failed=1
    said=${said:-$(grep -E 'ERROR|error|panic' "$log" | tail -1 | cut -c1-200)}
    printf 'FAIL %3d %-34s %6.1f s  %s\n' $code "$name" "$seconds" "$said" | tee -a "$table"
    grep -h 'above the tolerance' "$log" | head -40
    echo "-- the end of $log:"
    tail -25 "$log"
}

# The table, last.
finish() {
    echo
    echo "== $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
    cat "$table"
}
