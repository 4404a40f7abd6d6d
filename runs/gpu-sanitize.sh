#!/usr/bin/env bash
# Every kernel under compute-sanitizer: those of the extractor alone, those of the trainer as its
# operations call them. Prints a short table last.
#
#   runs/gpu-sanitize.sh FOLDER [memcheck|racecheck]
#
# FOLDER holds the binaries `cuda_check` and `trainer` (see gpu-check.sh and gpu-train-check.sh). Logs go
# to $AERIE_LOGS, or to a new folder under /tmp. Exit code: 0 if nothing was found.
set -uo pipefail

bin=$(cd "${1:?a folder with the binaries}" && pwd) || exit 78
tools=${2:-memcheck racecheck}
cd "$(dirname "$0")/.." || exit 70
logs=${AERIE_LOGS:-$(mktemp -d /tmp/aerie-gpu-sanitize.XXXXXX)}
. runs/steps.sh
command -v compute-sanitizer >/dev/null ||
    { echo "compute-sanitizer is not here: install the CUDA toolkit"; exit 69; }

for tool in $tools; do
    sanitizer=(compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9)
    step "$tool kernels" 400 'SUMMARY' "${sanitizer[@]}" "$bin/cuda_check" --quick
    for compute in f32 bf16; do
        step "$tool training $compute" 300 'SUMMARY' "${sanitizer[@]}" \
            "$bin/trainer" check --ops --device cuda --compute $compute
    done
done

finish
exit $failed
