#!/usr/bin/env bash
# One command on a machine with a GPU: the tests of everything that runs there, then the benchmark suites.
#   benchmarks/gpu.sh [FOLDER]      default: benchmarks/results/gpu
# Leaves all in FOLDER: tests.log; and for each suite SUITE.json, SUITE.md, SUITE.log and one PNG a shape.
# Every part has a limit of its own, together eight minutes; one that fails or runs out of time stops no other, and what
# it had measured by then is there. The exit status is 1 if any did. benchmarks/README.md says how the time is spent.
# Needs the package's dependencies, its bench extra, pytest and hypothesis; peers that are not installed are listed as
# skipped. Where pytest-xdist is installed, the tests compile their kernels on eight processes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results/gpu}
mkdir -p "$out" || exit 1
export PYTHONPATH=.:${PYTHONPATH:-}

python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU here"' || exit 1

failed=()

# part NAME SECONDS COMMAND...: its output to the screen and to FOLDER/NAME.log, how long it took, and whether it failed.
part() {
  local name=$1 limit=$2 began=$SECONDS status=0 result=done
  shift 2
  echo "== $name (at most $limit s)"
  # SIGINT first: Python then ends by itself, and tests say which one was running.
  timeout --signal=INT --kill-after=15 "$limit" "$@" 2>&1 | tee "$out/$name.log" || status=$?
  if ((status == 124 || status == 137)); then
    result="OUT OF TIME"
  elif ((status != 0)); then
    result="FAILED (exit status $status)"
  fi
  ((status == 0)) || failed+=("$name")
  echo "== $name: $result after $((SECONDS - began)) s"
}

bench() {
  local suite=$1 limit=$2
  shift 2
  part "$suite" "$limit" python3 -m fastrl.cli bench --suite "$suite" --out "$out" --name "$suite" "$@"
}

threads=() workers=()
if python3 -c 'import xdist' 2>/dev/null; then threads=(env OMP_NUM_THREADS=2) workers=(-n 8); fi
# All tests but those that no GPU changes: ahead-of-time compilation, C++, packaging, the trainer, this program.
part tests 110 "${threads[@]}" python3 -m pytest -q "${workers[@]}" --continue-on-collection-errors --durations=10 \
  -m "not slow" tests --ignore-glob '*_aot.py' --ignore tests/ops --ignore tests/trainer --ignore tests/stages \
  --ignore tests/integrations --ignore tests/test_package.py --ignore tests/test_report.py --ignore tests/test_plot_gates.py \
  --ignore-glob '*/test_bench*.py' --ignore tests/test_examples.py

bench logits 75 --shape 8192x151936 --shape 32768x32768
bench linear 105 --seconds 3 --shape 8192x4096x151936 --shape 8192x2048x151936
bench memory 80 --seconds 2 --repeats 10
bench masks 30 --seconds 2
bench sets 25 --seconds 1
bench step 55 --seconds 3

echo "== $SECONDS s in all; in $out: $(ls "$out" | tr '\n' ' ')"
if ((${#failed[@]})); then
  echo "== not completed: ${failed[*]}"
  exit 1
fi
