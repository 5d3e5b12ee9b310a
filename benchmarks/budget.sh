#!/usr/bin/env bash
# Attention at the budgets that people use, on one H200 in nine minutes: budget.sh OUT [STEP...]; CSV and logs go to OUT.
# Steps run in the order given, each within its own seconds and all within LIMIT; what has no time left is skipped with a
# line. LISTS is a file of `benchmarks.quality`; where there is none, a dense model gets an index here. `nsa` needs the
# package fla-core, steps of models transformers and liger-kernel. Steps that are not run by default: dense decode tree texts.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 limit=${LIMIT:-540} python=${PYTHON:-python3} lists=${LISTS:-benchmarks/results/quality/lists.npz}
shift
mkdir -p "$out"
status=0

# run NAME SECONDS ARGUMENTS...: python -m ARGUMENTS, whose log goes to OUT/NAME.log.
run() {
  local name=$1 seconds=$2 left=$((limit - SECONDS)) begin=$SECONDS
  if [ "$left" -lt 15 ]; then
    echo "budget.sh: $name skipped, no time left" >&2
    status=1
    return
  fi
  timeout -k 5 "$((seconds < left ? seconds : left))" "$python" -m "${@:3}" > "$out/$name.log" 2>&1
  local ended=$?
  [ "$ended" -eq 0 ] || { tail -n 5 "$out/$name.log" >&2; status=1; }
  echo "budget.sh: $name ended with $ended after $((SECONDS - begin)) s, $((limit - SECONDS)) left"
}

# models NAME SECONDS WAYS FLAGS...: rows go to OUT/models-NAME.csv.
models() {
  run "models-$1" "$2" benchmarks.models --rounds 2 --way "$3" --csv "$out/models-$1.csv" "${@:4}"
}

[ $# -gt 0 ] || set -- lists nsa train prefill short wide select
for step; do
  case $step in
    lists)
      if [ ! -f "$lists" ]; then
        # NSA's kernels compile meanwhile, into the cache of Triton
        "$python" -m benchmarks.tree_index --case 'T=32768 H=64' --rounds 1 > "$out/nsa-compiles.log" 2>&1 &
        run index 200 benchmarks.quality.run --quick --piece index --limit-s 190 --out "$out/quality"
        kill $! 2> /dev/null
        lists=$out/quality/lists.npz
      fi
      run lists 60 benchmarks.sparse_attention --lists "$lists" --case 's=(1|4) ' --csv "$out/lists.csv" ;;
    nsa) run nsa 200 benchmarks.tree_index --case 'H=64 k=64' --csv "$out/nsa.csv" ;;
    train)
      models train-128k 150 'index|Liger' --tokens 131072 --phase train
      models train-32k 50 'index|eager|Liger' --tokens 32768 --phase train ;;
    prefill) models prefill-128k 70 'index|eager|Liger' --tokens 131072 --phase prefill ;;
    short)
      models 8k 60 'index|eager|Liger' --tokens 8192
      models prefill-32k 40 'index|eager|Liger' --tokens 32768 --phase prefill ;;
    wide) models wide-32k 70 'index|Liger' --tokens 32768 --heads 64 4 ;;
    dense) models train-128k-dense 75 eager --tokens 131072 --phase train ;;
    select)
      run select 60 benchmarks run select_blocks --baseline eager --csv "$out/select.csv" ;;
    decode) run decode 150 benchmarks.tree_index_decode --csv "$out/decode.csv" ;;
    tree) run tree 200 benchmarks.tree_index --case 'T=(32768|131072) H=32' --csv "$out/tree.csv" ;;
    texts) run texts 120 benchmarks.short_sequences --csv "$out/short_texts.csv" ;;
    *) echo "budget.sh: there is no step $step" >&2; exit 2 ;;
  esac
done
exit "$status"
