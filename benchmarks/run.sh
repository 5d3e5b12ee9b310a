#!/usr/bin/env bash
# Every benchmark on this machine's GPU: run.sh OUT LIMIT PYTHON [families...]; CSV files and logs go to OUT.
# Uses the library that is built in place, or the one that `make cuda-build` left in build/cuda if that is newer.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 limit=$2 python=$3
shift 3
mkdir -p "$out"
command -v "$python" >/dev/null || python=python3
if [ build/cuda/htree_ops/_C.abi3.so -nt htree_ops/_C.abi3.so ]; then
  echo "library: build/cuda"
  cp -p build/cuda/htree_ops/_C.abi3.so build/cuda/htree_ops/_build_info.json htree_ops/
else
  echo "library: htree_ops/_C.abi3.so"
fi
families=("$@")
[ ${#families[@]} -gt 0 ] || readarray -t families < <("$python" -c 'from benchmarks.harness.run import FAMILIES; print(*FAMILIES, sep="\n")')
status=0
for family in "${families[@]}"; do
  timeout "$limit" "$python" -m benchmarks run "$family" --csv "$out/$family.csv" \
    2>&1 | tee "$out/bench-$family.log"
  ended=${PIPESTATUS[0]}
  if [ "$ended" -eq 124 ]; then
    echo "run.sh: $family stopped after LIMIT=$limit seconds: raise LIMIT" >&2
  fi
  [ "$ended" -eq 0 ] || status=1
done
exit "$status"
