#!/usr/bin/env bash
# Checks within 8 minutes, on a machine with a GPU, torch 2.11 and transformers, what needs nothing else: kernels at real
# size, the prefix tree's attention, gradients and speed, the sampler's Triton kernel; with verl, an FSDP2 step as well. Prints
# tables and writes a JSON file.
#   [WHEELS=folder] bash scripts/check_gpu/check_gpu_bare.sh [FILE, default outputs/check_gpu_bare.json]
# WHEELS: wheels (verl, tensordict, ray, …) that are installed first, without their dependencies, for two of the losses.
# SMALL=1 runs small parts without a GPU, in Triton's interpreter where there is a Triton.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -z "${WHEELS:-}" ] || python -m pip install --quiet --no-deps --no-index "$WHEELS"/*.whl
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec python scripts/check_gpu/check_gpu_bare.py "${1:-outputs/check_gpu_bare.json}"
