#!/usr/bin/env bash
# The story in five minutes of reading: what is here, what would run, why, and a run.
# Usage: scripts/demo.sh PATH_TO_LAYERZERO
set -euo pipefail
lz=$1
cd "$(dirname "$0")/.."
documents=crates/lz-cli/tests/fixtures
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; else bold= plain=; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
show() { printf '$ layerzero %s\n' "$*"; "$lz" "$@"; }

say "1. What machine is this, and what can run on it?"
show doctor

say "2. Which operations are there, and which kernels?"
show ops
show kernels --op norm.rms

say "3. Which kernel would serve a few calls? Here, and on hardware that is not here."
show select --op rms_norm --shape input=8x4096 --dtype float32
show select --op attention --shape query=2x1024x32x128 --shape key=2x1024x8x128 --shape value=2x1024x8x128 --dtype bf16
gpu=(--device h100)
for document in "$documents"/flash_attn.json "$documents"/flashinfer.json "$documents"/liger.json; do
  [ -f "$document" ] && gpu+=(--capabilities "$document")
done
show select --op attention.causal --shape query=2x1024x32x128 --shape key=2x1024x8x128 --shape value=2x1024x8x128 --dtype bf16 "${gpu[@]}"

say "4. Why? Every candidate, with its score or the reasons against it."
show explain --op attention.causal --shape query=2x1024x32x320 --shape key=2x1024x8x320 --shape value=2x1024x8x320 --dtype bf16 "${gpu[@]}" || true
show explain --op attention.causal --shape query=2x1024x32x128 --shape key=2x1024x8x128 --shape value=2x1024x8x128 --dtype bf16 "${gpu[@]}"

say "5. And run one, on this machine."
show run --op attention --shape query=1x16x8x32 --shape key=1x16x2x32 --shape value=1x16x2x32 --dtype bf16

say "Next: 'make bench' for what selection costs here, 'make test' for the proof, README.md for the rest."
