#!/usr/bin/env bash
# Makes the policy of the default run anew: a small random Qwen3-MoE, then a supervised warm start on the task's problems.
#
#   bash examples/make_tiny_moe.sh [FOLDER]        default: models/tiny_moe; about three minutes on two cores
#
# examples/policies/tiny_moe is a copy of what this writes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=${1:-models/tiny_moe}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
random=$scratch/random

VENV=.venv bash ci/setup.sh
.venv/bin/megarl init configs/moe_grpo_cpu.yaml "$random"
.venv/bin/megarl sft configs/moe_grpo_cpu.yaml trainer.model="$random" sft.output="$output"
