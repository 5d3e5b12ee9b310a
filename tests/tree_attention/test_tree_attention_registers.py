"""Registers of ``per_list/``, ``dense_rows/`` and ``masked_rows/`` (csrc/ops/sparse_attention/cuda/sm90).

Needs nvcc and no GPU. A spill in its loops, or warpgroup products that ptxas runs one by one, costs a fifth to a half
of the time and changes no result, so no other test sees it.
"""

import re
import shutil
import subprocess

import pytest
from tree_attention_instances import CSRC, write_instance

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")

KERNEL = re.compile(
    r"Function properties for (\w*(?:per_list_attend|dense_rows|dense_(?:query|key)_gradient)_kernel\w*)\n"
    r".*?(\d+) bytes spill stores, (\d+) bytes spill loads"
)


@pytest.mark.skipif(NVCC is None or not CSRC.is_dir(), reason="no nvcc, or no source tree")
@pytest.mark.parametrize(
    ("instance", "num_kernels"),
    [
        # of 64 and of 128 rows, rotated or not
        ("sparse_attention_forward_per_list_attend_bfloat16_d128", 4),
        ("sparse_attention_forward_per_list_attend_half_d64", 4),
        ("sparse_attention_forward_dense_rows_attend_bfloat16_d128", 1),
        ("sparse_attention_forward_dense_rows_attend_half_d64", 1),
        ("sparse_attention_forward_masked_rows_attend_bfloat16_d128", 1),
        ("sparse_attention_forward_masked_rows_attend_half_d128", 1),
        ("sparse_attention_forward_masked_rows_attend_bfloat16_d64", 1),
        ("sparse_attention_backward_dense_rows_query_gradient_bfloat16_d128", 1),
        ("sparse_attention_backward_dense_rows_query_gradient_half_d64", 1),
        ("sparse_attention_backward_dense_rows_key_gradient_bfloat16_d128", 1),
        ("sparse_attention_backward_dense_rows_key_gradient_half_d128", 1),
        ("sparse_attention_backward_masked_rows_gradients_bfloat16_d128", 2),  # dQ, and dK with dV
        ("sparse_attention_backward_masked_rows_gradients_half_d128", 2),
        ("sparse_attention_backward_masked_rows_gradients_bfloat16_d64", 2),
    ],
)
def test_kernels_spill_nothing_and_overlap_their_products(instance, num_kernels, tmp_path):
    command = [NVCC, "-std=c++17", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v"]
    done = subprocess.run(
        [
            *command,
            "--expt-relaxed-constexpr",
            f"-I{CSRC}",
            str(write_instance(instance, tmp_path)),
            "-o",
            str(tmp_path / "cubin"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = KERNEL.findall(done.stderr)
    assert [(stores, loads) for _, stores, loads in kernels] == [("0", "0")] * num_kernels, done.stderr
    # C7510 ... C7514: "wgmma.mma_async instructions are serialized"
    assert "serialized" not in done.stderr
