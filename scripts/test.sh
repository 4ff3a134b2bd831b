#!/usr/bin/env bash
# Runs the linter, the type checker and the tests, in an environment that it makes if there is none. Arguments are passed to
# pytest. Without arguments, tests run in three processes, as many of them wait, and then those that train on Ray in two.
# --fast leaves out these and what is marked as slow: minutes, for while you work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
source scripts/environment.sh
ruff check .
ruff format --check .
mypy & # beside the tests' imports, which do not use both cores
types=$!
failed=0
in_three=(python -m pytest tests --numprocesses=3 --dist=loadfile --no-loadscope-reorder)
if [ "${1:-}" = --fast ]; then
    OMP_NUM_THREADS=1 "${in_three[@]}" -m "not e2e and not slow" "${@:2}" || failed=1
elif [ $# -gt 0 ]; then
    python -m pytest tests "$@" || failed=1
else
    OMP_NUM_THREADS=1 "${in_three[@]}" -m "not e2e" || failed=1
    python -m pytest tests/e2e -m e2e --numprocesses=2 --dist=loadfile || failed=1
fi
wait "$types" || { echo "mypy found errors: they stand above" >&2 && failed=1; }
exit $failed
