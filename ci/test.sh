#!/usr/bin/env bash
# Sets up and runs every check; goes on after a failed one, names it at the end and exits 1.
#
#   bash ci/test.sh [pytest arguments]
#   PYTHON=python3.12 bash ci/test.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/setup.sh

failed=()
check() {
    printf '\n== %s\n' "$1"
    "$venv/bin/$1" "${@:2}" || failed+=("${*:1:2}")
}

check ruff check --output-format concise .
check ruff format --check .
check mypy
check lint-imports
check pytest "$@"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
