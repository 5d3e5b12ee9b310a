"""What tools of torch expect of ops: FLOP counts, names in profiles, autocast, checkpoints, torch.func."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import htree_ops
from htree_ops import HTreeAttention, TreeOptions, fp8_gemm, gated_mlp, tree_attention
from htree_ops.flops import FORMULAS
from htree_ops.info import op_names
from tests.support.cases import normal
from tests.support.tree_attention_cases import FREE_SHAPES, SHAPES

OPTIONS = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 12}


def qkv(device: str, T: int = 70, T_q: int | None = None) -> list[Tensor]:
    sizes = ((1, T_q or T, 4, 8), (1, T, 2, 8), (1, T, 2, 6))
    return [normal(size, torch.float32, device, seed) for seed, size in enumerate(sizes)]


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


# ---- FLOP counts


def candidates_by_lists(
    q: Tensor, parents: list[Tensor], r: int, T: int, stride: int, is_free: bool
) -> tuple[int, int]:
    """(scored, kept) of §1.3, read from the lists that the op has used."""
    t = torch.arange(T - q.shape[1], T)
    group = q.shape[2] // parents[0].shape[2]
    lengths = [(rows >= 0).sum(-1).cpu().repeat_interleave(stride, 1)[:, : q.shape[1]] for rows in parents]
    scored = kept = 0
    for layer, m in enumerate(lengths):
        own = (t // r**layer)[None, :, None]
        n = (m - 1) * r + own % r + 1
        if is_free:  # the top list of a row and those above are not stored
            is_top = lengths[layer - 1] > 0 if layer else torch.ones_like(m, dtype=torch.bool)
            n = torch.where(m > 0, n, torch.where(is_top, own + 1, 0))
        scored += group * int(n.sum())
        kept += group * int(n.sum() - (lengths[layer - 1].sum() if layer else 0))
    return scored, kept


@pytest.mark.parametrize(
    "case", [x for x in SHAPES + FREE_SHAPES if x.selection_span is None], ids=lambda case: case.name
)
def test_the_counts_of_attention_are_those_of_its_lists(case, device):
    q, k, v = case.make_qkv(device)
    out, gmax, gsum, parents = torch.ops.htree.attention_forward(q, k, v, *case.op_options())
    if not q.numel() or not parents:
        return
    is_free = case.top_k * case.r < case.M
    scored, kept = candidates_by_lists(q, parents, case.r, k.shape[1], case.selection_stride, is_free)
    K, V = k.shape[3], v.shape[3]
    forward = 2 * K * scored + 2 * V * kept
    assert counted(lambda: torch.ops.htree.attention(q, k, v, *case.op_options())) == forward
    assert counted(lambda: torch.ops.htree.attention_forward(q, k, v, *case.op_options())) == forward
    backward = partial(torch.ops.htree.attention_backward, out, q, k, v, out, gmax, gsum)
    stored = 2 * kept * (3 * K + 2 * V)
    assert counted(lambda: backward(parents, *case.op_options())) == stored
    assert counted(lambda: backward([], *case.op_options())) == stored + 2 * K * (scored - kept)
    starts = [k.shape[1] - q.shape[1]]
    packed = case.packed()
    rows_of = partial(torch.ops.htree._attention_rows, q, k, v, starts, True, *packed)
    assert counted(rows_of) == forward
    rows = partial(torch.ops.htree._attention_rows_backward, q, k, v, out, gmax, gsum)
    lists = rows_of()[3]
    rest = (out, None, starts, [True] * 3, *packed)
    assert counted(lambda: rows(lists, *rest)) == stored
    assert counted(lambda: rows(lists[:, :0], *rest)) == stored + 2 * K * (scored - kept)
    only_dv = {"output_mask": [False, False, True]}
    assert counted(lambda: backward(parents, *case.op_options(), **only_dv)) == 2 * kept * (K + V)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("M", [12, 30])
def test_counts_beside_an_index(M, stride, device):
    """Those of select_blocks for each layer that a row chooses in, and of the nodes in the lists."""
    q, k, v = qkv(device, 300, 200)
    index = [normal((1, rows, heads, 16), torch.float32, device, 5) for rows, heads in ((200, 2), (300, 2))]
    options = TreeOptions(**(OPTIONS | {"max_top_nodes": M, "selection_stride": stride}))
    lists = torch.ops.htree._index_lists(q, k, *index, [100], *options.packed())
    parents = list(lists.split(-(-200 // stride), 1))
    _, kept = candidates_by_lists(q, parents, 4, 300, stride, M > 12)
    choosing = 0
    for layer, rows in enumerate(parents[:-1], start=1):  # the token layer chooses nothing
        chooses = (rows[0, :, 0, 0] >= 0).cpu()
        leaders = torch.arange(100, 300, stride)[chooses]
        choosing += 2 * 2 * 16 * int((leaders // 4**layer * 4**layer).sum())
    assert choosing > 0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with FlopCounterMode(display=False) as forward:
        out = tree_attention(*leaves, index=index, options=options)
    assert forward.get_total_flops() == choosing + 2 * (8 + 6) * kept
    assert counted(lambda: out.sum().backward()) == 2 * (3 * 8 + 2 * 6) * kept
    one, ends = (
        [x[0] for x in (q, k, v, *index)],
        [torch.tensor([0, n], dtype=torch.int32) for n in (200, 300)],
    )
    ends = [x.to(device) for x in ends]
    packed = htree_ops.tree_attention_varlen
    documents = partial(packed, *one[:3], *ends, 200, 300, index=one[3:], options=options)
    assert counted(documents) == forward.get_total_flops()
    assert counted(lambda: documents().sum().backward()) == (
        2 * forward.get_total_flops() + 2 * (2 * 8 + 6) * kept
    )


def test_dense_attention_counts_what_causal_attention_needs(device):
    q, k, v = (normal((2, 50, 3, 8), torch.float32, device, seed) for seed in range(3))
    pairs = 2 * 3 * 50 * 51 // 2
    assert counted(lambda: tree_attention(q, k, v)) == 4 * 8 * pairs
    leaves = [x.requires_grad_() for x in (q, k, v)]
    both = counted(lambda: tree_attention(*leaves).sum().backward())
    assert both == (2 + 5) * 2 * 8 * pairs


def test_counts_of_products(device):
    x, gate, up = (normal(size, torch.float32, device, 1) for size in ((2, 5, 16), (24, 16), (24, 16)))
    assert counted(lambda: gated_mlp(x, gate, up)) == 2 * 2 * 10 * 16 * 24
    leaves = [y.requires_grad_() for y in (x, gate, up)]
    assert counted(lambda: gated_mlp(*leaves).sum().backward()) == 6 * 2 * 10 * 16 * 24
    out = torch.ones(2, 5, 24, device=device)
    again = partial(torch.ops.htree.gated_mlp_backward, out, *(y.detach() for y in leaves))
    assert counted(lambda: again(output_mask=[True, False, False])) == 4 * 2 * 10 * 16 * 24
    a, b = normal((6, 32), torch.float32, device, 2), normal((32, 16), torch.float32, device, 3)
    assert counted(lambda: fp8_gemm(a, b)) == 2 * 6 * 32 * 16


def test_counts_of_the_stages(device):
    """Lists of full width: every candidate of every list."""
    from htree_ops.ops.tree_attention import stages

    q, k, v = qkv(device, T=48)
    nk, nv = stages.tree_build(k, v, 4)
    cos, sin = (x.to(device) for x in stages.rope_cache(12, 8))
    lists = stages.top_parents(1, 48, 2, 3, 2, 4, device=device)
    pairs = 48 * 4 * 3 * 4
    tables = (lists, cos, sin)
    scores, n = stages.compute_scores(q, nk, *tables, 1, 4)
    calls = (
        (8, lambda: stages.compute_scores(q, nk, *tables, 1, 4)),
        (6, lambda: stages.accumulate_non_topk(nv, lists, scores, n, 1, 4)),
        (8 + 6, lambda: stages.select_accumulate(q, nk, nv, *tables, 1, 4, 3)),
        (8 + 6, lambda: stages.bottom_accumulate(q, k, v, *tables, 4)),
        (8, lambda: stages.recompute_selection(q, nk, *tables, 1, 4, 3)),
    )
    for width, call in calls:
        assert counted(call) == 2 * width * pairs


def test_a_step_from_a_full_cache_counts_as_the_last_row(device):
    q, k, v = (
        normal(size, torch.float32, device, 1) for size in ((1, 64, 4, 8), (1, 64, 2, 8), (1, 64, 2, 6))
    )
    cache = htree_ops.TreeKVCache(
        1, 2, 8, 64, value_dim=6, **OPTIONS, page_size=16, dtype=torch.float32, device=device
    )
    cache.append(k, v)
    wanted = counted(lambda: tree_attention(q[:, -1:], k, v, **OPTIONS))
    assert counted(lambda: cache.attend(q[:, -1:])) == wanted


def test_every_op_with_products_has_a_formula():
    """The others are named, so that a new op is put on one side or the other."""
    without = {
        "causal_softmax", "causal_softmax.out", "causal_softmax_", "causal_softmax_backward", "compute_next_parents",
        "final_normalize", "fp8_compute_scale", "fp8_dequantize", "fp8_fake_quant", "_fp8_fake_quant_backward",
        "fp8_quantize", "grouped_hadamard", "hadamard_transform", "hadamard_transform_", "head_rmsnorm_rope",
        "head_rmsnorm_rope_backward", "kv_compress", "kv_decompress", "kv_prune", "mask_topk_scores_",
        "merge_to_global_", "_refuse_backward", "rmsnorm_rope", "rmsnorm_rope_backward", "rope", "rope_cache",
        "select_topk", "span_means", "top_parents", "_tree_cache_append_", "tree_cache_copy_",
        "_tree_cache_truncate_", "_tree_cache_pack_prompt_", "_tree_cache_prompt_bytes",
        "tree_build", "tree_build_backward",
        "attention", "tree_attention", "attention_forward", "attention_backward",  # what these call is counted
        "_check_tree_options",
    }  # fmt: skip
    names = {name for name in op_names() if not name.startswith("io_")}
    assert names - set(FORMULAS) - without == set()
    assert set(FORMULAS) <= names
    assert all(getattr(torch.ops.htree, name) in flop_registry for name in FORMULAS)


# ---- profiles, checkpoints, parameters of one's own


def test_a_profile_shows_ops_by_name_with_their_shapes(device):
    leaves = [x.requires_grad_() for x in qkv(device)]
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, record_shapes=True) as found:
        tree_attention(*leaves, **OPTIONS).sum().backward()
    shapes = {event.key: event.input_shapes for event in found.key_averages(group_by_input_shape=True)}
    assert shapes["htree::_attention"][:3] == [list(x.shape) for x in leaves]
    assert shapes["htree::_attention_rows"][:3] == [list(x.shape) for x in leaves]
    assert shapes["htree::_attention_rows_backward"][:3] == [list(x.shape) for x in leaves]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "again"])
def test_selective_checkpointing_names_attention_rows(kept, device):
    leaves = [x.requires_grad_() for x in qkv(device)]
    wanted = torch.autograd.grad(tree_attention(*leaves, **OPTIONS).square().sum(), leaves)
    ops = [torch.ops.htree._attention_rows.default] if kept else []
    out = checkpoint(
        lambda *x: tree_attention(*x, **OPTIONS),
        *leaves,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, ops),
    )
    with FlopCounterMode(display=False) as counter:
        got = torch.autograd.grad(out.square().sum(), leaves)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
    again = counter.get_flop_counts()["Global"].get(torch.ops.htree._attention_rows, 0)
    assert (again == 0) == kept


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_a_layer(reentrant, device):
    torch.manual_seed(0)
    layer = HTreeAttention(16, 4, 2, **OPTIONS, device=device)
    x = normal((2, 60, 16), torch.float32, device, 1).requires_grad_()
    wanted = torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))
    layer(x)
    out = checkpoint(layer, x, use_reentrant=reentrant)
    out.square().sum().backward()
    for ours, theirs in zip((x, *layer.parameters()), wanted, strict=True):
        assert torch.equal(ours.grad, theirs)


def test_functional_call_takes_parameters_of_the_caller(device):
    torch.manual_seed(0)
    layer = HTreeAttention(16, 4, 2, **OPTIONS, device=device)
    other = {name: (2 * p.detach()).requires_grad_() for name, p in layer.named_parameters()}
    x = normal((2, 60, 16), torch.float32, device, 1)
    out = torch.func.functional_call(layer, other, (x,))
    gradients = torch.autograd.grad(out.square().sum(), list(other.values()))
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(2)
    wanted = layer(x)
    assert torch.equal(out, wanted)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(wanted.square().sum(), layer.parameters()), strict=True
    ):
        assert torch.equal(ours, theirs)


# ---- autocast


class Block(nn.Module):
    """Ops with a rule of autocast beside one without, in a model with master weights in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = HTreeAttention(16, 4, 2, **OPTIONS)
        self.gate, self.up = (nn.Parameter(torch.randn(24, 16) / 4) for _ in range(2))
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(htree_ops.hadamard_transform(x))
        return x + self.down(gated_mlp(x, self.gate, self.up, act_on="gate"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_trains_under_autocast(dtype, device):
    torch.manual_seed(0)
    model = Block().to(device)
    x = normal((2, 50, 16), torch.float32, device, 1)
    exact = model(x)
    with torch.autocast(device, dtype):
        out = model(x)
        assert htree_ops.hadamard_transform(x).dtype == torch.float32  # no rule: the dtype that it is given
        assert model.attention(x).dtype == gated_mlp(x, model.gate, model.up).dtype == dtype
    assert bool((out - exact).norm() < 0.02 * exact.norm())
    out.square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())
