#!/usr/bin/env bash
# Linter and tests, in an environment that it makes if there is none. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
source scripts/environment.sh
ruff check .
ruff format --check .
exec python -m pytest tests "$@"
