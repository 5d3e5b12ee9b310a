"""Small calls of the kernels of the IO-only variants, for compute-sanitizer (`make sanitize`)."""

from dataclasses import replace

import pytest
import torch

from tests.support.tree_attention_calls import calls
from tests.support.tree_attention_cases import SHAPES

pytestmark = pytest.mark.gpu

#: Packs and single elements, groups of 1 to 16 heads, lists that end in the middle of a tile, a batch, misaligned rows.
NAMES = ("r16", "wide_lists", "group_of_3", "group_of_16", "odd_value", "batch", "misaligned", "head_128")


def to_cuda(value: object) -> object:
    """A copy of the tensor on the GPU, with its strides and offset."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().cuda()
    place = value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype, device="cuda").set_(storage, *place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [shape for shape in SHAPES if shape.name in NAMES], ids=lambda c: c.name)
def test_every_io_only_variant(case, dtype):
    prepared = [call for call in calls(case.with_dtype(dtype), "cpu") if call.op.startswith("io_")]
    variants = {call.op: replace(call, args=tuple(map(to_cuda, call.args))) for call in prepared}
    assert len(variants) == 5
    results = {op: call() for op, call in variants.items()}
    assert not results["io_compute_scores"][0].isnan().any()
    assert results["io_attention_forward"].isfinite().all()
    scores, num, top_k, _, _, t0 = variants["io_select_topk"].args
    lists, _, rate = variants["io_compute_next_parents"].args
    for select in ("lcg", "stratified"):
        positions = torch.ops.htree.io_select_topk(scores, num, top_k, 1, select, t0)
        mapped = torch.ops.htree.io_compute_next_parents(lists, positions, rate, True)
        assert ((mapped >= 0) == (positions >= 0)).all()
