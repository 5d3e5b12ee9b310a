#!/usr/bin/env bash
# Every benchmark on this machine's GPU: run.sh OUT LIMIT PYTHON [rooms...]; JSON, CSV and logs go to OUT.
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
rooms=("$@")
if [ ${#rooms[@]} -eq 0 ]; then
  for file in htree_ops/bench/rooms/[a-z]*.py; do
    room=${file##*/}
    rooms+=("${room%.py}")
  done
fi
status=0
for room in "${rooms[@]}"; do
  timeout "$limit" "$python" -m htree_ops bench --room "$room" --json "$out/$room.json" --csv "$out/$room.csv" \
    2>&1 | tee "$out/bench-$room.log"
  ended=${PIPESTATUS[0]}
  if [ "$ended" -eq 124 ]; then
    echo "run.sh: $room stopped after LIMIT=$limit seconds: raise LIMIT" >&2
  fi
  [ "$ended" -eq 0 ] || status=1
done
exit "$status"
