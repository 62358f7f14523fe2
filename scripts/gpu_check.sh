#!/usr/bin/env bash
# Everything that needs a GPU, in at most six minutes and without a network:
#
#   scripts/gpu_check.sh OUTPUT_FOLDER
#
# builds for the GPU at hand beside the sources, against whatever torch `python3` has, runs
# pytest -m cuda, compute-sanitizer over small shapes, and the benchmark. Leaves gpu_check.json,
# gpu_check.txt and the logs of the steps in the folder. PYTHON names another interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu_check.sh OUTPUT_FOLDER}
python=${PYTHON:-python3}
mkdir -p "$out" && out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
failed=()

deadline=350

step() { # name, seconds, command...: runs it with its output in a log; the script goes on if it fails
  local name=$1 limit=$2 begin=$SECONDS status
  shift 2
  if [ "$limit" -gt $((deadline - SECONDS)) ]; then limit=$((deadline - SECONDS)); fi
  if [ "$limit" -le 0 ]; then
    echo "FAILED  $name: no time left"
    failed+=("$name")
    return 1
  fi
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    echo "ok      $name ($((SECONDS - begin)) s)"
    return 0
  fi
  echo "FAILED  $name (exit $status after $((SECONDS - begin)) s), the end of $out/$name.log:"
  tail -n 25 "$out/$name.log"
  failed+=("$name")
  return 1
}

"$python" - << 'CHECK' || exit 2
import sys
import torch
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch sees no CUDA GPU here")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
CHECK
architecture=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')

export DSPARK_CUDA=on CMAKE_ARGS="-DCMAKE_CUDA_ARCHITECTURES=$architecture"
step build 150 "$python" setup.py build_ext --inplace || exit 1

step tests 120 "$python" -m pytest -q -m "cuda and not slow" -p no:cacheprovider \
  tests/test_cuda_kernels.py tests/test_cuda_device.py tests/test_many_rows.py \
  tests/test_linear.py tests/test_check.py
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck; do
    step "$tool" 45 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      --kernel-regex kns=dspark "$python" scripts/small_launches.py
  done
else
  echo "skipped compute-sanitizer: it is not on PATH"
fi

for vocab in 151936 128256 262144 49152; do
  others=(recompute inplace chunked)
  if [ "$vocab" = 151936 ]; then others+=(plain compile liger quack); fi
  step "bench_$vocab" 60 "$python" -m dspark_ext bench --device cuda --rows 8192 --vocab "$vocab" \
    --dtype bfloat16 --rounds 15 --no-memory --contenders "${others[@]}" \
    --json "$out/bench_$vocab.json"
  step "evaluation_$vocab" 30 "$python" -m dspark_ext bench --device cuda --rows 8192 \
    --vocab "$vocab" --dtype bfloat16 --rounds 15 --no-memory --evaluation --contenders ours \
    --json "$out/evaluation_$vocab.json"
done
"$python" scripts/gpu_table.py "$out" | tee "$out/gpu_check.txt"
echo "$SECONDS s in all; ${#failed[@]} steps failed${failed[*]:+: ${failed[*]}}"
[ ${#failed[@]} -eq 0 ]
