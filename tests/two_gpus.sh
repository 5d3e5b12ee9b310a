#!/usr/bin/env bash
# Everything that needs two GPUs of one machine: two_gpus.sh OUT LIMIT [PYTHON]
# Each step may take LIMIT seconds and is ended then; the others run all the same. Logs, tables and curves go to OUT.
# STEPS="devices ranks bars training" chooses steps: "ranks" alone are the tests of ranks on NCCL, in about a minute.
# DEVICE=cpu rehearses them on processes of this machine, at sizes that say nothing about speed, and
# without the tests, which `make test` runs there.
# Uses the library that is built in place, or the one that `make cuda-build` left in build/cuda if that is newer.
set -uo pipefail
usage() {
  echo "two_gpus.sh: $1; usage: two_gpus.sh OUT LIMIT [PYTHON]" >&2
  exit 2
}
[ $# -ge 2 ] && [ $# -le 3 ] || usage "two or three arguments are required, got $#"
[[ $2 =~ ^[1-9][0-9]*$ ]] || usage "LIMIT must be a number of seconds, got '$2'"
mkdir -p "$1" || usage "OUT cannot be made: '$1'"
out=$(cd "$1" && pwd) limit=$2
cd "$(dirname "$0")/.."
python=${3:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
device=${DEVICE:-cuda}
case $device in
  cuda | cpu) ;;
  *) usage "DEVICE must be cuda or cpu, got '$device'" ;;
esac
steps=(${STEPS:-devices ranks bars training})
for step in "${steps[@]}"; do
  [[ $step =~ ^(devices|ranks|bars|training)$ ]] || usage "STEPS may hold devices, ranks, bars and training, got '$step'"
done

if [ "$device" = cuda ]; then
  gpus=$(timeout 120 "$python" -c 'import torch; print(torch.cuda.device_count())') || gpus=0
  if [ "$gpus" -lt 2 ]; then
    echo "two_gpus.sh: two GPUs are required, torch sees $gpus" >&2
    exit 1
  fi
  if [ build/cuda/htree_ops/_C.abi3.so -nt htree_ops/_C.abi3.so ]; then
    echo "library: build/cuda"
    cp -p build/cuda/htree_ops/_C.abi3.so build/cuda/htree_ops/_build_info.json htree_ops/
  else
    echo "library: htree_ops/_C.abi3.so"
  fi
  nvidia-smi topo -m | tee "$out/machine.log"
  export HTREE_REQUIRE_CUDA=1
fi
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
: >"$out/summary.txt"
status=0 running=
trap '[ -z "$running" ] || kill "$running"' EXIT
trap 'exit 130' INT TERM

# run NAME COMMAND...: a step with its log, its end after LIMIT seconds, and its line in the summary. torchrun gives its
# ranks 30 seconds to end. The log is no pipe, so that a rank that outlives its launcher holds nothing up.
run() {
  local name=$1 begun=$SECONDS ended result
  shift
  : >"$out/$name.log"
  timeout --kill-after=60 "$limit" "$@" >"$out/$name.log" 2>&1 &
  running=$!
  tail --pid="$running" -s 0.2 -n +1 -f "$out/$name.log" &
  wait "$running"
  ended=$?
  running=
  wait # for the end of the log
  case $ended in
    0) result=passed ;;
    124 | 137) result="STOPPED after LIMIT=$limit seconds" ;;
    *) result="FAILED with status $ended" ;;
  esac
  [ "$ended" -eq 0 ] || status=1
  echo "$name: $result, $((SECONDS - begun)) s" | tee -a "$out/summary.txt"
  return "$ended"
}

# The log names the test that a step was ended in.
tests() {
  run "$1" "$python" -m pytest -v -k cuda -p no:cacheprovider -o timeout=300 "${@:2}"
}

# A program on this many ranks of this machine; --standalone takes a free port.
launch=("$python" -m torch.distributed.run --standalone --nproc-per-node)

# A short run on one rank, the same one on two, shared out in each of the three ways, and one that goes on under another
# mesh than that of its checkpoint. The learning rate is a tenth of the default, at which roundings would grow as far as
# mistakes.
train() {
  local flags=(--device "$device" --steps 40 --eval-every 40 --save-every 20 --learning-rate 0.0003) folders=() way
  [ "$device" = cuda ] || flags+=(--steps 6 --context 512 --layers 2 --dim 32 --heads 4 --kv-heads 2 --eval-windows 1
    --compression-rate 4 --top-k 4 --max-top-nodes 16 --batch 2)
  run training-one "${launch[@]}" 1 examples/train_distributed.py "${flags[@]}" --out "$out/one" || return
  for way in data context tensor; do
    run "training-$way" "${launch[@]}" 2 examples/train_distributed.py "${flags[@]}" --"$way"-parallel 2 --out "$out/$way" \
      && folders+=("$out/$way")
  done
  [ ${#folders[@]} -eq 0 ] || run training-losses "$python" tests/distributed/same_losses.py "$out/one" "${folders[@]}"
  [ -e "$out/context/latest" ] || return
  run training-resumed "${launch[@]}" 2 examples/train_distributed.py --resume --device "$device" --steps 50 \
    --tensor-parallel 2 --out "$out/context"
}

for step in "${steps[@]}"; do
  case $step in
    devices) [ "$device" = cpu ] || tests devices tests/test_devices.py ;;
    ranks) [ "$device" = cpu ] || tests ranks tests/distributed --ignore=tests/distributed/test_training.py ;;
    bars)
      sizes=(--bars)
      [ "$device" = cuda ] || sizes=(--device cpu --tokens 2048 --rounds 1)
      run bars "${launch[@]}" 2 -m benchmarks.context_parallel --csv "$out/context_parallel.csv" "${sizes[@]}"
      ;;
    training)
      [ "$device" = cpu ] || tests training-tests tests/distributed/test_training.py
      train
      ;;
  esac
done
echo
cat "$out/summary.txt"
exit "$status"
