#!/usr/bin/env bash
# The tests on a GPU machine: gpu.sh test|sanitize OUT LIMIT PYTHON [pytest arguments]
# JOBS=N runs the tests in N processes that share the GPUs: each sees all of them, and another one first. The tests of more
# than 2^31 elements, which take most of a GPU's memory, come before them.
# Uses the library that is built in place, or the one that `make cuda-build` left in build/cuda if that is newer.
set -uo pipefail
cd "$(dirname "$0")/.."
mode=$1 out=$2 limit=$3 python=$4
shift 4
mkdir -p "$out"
command -v "$python" >/dev/null || python=python3
if [ build/cuda/htree_ops/_C.abi3.so -nt htree_ops/_C.abi3.so ]; then
  echo "library: build/cuda"
  cp -p build/cuda/htree_ops/_C.abi3.so build/cuda/htree_ops/_build_info.json htree_ops/
else
  echo "library: htree_ops/_C.abi3.so"
fi

# Every half minute, how far the parts of the tests are: the last percentages in their logs. The last sleep outlives this
# script; it must not hold the pipe that the script may write to.
report() {
  while sleep 30 >/dev/null 2>&1; do
    for log in "$out"/test-gpu-*.log; do
      printf '%s: %s  ' "$(basename "$log" .log)" "$(grep -o '[0-9]*%' "$log" | tail -n 1)"
    done
    echo
  done
}

# A fault of one process ends all that share its GPU. So each test that saw one runs again, alone and with a GPU of its
# own: the one that made it fails again, unless it needs company for it.
repeat_faulted() {
  local test log
  while IFS= read -r test; do
    log=$out/faulted-$((++repeated)).log
    if CUDA_LAUNCH_BLOCKING=1 alone "$log" "$test"; then
      echo "passes alone: $test"
    else
      echo "fails alone, see $log: $test"
    fi
  done < <(named FAULTED)
}

# Tests that found too little memory beside others run again without them, which decides. Returns whether they pass.
repeat_without_memory() {
  local tests log=$out/alone.log
  readarray -t tests < <(named 'OUT OF MEMORY')
  if alone "$log" "${tests[@]}"; then
    echo "out of memory beside others, pass alone: ${#tests[@]} tests"
  else
    echo "out of memory beside others, and fail alone, see $log:"
    printf '%s\n' "${tests[@]}"
    return 1
  fi
}

run_tests() { # log, pytest arguments
  local log=$1
  shift
  timeout "$limit" "$python" -m pytest -q -p no:cacheprovider -o timeout=300 "$@" >"$log" 2>&1
}

alone() {
  (unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY && run_tests "$@")
}

# The tests behind the words $1 at the beginning of lines, of all parts that run beside each other.
named() {
  sed -n "s/^$1 //p" "$out"/test-gpu-[1-9]*.log | sort -u
}

# Takes the status of a part into account.
count_part() {
  case $1 in
    5) return ;;                                # it had no tests
    20) [ "$2" -eq 0 ] && status=1 || lacked=1 ;; # only memory was lacking: alone that is a failure
    *) checked "$1" "part $2 of $jobs" || status=1 ;;
  esac
  ran=1
}

# Status of a process that `timeout` may have ended, and what to do about it.
checked() {
  if [ "$1" -eq 124 ]; then
    echo "gpu.sh: $2 stopped after LIMIT=$limit seconds: raise LIMIT or JOBS" >&2
  fi
  return "$1"
}

# Without the multi-process service the GPU gives processes their turns, which takes several times as long. It runs
# where it is installed, in a folder of its own, and ends with the tests.
start_mps() {
  command -v nvidia-cuda-mps-control >/dev/null && [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || return 0
  mps=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY=$mps CUDA_MPS_LOG_DIRECTORY=$mps
  # not for CUDA_VISIBLE_DEVICES alone: a service of some GPUs gives them other numbers
  if env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d && timeout 60 "$python" -c "import torch; torch.ones(1, device='cuda').item()"; then
    echo "processes share the GPU through its multi-process service"
    trap 'echo quit | nvidia-cuda-mps-control >/dev/null' EXIT
  else
    echo quit | nvidia-cuda-mps-control >/dev/null 2>&1
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  fi
}

# The GPUs that a part sees, those of the machine or of CUDA_VISIBLE_DEVICES, from another one on for each part.
visible_to() {
  local all=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd ,)}
  local gpus first
  IFS=, read -ra gpus <<<"$all"
  [ ${#gpus[@]} -gt 0 ] || return 0
  first=$((($1 - 1) % ${#gpus[@]}))
  gpus=("${gpus[@]:first}" "${gpus[@]:0:first}")
  (IFS=, && echo "${gpus[*]}")
}

export HTREE_REQUIRE_CUDA=1 PYTHONUNBUFFERED=1
# torch.compile and AOTInductor build with CXX. What a compiler that links libstdc++ statically builds cannot be loaded beside
# torch: the process ends at its first exception. The system's compiler does not.
[ ! -x /usr/bin/g++ ] || export CXX=${CXX:-/usr/bin/g++} CC=${CC:-/usr/bin/gcc}
# Each process of torch.compile would start as many helpers as there are cores.
[ "${JOBS:-1}" -eq 1 ] || export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-1}
case $mode in
  test)
    jobs=${JOBS:-1} status=0 running=() repeated=0 ran=0 lacked=0
    rm -f "$out"/test-gpu-*.log "$out"/faulted-*.log "$out"/alone.log # of an earlier run, which may have had more parts
    if [ "$jobs" -gt 1 ]; then
      run_tests "$out/test-gpu-0.log" -k cuda "$@" --shard "0/$jobs"
      count_part $? 0
      start_mps
    fi
    for part in $(seq "$jobs"); do
      gpus=$(visible_to "$part") shard=()
      [ "$jobs" -eq 1 ] || shard=(--shard "$part/$jobs")
      (
        [ -z "$gpus" ] || export CUDA_VISIBLE_DEVICES=$gpus
        run_tests "$out/test-gpu-$part.log" -k cuda "$@" "${shard[@]}"
      ) &
      running+=($!)
    done
    report &
    reporter=$!
    for part in $(seq "$jobs"); do
      wait "${running[part - 1]}"
      count_part $? "$part"
    done
    kill "$reporter"
    tail -n 3 "$out"/test-gpu-*.log
    grep -h '^FAILED\|^ERROR' "$out"/test-gpu-*.log
    repeat_faulted
    [ "$lacked" -eq 0 ] || repeat_without_memory || status=1
    if [ "$ran" -eq 0 ]; then
      echo "gpu.sh: no test ran" >&2
      status=1
    fi
    exit "$status"
    ;;
  sanitize)
    status=0
    files=() options=()
    for argument in "$@"; do
      case $argument in
        *.py | *.py::*) files+=("$argument") ;;
        *) options+=("$argument") ;;
      esac
    done
    [ ${#files[@]} -gt 0 ] || files=(tests/*/test_sanitize*.py)
    for tool in memcheck racecheck; do
      for file in "${files[@]}"; do
        log=$out/sanitize-$tool-$(basename "${file%%.py*}").log
        HTREE_SANITIZER=$tool PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit" compute-sanitizer --tool "$tool" --error-exitcode 86 \
          --target-processes all "$python" -m pytest -q -k cuda -p no:cacheprovider "$file" \
          "${options[@]}" 2>&1 | tee "$log"
        ended=${PIPESTATUS[0]}
        # racecheck makes reports that are no races; see there
        if [ "$tool" = racecheck ] && [ "$ended" -eq 86 ]; then
          "$python" tests/racecheck_reports.py htree_ops/_C.abi3.so "$log" && ended=0
        fi
        checked "$ended" "$tool of $file" || status=1
      done
    done
    exit "$status"
    ;;
  *)
    echo "gpu.sh: mode must be test or sanitize, got $mode" >&2
    exit 2
    ;;
esac
