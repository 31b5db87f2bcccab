#!/usr/bin/env bash
# Checks and times the GPU of this machine. It needs NVIDIA's driver, models/tiny of the source tree (which is looked for
# in QWILL_REPOSITORY, by default the folder above this one), xz and, for `sanitize`, compute-sanitizer of the CUDA toolkit.
#
# Arguments: the steps to run, of
#   suite       every op against the reference, at the shapes of several models
#   machine     what is known and measured of the GPU, and a kernel cache with faults
#   large       offsets beyond 2^31 (tens of GB of memory)
#   golden      the tiny model against recorded outputs: trunk, MTP, perplexity
#   one-answer  the same answer alone, in company, in other slices, with drafts and from the prefix cache, bit
#               for bit; a soak
#   serve       the binary over HTTP: answers, memory against its plan, a kernel that fails, too little memory
#   speed       step times of the 27B geometry with random weights in 24 GiB, also in steps.json
#   sanitize    memcheck and racecheck on the suite at small shapes; QWILL_SUITE_CASES chooses among its ops
# All but sanitize without arguments. Every step is timed; the first failure ends the run.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
tree="$(cd "${QWILL_REPOSITORY:-$here/..}" && pwd)"
[ -e "$tree/models/tiny/config.json" ] || { echo "no models/tiny in $tree: set QWILL_REPOSITORY" >&2; exit 2; }
export QWILL_REQUIRE_GPU=1
export QWILL_KERNEL_CACHE="${QWILL_KERNEL_CACHE:-$here/kernels}"
[ -e "$here/qwill" ] || tar --extract --xz --directory "$here" --file "$here/contents.tar.xz"
# The tests look for golden/, which is here, and models/, which is there, in one place.
export QWILL_REPOSITORY="$here"
[ -e "$here/models" ] || ln -s "$tree/models" "$here/models"

sanitizer() {
    local found
    for found in "$(command -v compute-sanitizer || true)" /usr/local/cuda*/bin/compute-sanitizer; do
        [ -x "$found" ] && { echo "$found"; return; }
    done
    echo "compute-sanitizer is not installed" >&2
    return 1
}

sanitize() {
    local tool program
    program="$(sanitizer)"
    for tool in memcheck racecheck; do
        echo "--- $tool"
        "$program" --tool "$tool" --error-exitcode 9 --print-limit 20 \
            "$here/suite" --nocapture --test-threads 1 odd_shapes
    done
}

step() {
    case "$1" in
        suite) "$here/suite" --nocapture ;;
        machine) "$here/machine" --nocapture && "$here/kernel_cache" --nocapture --test-threads 1 ;;
        large) "$here/large" --nocapture --test-threads 1 ;;
        golden) "$here/trunk" --nocapture gpu && "$here/mtp" --nocapture gpu && "$here/perplexity" --nocapture gpu ;;
        one-answer)
            for program in "$here/one_answer" "$here/equality" "$here/prefix_cache" "$here/soak"; do
                "$program" --nocapture --test-threads 1 gpu
            done ;;
        serve) QWILL_BINARY="$here/qwill" "$here/binary" --nocapture --test-threads 1 gpu:: ;;
        speed) "$here/qwill" bench steps --random 27b --device cuda --gpu-memory 24GiB --json "$here/steps.json" ;;
        sanitize) sanitize ;;
        *) echo "unknown step: $1" >&2; exit 2 ;;
    esac
}

for name in ${@:-suite machine large golden one-answer serve speed}; do
    echo "=== $name"
    started=$(date +%s.%N)
    # In a shell of its own, so that `set -e` holds inside it.
    (set -e; step "$name")
    echo "=== $name: $(awk "BEGIN { printf \"%.1f\", $(date +%s.%N) - $started }") s"
done
