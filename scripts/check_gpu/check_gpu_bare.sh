#!/usr/bin/env bash
# Checks within 8 minutes, on a machine with a GPU, torch 2.11 and transformers, what needs nothing else: kernels at real
# size, the prefix tree's attention, gradients and speed, the sampler's Triton kernel; with verl, an FSDP2 step as well. Prints
# each part's tables, and which parts failed. The exit code is 1 if one failed, and 3 if torch sees no GPU.
#   [WHEELS=folder] bash scripts/check_gpu/check_gpu_bare.sh
# WHEELS: wheels (verl, tensordict, ray, …) that are installed first, without their dependencies, for the FSDP2 step.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -z "${WHEELS:-}" ] || python -m pip install --quiet --no-deps --no-index "$WHEELS"/*.whl
# verl may be installed without this project, whose modules it then lacks.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} VERL_USE_EXTERNAL_MODULES=verl_patches.plugin
if ! python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "error: torch sees no GPU" >&2
    exit 3
fi
failed=""

# run_part NAME SECONDS MODULE [ARGUMENT...]
run_part() {
    echo "== $1 (at most $2 s)"
    timeout "$2" python -m "${@:3}" || failed+=" $1"
}

run_part kernels 200 benchmarks.gpu_kernels
run_part gradients 40 benchmarks.shared_gradients --device cuda
run_part prefix_tree 200 benchmarks.prefix_tree --device cuda --runs 5 --only 0.5 --sharing 1 1.5 2.5 4 8
if python -c "import importlib.metadata as metadata; metadata.version('verl')" 2>/dev/null; then
    run_part fsdp2 30 benchmarks.fsdp2_step
fi
echo "failed parts:${failed:- none}"
[ -z "$failed" ]
