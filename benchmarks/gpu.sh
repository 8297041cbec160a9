#!/usr/bin/env bash
# One command on a machine with a GPU: the tests of everything that runs there, then both benchmark suites.
#   benchmarks/gpu.sh [FOLDER]      default: benchmarks/results/gpu
# Leaves tests.log, and results.json and results.md for each suite, in FOLDER. Needs the package's dependencies, pytest
# and hypothesis; peers that are not installed are listed as skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
export PYTHONPATH=.:${PYTHONPATH:-}

python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU here"' || exit 1

status=0
# The ahead-of-time compilations need no GPU and run in `make test`.
python3 -m pytest -q --continue-on-collection-errors tests/kernels tests/losses tests/test_token_logprobs.py \
  tests/test_operators.py tests/test_bad_input.py tests/test_advantages.py tests/test_gae.py tests/test_rewards.py \
  --ignore tests/kernels/test_aot.py -m "not slow" 2>&1 | tee "$out/tests.log" || status=1

for suite in logits linear; do
  python3 -m fastrl.cli bench --suite "$suite" --out "$out/$suite" || status=1
done
exit "$status"
