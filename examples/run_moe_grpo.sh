#!/usr/bin/env bash
# Trains a mixture-of-experts policy with GRPO: sets up .venv when it is missing, then runs `megarl train`.
#
#   bash examples/run_moe_grpo.sh [CONFIG] [key=value ...]
#
# Without CONFIG: configs/moe_grpo_cpu.yaml where there is no GPU, configs/qwen3_30b_a3b_grpo.yaml where there are eight.
# CONFIG is looked for here and in megarl's folder; every other path of a run, its output too, counts from megarl's folder.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf 'run_moe_grpo: %s\n' "$*"; }
fail() { printf 'run_moe_grpo: error: %s\n' "$*" >&2; exit 2; }

count_gpus() { { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true; }

default_config() {
    case "$gpus" in
        0) echo configs/moe_grpo_cpu.yaml ;;
        8) echo configs/qwen3_30b_a3b_grpo.yaml ;;
        *) fail "found $gpus GPUs; the configs that are chosen by themselves want 0 or 8. Name one:" \
            "bash examples/run_moe_grpo.sh configs/qwen3_30b_a3b_grpo.yaml key=value ... (\`megarl plan\` shows what fits)" ;;
    esac
}

# Leaves an environment alone that ci/setup.sh did not make; one that it made is finished or brought up to date.
set_up() {
    if [ ! -f .venv/megarl-setup ]; then
        if [ -x .venv/bin/megarl ]; then return; fi
        if [ "$gpus" -gt 0 ]; then
            fail "$root/.venv is missing, and ci/setup.sh makes it for machines without a GPU (found $gpus). For the GPUs:" \
                "python3.11 -m venv .venv && .venv/bin/pip install -e '.[gpu]'; to leave them unused: bash ci/setup.sh"
        fi
    fi
    VENV=.venv bash ci/setup.sh
}

gpus=$(count_gpus)
if [ $# -gt 0 ] && [[ "$1" != *=* ]]; then
    config=$1
    shift
    if [ -f "$config" ]; then config=$(realpath "$config"); fi
    say "config $config"
else
    config=$(default_config)
    say "config $config, chosen for $gpus GPUs"
fi

cd "$root"
set_up
exec .venv/bin/megarl train "$config" "$@"
