#!/usr/bin/env bash
# On a machine with a GPU: is it right, how fast is it, and what would be faster.
#   benchmarks/gpu.sh [FOLDER [ROUND...]]    default: benchmarks/results/gpu, and the rounds smoke correct speed size
# Rounds, each at most nine minutes:
#   smoke     every kernel once against float64, with its time; the products, the tiles; some 50 s, cut at 150
#   correct   the tests, and compute-sanitizer's memcheck over a short run of each kernel
#   speed     logits, plans, linear, divergence, masks, sets and overhead at the shapes of the targets
#   size      131,072 tokens, whole training steps, where a linear loss spends its time; the trainer's tests; preferences
#   tune      the linear loss's tile; block sizes and warps other than the defaults
#   ncu       what Nsight Compute says of some kernels: DRAM, L2 hits, stalls
# Leaves in FOLDER one archive a round, ROUND.tar.gz, with machine.txt (clocks, power, versions, commit, command),
# clocks.csv, PART.log of each part, and for the suites PART.json, PART.md and one PNG a shape. It is written anew after
# every part and every 20 s, so that a round that is cut off has what it had measured by then. targets.md says which of
# the targets the archives in FOLDER reach. A part that fails or runs out of time stops no other. The exit status is 1 if
# any did. benchmarks/README.md says how the time is spent.
# Needs the package's dependencies, its bench extra, pytest and hypothesis; peers that are not installed are listed as
# skipped. Where pytest-xdist is installed, the tests compile their kernels on eight processes.
set -uo pipefail
command="benchmarks/gpu.sh $*"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results/gpu}
rounds=("${@:2}")
((${#rounds[@]})) || rounds=(smoke correct speed size)
for round in "${rounds[@]}"; do
  case $round in smoke | correct | speed | size | tune | ncu) ;; *)
    echo "benchmarks/gpu.sh: a round is smoke, correct, speed, size, tune or ncu, got $round" >&2
    exit 2
    ;;
  esac
done
mkdir -p "$out" || exit 1
export PYTHONPATH=.:${PYTHONPATH:-} PYTHONUNBUFFERED=1

python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU here"' || exit 1

longest=540 # seconds of a round
failed=()
here='' # the round's files, before they are in the archive

# pack: the archive as of now, whole at any time; two may pack at once.
pack() {
  local new
  new=$(mktemp "$out/.$round.XXXXXX") || return
  # A file may grow meanwhile.
  tar -C "$here" -czf "$new" . 2>/dev/null || (($? == 1)) || return
  chmod 644 "$new" && mv "$new" "$out/$round.tar.gz"
}

# part NAME SECONDS COMMAND...: its output to the screen and to NAME.log, how long it took, and whether it failed.
part() {
  local name=$1 limit=$2 began=$SECONDS status=0 result=done left
  left=$((longest - SECONDS + started))
  shift 2
  if ((left < 15)); then
    echo "== $name: LEFT OUT, the round's time is over"
    failed+=("$name")
    return
  fi
  ((limit < left)) || limit=$left
  echo "== $name (at most $limit s)"
  # SIGINT first: Python then ends by itself, and tests say which one was running.
  timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$here/$name.log" || status=$?
  if ((status == 124 || status == 137)); then
    result="OUT OF TIME"
  elif ((status != 0)); then
    result="FAILED (exit status $status)"
  fi
  ((status == 0)) || failed+=("$name")
  echo "== $name: $result after $((SECONDS - began)) s"
  pack
}

# bench NAME SUITE SECONDS OPTION...
bench() {
  local name=$1 suite=$2 limit=$3
  shift 3
  part "$name" "$limit" python3 -m fastrl.cli bench --suite "$suite" --out "$here" --name "$name" "$@"
}

# header: what the results were measured with.
header() {
  echo "$command"
  echo "round $round, $(date -u +%FT%TZ), commit $(git rev-parse HEAD 2>/dev/null || cat .commit 2>/dev/null || echo unknown)"
  python3 -c 'from fastrl.bench import machine; import json; print(json.dumps(machine.describe([]), indent=2))'
  nvidia-smi
  nvidia-smi -q -d CLOCK,POWER,PERFORMANCE
  nvcc --version
  python3 -m pip list
}

smoke() {
  part smoke 150 python3 benchmarks/smoke.py --out "$here"
}

correct() {
  # Alone on the GPU: some of them tell times.
  part gpu-tests 100 python3 -m pytest -q -m gpu tests --continue-on-collection-errors --ignore tests/planning/test_budget.py \
    --ignore tests/training --ignore tests/integrations
  # All others but those that no GPU changes (ahead-of-time compilation, C++, packaging, this program) and the trainer's.
  part tests 240 "${threads[@]}" python3 -m pytest -q "${workers[@]}" --continue-on-collection-errors --durations=10 \
    -m "not slow" -k "not cpp" tests --ignore-glob '*_aot.py' --ignore-glob '*/test_cpp*' --ignore tests/training \
    --ignore tests/integrations --ignore tests/test_package.py --ignore tests/report/test_report.py \
    --ignore tests/bench/test_plot_gates.py --ignore-glob '*/test_bench*.py' --ignore tests/test_examples.py \
    --ignore tests/models --ignore tests/distributed
  if command -v compute-sanitizer >/dev/null; then
    # Without torch's caching of memory: a read beyond a tensor would find the next one. Kernels as compiled above.
    part sanitizer 180 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
      --report-api-errors no --target-processes all python3 -m pytest -q tests/kernels tests/backend/test_find_support.py \
      tests/backend/test_cuda_row_forward_gradient.py tests/bench/test_bench_read.py --ignore-glob '*_aot.py' \
      -k "not cpp and ((float64 and 4097) or (transforms_and_sizes and 4097) or (beside and 4097) or masked or strided \
      or any_strides or segments_apart or wide_row or long_segments or minus_infinity_is_a \
      or (not_kept_is and bfloat16) or (random_rows and triton) or test_bench_read)"
  else
    echo "== sanitizer: left out, for compute-sanitizer is not installed"
  fi
}

speed() {
  bench plans plans 60 --seconds 3 --shape 8192x4096x151936 --shape 8192x2048x151936
  bench logits logits 160 --seconds 1 --shape 8192x151936 --shape 8192x262144 --shape 256x151936 --shape 32768x32768
  bench linear linear 150 --seconds 2 --shape 8192x4096x151936 --shape 8192x2048x151936
  bench sets sets 30 --seconds 1
  bench masks masks 35 --seconds 2
  bench divergence divergence 90 --seconds 2
  bench overhead overhead 30
  bench logits-float32 logits 60 --seconds 1 --shape 8192x151936 --dtype float32
}

size() {
  bench plans-long plans 70 --seconds 3 --shape 131072x4096x151936
  part profile 40 python3 benchmarks/profile_loss.py 8192x4096x151936 --out "$here"
  bench step-8b step 140 --seconds 2 --shape 4x2048x36x4096x151936
  bench step step 190 --seconds 3 --shape 4x2048x28x1024x151936 --shape 64x2048x28x1024x151936
  if python3 -c 'import pydantic_settings, tensorboard' 2>/dev/null; then
    part trainer 100 "${threads[@]}" python3 -m pytest -q "${workers[@]}" -m "not slow" tests/training
  else
    echo "== trainer: left out, for its packages (extra train) are not installed"
  fi
  bench preference preference 120 --seconds 1
}

tune() {
  part tune 530 python3 benchmarks/tune.py --out "$here" --shape 8192x4096x151936 --shape 8192x2048x151936 \
    --shape 8192x151936 --shape 256x151936
}

ncu() {
  local sections=(SpeedOfLight MemoryWorkloadAnalysis MemoryWorkloadAnalysis_Tables WarpStateStats LaunchStats Occupancy)
  if ! type -P ncu >/dev/null; then
    echo "== ncu: left out, for ncu is not installed" | tee "$here/ncu.log"
    return
  fi
  # What smoke.py calls it, its kernels, how many of its launches; of a loss over sets the products and both gradients.
  while IFS=: read -r name only kernels launches; do
    part "ncu-$name" 90 env ncu --target-processes all --clock-control none --kernel-name "regex:$kernels" \
      --launch-count "$launches" "${sections[@]/#/--section=}" --print-details all --csv \
      --log-file "$here/ncu-$name.csv" python3 benchmarks/smoke.py --out "$here/ncu-$name" --only "$only" </dev/null
  done <<'PARTS'
forward-gradient:forward-gradient, in place:^row_forward_gradient_kernel$:1
forward-gradient-triton:forward-gradient, in place, by Triton:^row_forward_gradient_kernel$:1
statistics:statistics:^row_statistics_kernel$:1
gradient:gradient:^row_gradient_kernel$:1
sets:loss over recorded sets:^(support_products|segment_sums)_kernel$:3
find_support:find_support:^choose_kernel$:1
PARTS
}

threads=() workers=()
if python3 -c 'import xdist' 2>/dev/null; then threads=(env OMP_NUM_THREADS=2) workers=(-n 8); fi
for round in "${rounds[@]}"; do
  started=$SECONDS
  here=$(mktemp -d) || exit 1
  header >"$here/machine.txt" 2>&1
  pack
  # In the background, to the round's end: the clocks while it runs, and the archive as it grows.
  beats=0
  {
    echo 'time, SM MHz, memory MHz, W, C, throttled' >"$here/clocks.csv"
    while sleep 5 && kill -0 $$; do
      nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active \
        --format=csv,noheader
      ((++beats % 4)) || pack
    done >>"$here/clocks.csv" 2>/dev/null
  } >/dev/null 2>&1 &
  beat=$!
  "$round"
  kill "$beat" 2>/dev/null
  wait "$beat" 2>/dev/null
  pack
  rm -rf "$here" "$out/.$round."*
done
python3 benchmarks/targets.py "$out" | tee "$out/targets.md"

echo "== $SECONDS s in all; in $out: $(ls "$out" | tr '\n' ' ')"
if ((${#failed[@]})); then
  echo "== not completed: ${failed[*]}"
  exit 1
fi
