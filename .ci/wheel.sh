#!/usr/bin/env bash
# One wheel for several versions of torch: `make wheel` calls this. Everything is kept in build/wheel, so a second run
# compiles what changed.
#
# Environment: TORCHES, the versions of torch to compile a layer for, one at a time; CHECKED, those to install the wheel
# beside; PYTHONS make the environments of both in turn, and each that compiles a layer compiles its `_host`; FLAVOURS,
# "cpu" and "cuda" layers; TORCH_CUDA_ARCH_LIST, the architectures of the kernels; HTREE_COMMON, a folder with common
# libraries that stand compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
read -ra pythons <<<"${PYTHONS:-python3}"
TORCHES=${TORCHES:-2.11.0 2.12.1 2.13.0 2.14.1 2.15.0}
CHECKED=${CHECKED:-${TORCHES%% *} ${TORCHES##* }}
FLAVOURS=${FLAVOURS:-cpu cuda}
# 8.6 and 12.1 run the code of 8.0 and 12.0; every GPU without code of its own compiles the PTX
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-8.0+PTX;8.9;9.0a;10.0;12.0}
work=$root/build/wheel
lib=$work/lib

say() { printf '\n== %s (after %d s)\n' "$1" "$SECONDS"; }

# The environment `made` with a torch and what a build needs: environment NAME TORCH
environment() {
  local folder=$work/envs/$1 python=${pythons[made++ % ${#pythons[@]}]}
  [ -e "$folder/.installed" ] && return
  "$python" -m venv "$folder"
  "$folder/bin/pip" install --quiet "torch==$2" numpy "setuptools>=77,<82" wheel ninja
  touch "$folder/.installed"
}

first=${TORCHES%% *}
builder=$work/envs/$first/bin/python
say "environment of torch $first"
made=0 environment "$first" "$first"

rm -rf "$lib"
common=${HTREE_COMMON:-$work/common}
if [ -z "${HTREE_COMMON:-}" ]; then
  say "kernels for $TORCH_CUDA_ARCH_LIST, and the CPU loops"
  [[ $FLAVOURS == *cuda* ]] && wanted=1 || wanted=0
  rm -rf "$common" # libraries of other sources; the objects stay
  HTREE_CUDA=$wanted "$builder" setup.py -q build_common --build-lib "$common" --build-temp "$work/temp-common"
fi

made=0
for torch in $TORCHES; do
  environment "$torch" "$torch"
  for flavour in $FLAVOURS; do
    say "layer of torch $torch, $flavour"
    [ "$flavour" = cuda ] && wanted=1 || wanted=0
    HTREE_PREBUILT=$common HTREE_CUDA=$wanted "$work/envs/$torch/bin/python" setup.py -q build_ext \
      --build-lib "$lib" --build-temp "$work/temp-$torch-$flavour"
  done
done

say "wheel"
mkdir -p dist
rm -f dist/htree_ops-*.whl
# `build` finds that layer compiled and adds the Python files
HTREE_PREBUILT=$lib HTREE_CUDA=$wanted "$work/envs/$torch/bin/python" setup.py -q build --build-lib "$lib" \
  --build-temp "$work/temp-$torch-$flavour" bdist_wheel --skip-build --dist-dir dist
plain=$(basename dist/htree_ops-*.whl)
say "what its libraries ask of a system"
auditor=$work/envs/audit
[ -e "$auditor" ] || { "${pythons[0]}" -m venv "$auditor" && "$auditor/bin/pip" install --quiet auditwheel; }
"$auditor/bin/auditwheel" show "dist/$plain" | tee "$work/auditwheel.txt"
# The libraries of torch and CUDA are those of the environment; only the symbols of the system's C and C++ count.
asked=$(for so in "$lib"/htree_ops/*.so; do objdump -T "$so"; done | grep -oE '\b(GLIBC|GLIBCXX|CXXABI)_[0-9.]+' | sort -uV)
for limit in GLIBC_2.28 GLIBCXX_3.4.25 CXXABI_1.3.11; do
  newest=$(grep "^${limit%_*}_" <<<"$asked" | tail -1)
  echo "newest ${limit%_*}: $newest, manylinux_2_28 has $limit"
  [ "$(printf '%s\n' "$newest" "$limit" | sort -V | tail -1)" = "$limit" ] || exit 1
done
tagged=$("$builder" -m wheel tags --remove --python-tag py3 --abi-tag none --platform-tag manylinux_2_28_x86_64 \
  "dist/$plain" | tail -1)
ls -l "dist/$tagged"

made=0
for torch in $CHECKED; do
  say "installed beside torch $torch"
  environment "checked-$torch" "$torch"
  python=$work/envs/checked-$torch/bin/python
  "$python" -m pip install --quiet --force-reinstall --no-deps "dist/$tagged"
  "$python" -m pip install --quiet pytest expecttest hypothesis
  rm -rf "$work/elsewhere" && mkdir "$work/elsewhere"
  cp -r tests pyproject.toml "$work/elsewhere"
  cd "$work/elsewhere"
  "$python" -m htree_ops info | sed -n 1,6p
  "$python" -m pytest -q -p no:cacheprovider -c pyproject.toml -o addopts= -o timeout= tests/test_registration.py
  "$python" -m htree_ops correctness --seq-len 512 --batch 1
  cd "$root"
done
say "done"
