"""What the tests of the stages of tree attention share: inputs, refusals, comparisons."""

import functools

import pytest
import torch

import htree_ops.reference.tree_attention as ref
from tests.support.cases import case_id
from tests.support.devices import poisoned_memory
from tests.support.tree_attention_cases import CASES
from tests.support.tree_attention_checks import assert_state
from tests.support.tree_attention_problem import LAYOUTS

FILLED = [case for case in CASES if case.T and case.B]
SELECTING = [case for case in FILLED if len(case.sizes) > 1]
by_case = pytest.mark.parametrize("case", FILLED, ids=case_id)
by_selecting_case = pytest.mark.parametrize("case", SELECTING, ids=case_id)


@functools.lru_cache(maxsize=2)
def stages_of(case):
    """q, the stages (bottom first) and the table of a case, on the CPU."""
    q, k, v = case.make_qkv("cpu")
    return q, case.make_stages(q, k, v), case.make_table("cpu")


def refused(case, device, call):
    """True for float64 on CUDA, after checking that the op refuses it (§0.1)."""
    if device == "cpu" or case.dtype != torch.float64:
        return False
    with pytest.raises(TypeError, match="float64"):
        call()
    return True


def forward(q, k, v, case):
    """attention_forward in memory that starts as NaN."""
    with poisoned_memory():
        return torch.ops.htree.attention_forward(q, k, v, **case.reference_options())


def place(case, device, layer_k, layer_v, layer):
    """q, keys and values of a layer on the device; q and the tokens (layer 0) have the layout of the case."""
    tokens = [x.contiguous().to(device) for x in case.make_qkv("cpu")]
    q, k, v = LAYOUTS[case.layout](*tokens)
    if layer:
        k, v = layer_k.to(device), layer_v.to(device)
    return q, k, v


def on(device, *tensors):
    return [x.to(device) for x in tensors]


def wide(*tensors):
    return [x.double() if x.is_floating_point() else x for x in tensors]


def stretch(case, lists):
    """One list per query instead of one per leader, because the staged ops have no stride."""
    return ref.rows_of_queries(lists, case.T_q, case.selection_stride)


def score_bound(q, layer_k, scale, dtype):
    """A bound of the rounding error of a dot product of rotated rows: a few eps times |q| |k| scale."""
    norms = q.double().norm(dim=-1).max() * layer_k.double().norm(dim=-1).max()
    return float(torch.finfo(dtype).eps * (8 + q.shape[-1] ** 0.5) * norms * (scale or q.shape[-1] ** -0.5))


def clear_rows(importance, num, top_k):
    """Rows whose order no rounding changes: neighbours in rank, down to the first dropped, are 1e-4 apart."""
    ranked = importance.gather(-1, ref.order_by_key(importance, num))[..., 1 : top_k + 1]
    inside = torch.arange(1, ranked.shape[-1] + 1) < num[..., None]
    gaps = (ranked[..., :-1] - ranked[..., 1:]) / ranked[..., :-1]
    return ((gaps > 1e-4) | ~inside[..., 1:]).all(-1)


def check_state(got, wanted, layer_v, case):
    shape = (case.B, case.T_q, case.H)
    assert [tuple(x.shape) for x in got[:3]] == [shape, shape, (*shape, case.V)]
    assert all(x.dtype == case.state_dtype for x in got[:3])
    assert all(x.is_contiguous() for x in got[:3])
    assert_state(tuple(x.cpu() for x in got[:3]), wanted, layer_v)


def wild_lists(generator, shape, num_nodes, extreme):
    """Unsorted, repeated, negative and too large parents, with -1 in the middle of some lists."""
    lists = torch.randint(-3, 2 * num_nodes + 3, shape, generator=generator)
    lists = torch.where(torch.rand(shape, generator=generator) < 0.15, -1, lists)
    if extreme:
        ends = torch.tensor([2**31 - 1, -(2**31), 2**30, -(2**30)])
        chosen = ends[torch.randint(0, 4, shape, generator=generator)]
        lists = torch.where(torch.rand(shape, generator=generator) < 0.3, chosen, lists)
    return lists.to(torch.int32)
