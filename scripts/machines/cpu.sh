#!/usr/bin/env bash
# Every benchmark on this machine's CPU, with one thread by processor time and with all by the
# clock on the wall: about half an hour. Leave the machine alone meanwhile.
#
#   bash scripts/machines/cpu.sh            results go to results/cpu-{1-thread,N-threads}
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
RESULTS=${RESULTS:-results}
CORES=$(nproc) # which OMP_NUM_THREADS, set below, would change

all() { # THREADS CLOCK FOLDER
  export OMP_NUM_THREADS=$1
  mkdir -p "$RESULTS/$3"
  export COLUMNS=160 PYTHONPATH=src
  for job in "router --seconds 8 --compiled" memory "scaling --seconds 6" "moe --seconds 6" \
    "step --seconds 8" "routes --seconds 20"; do
    # shellcheck disable=SC2086
    "$PYTHON" -m benchmarks.$job --clock "$2" --out "$RESULTS/$3" >"$RESULTS/$3/${job%% *}.txt"
  done
  for size in small layer; do
    "$PYTHON" -m l2r bench inference --size $size --seconds 10 --clock "$2" --out "$RESULTS/$3/$size" \
      >"$RESULTS/$3/inference-$size.txt"
  done
}

all 1 cpu cpu-1-thread
all "$CORES" wall "cpu-$CORES-threads"
