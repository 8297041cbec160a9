#!/usr/bin/env bash
# On a machine with a GPU: the tests of everything that runs there, the benchmark suites, and what they show.
#   benchmarks/gpu.sh [FOLDER [ROUND...]]      default: benchmarks/results/gpu, and the rounds correct speed size
# Rounds, each under ten minutes by the limits of its parts:
#   correct   the tests, and compute-sanitizer's memcheck over a short run of each kernel
#   speed     logits, linear, plans, overhead, masks and sets at the shapes of the targets
#   size      131,072 tokens, whole training steps, where a linear loss spends its time; the trainer's tests
#   tune      block sizes, warps and tiles other than the defaults
# Leaves in FOLDER: PART.log of each part, and for the suites PART.json, PART.md and one PNG a shape; targets.md says
# which of the targets these reach. A part that fails or runs out of time stops no other, and what it had measured by
# then is there. The exit status is 1 if any did. benchmarks/README.md says how the time is spent.
# Needs the package's dependencies, its bench extra, pytest and hypothesis; peers that are not installed are listed as
# skipped. Where pytest-xdist is installed, the tests compile their kernels on eight processes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results/gpu}
rounds=("${@:2}")
((${#rounds[@]})) || rounds=(correct speed size)
for round in "${rounds[@]}"; do
  case $round in correct | speed | size | tune) ;; *)
    echo "benchmarks/gpu.sh: a round is correct, speed, size or tune, got $round" >&2
    exit 2
    ;;
  esac
done
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

# bench NAME SUITE SECONDS OPTION...
bench() {
  local name=$1 suite=$2 limit=$3
  shift 3
  part "$name" "$limit" python3 -m fastrl.cli bench --suite "$suite" --out "$out" --name "$name" "$@"
}

correct() {
  # Alone on the GPU: some of them tell times.
  part gpu-tests 100 python3 -m pytest -q -m gpu tests --continue-on-collection-errors --ignore tests/planning/test_budget.py \
    --ignore tests/training --ignore tests/integrations
  # All others but those that no GPU changes (ahead-of-time compilation, C++, packaging, this program) and the trainer's.
  part tests 240 "${threads[@]}" python3 -m pytest -q "${workers[@]}" --continue-on-collection-errors --durations=10 \
    -m "not slow" -k "not cpp" tests --ignore-glob '*_aot.py' --ignore-glob '*/test_cpp*' --ignore tests/training \
    --ignore tests/integrations --ignore tests/test_package.py --ignore tests/training/common/test_report.py \
    --ignore tests/bench/test_plot_gates.py --ignore-glob '*/test_bench*.py' --ignore tests/test_examples.py \
    --ignore tests/models
  if command -v compute-sanitizer >/dev/null; then
    # Without torch's caching of memory: a read beyond a tensor would find the next one. Kernels as compiled above.
    part sanitizer 180 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
      --report-api-errors no --target-processes all python3 -m pytest -q tests/kernels tests/backend/test_find_support.py \
      tests/bench/test_bench_read.py --ignore-glob '*_aot.py' -k "not cpp and ((float64 and 4097) \
      or (transforms_and_sizes and 4097) or (beside and 4097) or masked or strided or any_strides or segments_apart \
      or wide_row or long_segments or minus_infinity_is_a or (not_kept_is and bfloat16) \
      or (random_rows and triton) or test_bench_read)"
  else
    echo "== sanitizer: left out, for compute-sanitizer is not installed"
  fi
}

speed() {
  bench logits logits 190 --seconds 2
  bench overhead overhead 30
  bench plans plans 60 --seconds 3 --shape 8192x4096x151936 --shape 8192x2048x151936
  bench linear linear 105 --seconds 3 --shape 8192x4096x151936 --shape 8192x2048x151936
  bench masks masks 35 --seconds 2
  bench sets sets 30 --seconds 1
  bench logits-float32 logits 60 --seconds 2 --shape 8192x151936 --dtype float32
}

size() {
  bench plans-long plans 70 --seconds 3 --shape 131072x4096x151936
  part profile 40 python3 benchmarks/profile_loss.py 8192x4096x151936 --out "$out"
  bench step-8b step 140 --seconds 2 --shape 4x2048x36x4096x151936
  bench step step 190 --seconds 3 --shape 4x2048x28x1024x151936 --shape 64x2048x28x1024x151936
  if python3 -c 'import pydantic_settings, tensorboard' 2>/dev/null; then
    part trainer 100 "${threads[@]}" python3 -m pytest -q "${workers[@]}" -m "not slow" tests/training
  else
    echo "== trainer: left out, for its packages (extra train) are not installed"
  fi
}

tune() {
  part tune 570 python3 benchmarks/tune.py --out "$out" --shape 8192x151936 --shape 256x151936 \
    --shape 8192x4096x151936
}

threads=() workers=()
if python3 -c 'import xdist' 2>/dev/null; then threads=(env OMP_NUM_THREADS=2) workers=(-n 8); fi
for round in "${rounds[@]}"; do "$round"; done
python3 benchmarks/targets.py "$out" | tee "$out/targets.md"

echo "== $SECONDS s in all; in $out: $(ls "$out" | tr '\n' ' ')"
if ((${#failed[@]})); then
  echo "== not completed: ${failed[*]}"
  exit 1
fi
