#!/usr/bin/env bash
# Runs the linter and the tests, in an environment that it makes if there is none. Arguments are passed to pytest. Without
# arguments, the end-to-end tests run one after the other, as each needs the whole machine, and the others in two processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
source scripts/environment.sh
ruff check .
ruff format --check .
[ $# -eq 0 ] || exec python -m pytest tests "$@"
failed=0
OMP_NUM_THREADS=1 python -m pytest tests --ignore=tests/e2e --numprocesses=2 --dist=loadfile || failed=1
python -m pytest tests/e2e || failed=1
exit $failed
