#!/usr/bin/env bash
# Runs the linter, the type checker and the tests, in an environment that it makes if there is none. Arguments are passed
# to pytest. Without arguments, tests run in three processes, as many of them wait, then those that train on Ray, in two
# where there are less than 20 GiB of memory, and at last some of these with the versions of the extra `gpu`.
# --fast leaves out the tests that train on Ray and what is marked as slow: minutes, for while you work.
# The last line counts the tests that were skipped, by their reasons.
# --gpu-versions runs tests on the CPU with the versions of the extra `gpu`: those of devices, for which torch must know
# CUDA, and those that train on Ray; or those that further arguments choose.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

gibibytes=$(awk '/MemTotal/ {print int($2 / 2 ^ 20)}' /proc/meminfo)
training=(--numprocesses=$((gibibytes < 20 ? 2 : 3)) --dist=loadfile)
# the fewest tests in which parts of each recipe train: LATR and HAPO, ARPO, HATO
each_recipe=(
    tests/e2e/test_combinations_on_cpu.py::test_trees_share_tokens_and_the_credit_knows
    tests/e2e/test_combinations_on_cpu.py::test_the_first_step_samples_at_the_plain_temperature_and_later_ones_do_not
    tests/e2e/test_combinations_on_cpu.py::test_the_loss_is_hapos_and_moves_the_policy
    tests/e2e/test_combinations_on_cpu.py::test_trajectories_fork_without_tools
    tests/e2e/test_hato_countdown_on_cpu.py::test_reptile_moves_the_weights_and_they_reach_the_rollout
)
devices=tests/test_devices_on_fake_cuda.py

# test_gpu_versions ARGUMENT...: runs pytest with the versions of the extra `gpu`, and with vLLM's CPU build.
test_gpu_versions() {
    bash scripts/setup.sh --gpu-versions && source .venv-gpu-versions/bin/activate && python -m pytest "$@"
}

# tell_skipped: prints how many tests were skipped for each reason; tests/conftest.py has listed the reasons.
tell_skipped() {
    local reasons
    reasons=$(sort "$SKIPPED_TESTS" | uniq -c | sort -rn | sed -E 's/^ *([0-9]+) (.*)/\1 (\2)/' | paste -sd , | sed 's/),/), /g')
    echo "skipped tests: ${reasons:-none}"
}

SKIPPED_TESTS=$(mktemp)
export SKIPPED_TESTS
trap 'rm -f "$SKIPPED_TESTS"' EXIT
if [ "${1:-}" = --gpu-versions ]; then
    shift
    [ $# -gt 0 ] || set -- "$devices" tests/e2e -m "not slow" "${training[@]}"
    failed=0
    test_gpu_versions "$@" || failed=$?
    tell_skipped
    exit $failed
fi
bash scripts/setup.sh
source .venv/bin/activate # not another environment that is active
ruff check .
ruff format --check .
mypy & # beside the tests' imports, which do not use both cores
types=$!
failed=0
in_three=(python -m pytest tests --numprocesses=3 --dist=loadfile --no-loadscope-reorder)
if [ "${1:-}" = --fast ]; then
    OMP_NUM_THREADS=1 "${in_three[@]}" -m "not e2e and not slow" "${@:2}" || failed=1
elif [ $# -gt 0 ]; then
    python -m pytest "$@" || failed=1
else
    OMP_NUM_THREADS=1 "${in_three[@]}" -m "not e2e" || failed=1
    python -m pytest tests/e2e -m e2e "${training[@]}" || failed=1
    test_gpu_versions "$devices" "${each_recipe[@]}" "${training[@]}" || failed=1
fi
wait "$types" || { echo "mypy found errors: they stand above" >&2 && failed=1; }
tell_skipped
exit $failed
