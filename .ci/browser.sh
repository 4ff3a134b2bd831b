#!/usr/bin/env bash
# Installs Chromium, with which tests/scripts/test_view_trees_on_cpu.py opens the page of trees, from the distribution's
# packages. Where it cannot, it says so, and that test is skipped.
set -uo pipefail
for browser in chromium chromium-browser google-chrome chrome; do
    if command -v "$browser" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Chromium, and only root can install it by apt-get: the test that opens a page is skipped" >&2
    exit 0
fi
echo "Chromium is missing: apt-get installs it"
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if ! (apt-get update && apt-get install --yes --no-install-recommends chromium) >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    echo "apt-get did not install Chromium: the test that opens a page is skipped" >&2
fi
rm -f "$log"
