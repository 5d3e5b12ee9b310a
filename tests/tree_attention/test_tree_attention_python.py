"""`htree_ops.tree_attention` and `HTreeAttention`: options, log-sum-exp, gradients, error classes."""

import ast
import math
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

import htree_ops
import htree_ops.ops.tree_attention as family
import htree_ops.reference.tree_attention as ref
from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.tree_attention import attention, options, stages
from tests.support.tree_attention_calls import stage_arguments
from tests.support.tree_attention_cases import SHAPES
from tests.support.tree_attention_checks import assert_output

CASES = {shape.name: shape for shape in SHAPES}


def keywords(case):
    return {
        "compression_rate": case.r,
        "max_top_nodes": case.M,
        "top_k": case.top_k,
        "selection_stride": case.selection_stride,
        "scale": case.scale,
        "rope_base": case.rope_base,
        "importance": case.importance,
    }


@pytest.mark.parametrize(
    "name",
    ["ragged_everywhere", "group_of_3", "stride4_suffix", "no_rotation", "importance_lse", "other_scale"],
)
def test_the_function_is_the_op(name, device):
    case = CASES[name]
    q, k, v = case.make_qkv(device)
    out, lse = htree_ops.tree_attention(q, k, v, **keywords(case), return_lse=True)
    wanted, gmax, gsum, _ = torch.ops.htree.attention_forward(q, k, v, *case.op_options())
    assert torch.equal(out, wanted)
    assert torch.equal(lse, gmax + gsum.log())
    assert torch.equal(htree_ops.tree_attention(q, k, v, **keywords(case)), wanted)


def test_defaults_are_the_documented_ones(device):
    q, k, v = torch.randn(3, 1, 40, 2, 8, device=device)
    out = htree_ops.tree_attention(q, k, v)
    assert torch.equal(
        out, torch.ops.htree.attention(q, k, v, 16, 8192, 512, 8**-0.5, 1e4, "lse_causal", 1, True)
    )
    assert_output(out, ref.dense_causal_attention(*(x.cpu().double() for x in (q, k, v))), v)


@pytest.mark.parametrize("name", ["group_of_3", "group_of_8", "multi_head", "stride4"])
def test_scope_q_head_selects_per_query_head(name, device):
    """Lists selected with expanded heads give the reference's result for scope="q_head" (H11)."""
    case = CASES[name]
    q, k, v = case.make_qkv(device)
    out = htree_ops.tree_attention(q, k, v, **keywords(case), scope="q_head")
    group = case.H // case.H_kv
    wide = [x.repeat_interleave(group, dim=2) for x in (k, v)]
    parents = [x.cpu() for x in torch.ops.htree.attention_forward(q, *wide, *case.op_options())[3]]
    cpu = [x.cpu() for x in (q, k, v)]
    wanted = ref.htree_forward_naive(
        *cpu, **case.reference_options(), scope="q_head", parents=parents, compute_dtype=torch.float64
    )
    assert_output(out, wanted.out, cpu[2])
    if group == 1:
        assert torch.equal(out, htree_ops.tree_attention(q, k, v, **keywords(case)))


@pytest.mark.parametrize("scope", ["kv_head", "q_head"])
@pytest.mark.parametrize("store_parents", [True, False])
@pytest.mark.parametrize("return_lse", [True, False])
def test_gradients_flow_through_the_function(scope, store_parents, return_lse, device):
    case = CASES["group_of_3"]
    leaves = [x.requires_grad_() for x in case.make_qkv(device)]
    result = htree_ops.tree_attention(
        *leaves, **keywords(case), scope=scope, store_parents=store_parents, return_lse=return_lse
    )
    out = result[0] if return_lse else result
    got = torch.autograd.grad(out.square().sum(), leaves)
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    group = case.H // case.H_kv if scope == "q_head" else 1
    wide = [x.repeat_interleave(group, dim=2) for x in (k, v)]
    plain = torch.ops.htree.attention(q, *wide, *case.op_options())
    assert torch.equal(out, plain)
    for ours, theirs in zip(got, torch.autograd.grad(plain.square().sum(), (q, k, v)), strict=True):
        assert torch.equal(ours, theirs)


def test_the_module_is_its_projections_around_the_function(device):
    torch.manual_seed(0)
    options = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
    module = htree_ops.HTreeAttention.from_documents(24, 6, 2, bias=True, **options).to(device)
    x = torch.randn(2, 50, 24, device=device)
    got = module(x)
    q = module.q_proj(x).view(2, 50, 6, 4)
    k, v = (projection(x).view(2, 50, 2, 4) for projection in (module.k_proj, module.v_proj))
    wanted = module.o_proj(htree_ops.tree_attention(q, k, v, **options).flatten(2))
    assert torch.equal(got, wanted)
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert {name.split(".")[0] for name, _ in module.named_parameters()} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    assert "num_kv_heads=2" in repr(module)
    assert "top_k=2" in repr(module)
    clone = htree_ops.HTreeAttention.from_documents(24, 6, 2, bias=True, **options).to(device)
    clone.load_state_dict(module.state_dict())
    assert torch.equal(clone(x), got)


def test_the_module_refuses_masks_and_sizes_that_do_not_divide():
    module = htree_ops.HTreeAttention(16, 4)
    x = torch.randn(1, 5, 16)
    with pytest.raises(NotImplementedError, match="attn_mask is not supported"):
        module(x, attn_mask=torch.ones(5, 5))
    for wrong in (torch.randn(5, 16), torch.randn(1, 5, 17)):
        with pytest.raises(htree_ops.ShapeMismatchError, match="x must be"):
            module(wrong)
    for sizes in ((16, 3), (16, 4, 3), (12, 4, 4), (16, 4, 4, 5), (16, 0)):
        with pytest.raises(ValueError, match="HTreeAttention"):
            htree_ops.HTreeAttention(*sizes)


def test_a_tensor_on_another_device_is_named():
    q, k, v = torch.zeros(2, 12, 4, 6), torch.zeros(2, 20, 2, 6), torch.zeros(2, 20, 2, 5, device="meta")
    with pytest.raises(DeviceError, match=r"v must be on the device of k \(cpu\), got meta") as caught:
        htree_ops.tree_attention(q, k, v)
    assert caught.value.tensor_name == "v"


def test_the_stage_functions_return_the_tensors_that_the_ops_change(device):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 1, 8, 2, generator=generator).to(device)
    positions = torch.tensor([3, -1], dtype=torch.int32, device=device).expand(1, 2, 1, 2).contiguous()
    assert family.mask_topk_scores_(scores, positions) is scores
    assert (scores[..., 3, :] == -math.inf).all()
    state = [torch.ones(1, 2, 2, device=device) for _ in range(2)] + [torch.ones(1, 2, 2, 3, device=device)]
    merged = family.merge_to_global_(*state, *[x.clone() for x in state])
    assert all(ours is theirs for ours, theirs in zip(merged, state, strict=True))
    assert (state[1] == 2).all()


def test_factories_without_a_device_compile_and_follow_the_default():
    torch._dynamo.reset()

    def tables(x):
        return stages.rope_cache(8, 8) + x, stages.top_parents(1, 40, 2, 4, 1)

    for actual, expected in zip(
        torch.compile(tables, fullgraph=True, backend="aot_eager")(torch.zeros(4)),
        tables(torch.zeros(4)),
        strict=True,
    ):
        assert torch.equal(actual, expected)
    with torch.device("meta"):
        assert stages.rope_cache(8, 8).is_meta
        assert stages.top_parents(1, 40, 2, 4, 1).is_meta
        assert stages.rope_cache(8, 8, device="cpu").device.type == "cpu"


def test_dtypes_of_options_and_lists_have_the_classes_of_the_package():
    with pytest.raises(
        UnsupportedDtypeError, match=r"rope_cache: dtype must be torch\.float32 or torch\.float64"
    ):
        stages.rope_cache(8, 8, dtype=torch.float16)
    state = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2)
    with pytest.raises(UnsupportedDtypeError, match=r"final_normalize: dtype must be .*, got torch\.int32"):
        stages.final_normalize(*state, torch.int32)
    q, k, v = torch.randn(3, 1, 40, 2, 8)
    options = {"compression_rate": 2, "max_top_nodes": 8, "top_k_per_layer": 4}
    out, gmax, gsum, parents = family.attention_forward(q, k, v, **options)
    assert len(parents) == 4
    for wrong, kind, message in (
        (parents[0].long(), UnsupportedDtypeError, r"parents\[1\] must have dtype torch\.int32"),
        (parents[0][0], ShapeMismatchError, r"parents\[1\] must have shape \[1, 40, 2, 4\]"),
        (parents[0][..., :3], ShapeMismatchError, r"parents\[1\] must have shape \[1, 40, 2, 4\]"),
        (parents[0][:, :, :1], ShapeMismatchError, r"parents\[1\] must have shape \[1, 40, 2, 4\]"),
        (parents[0].to("meta"), DeviceError, r"parents\[1\] must be on the device of q \(cpu\), got meta"),
        (None, TypeError, r"parents\[1\] must be a Tensor"),
    ):
        lists = [parents[0], wrong, *parents[2:]]
        with pytest.raises(kind, match=message):
            family.attention_backward(out, q, k, v, out, gmax, gsum, lists, **options)


#: Stages with options.
STAGES = [
    *(
        "tree_build",
        "tree_build_backward",
        "rope_cache",
        "rope",
        "top_parents",
        "compute_scores",
        "select_topk",
    ),
    *("compute_next_parents", "accumulate_non_topk", "compute_and_select", "select_accumulate"),
    *("bottom_accumulate", "recompute_selection"),
]


@pytest.mark.parametrize("name", STAGES)
def test_the_options_of_a_stage_are_named(name):
    call = getattr(stages, name)
    given = stage_arguments(call)
    call(**given)
    for option in [key for key, value in given.items() if type(value) is int]:
        for value in (1.5, "a", None, True, [1]):
            with pytest.raises(
                TypeError, match=f"{name}: {option} must be an int, got {type(value).__name__}"
            ):
                call(**given | {option: value})
        with pytest.raises(ValueError, match=f"{name}: {option} must be .*, got 9223372036854775808"):
            call(**given | {option: 2**63})
    for option, value, kind, message in (
        ("scale", "a", TypeError, "a number, got str"),
        ("scale", math.inf, ValueError, "finite"),
        ("importance", 3, TypeError, "a str, got int"),
        ("importance", "most", ValueError, "lse_causal"),
        ("inverse", 1, TypeError, "a bool, got int"),
        ("base", "a", TypeError, "a number, got str"),
        ("base", 0.0, ValueError, "positive and finite"),
        ("positions", None, TypeError, "a Tensor, got NoneType"),
        ("positions", [0], TypeError, "a Tensor, got list"),
    ):
        if option in given:
            with pytest.raises(kind, match=f"{name}: {option} must be .*{message}"):
                call(**given | {option: value})


def test_a_table_beyond_every_memory_is_refused_by_name():
    with pytest.raises(
        ValueError, match="rope_cache: size must be between 0 and 2147483647, got 9223372036854775807"
    ):
        stages.rope_cache(2**63 - 1, 16)
    with pytest.raises(
        ValueError, match="rope_cache: dim must be between 0 and 2147483647, got 1099511627776"
    ):
        stages.rope_cache(2, 2**40)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"compression_rate": 2.0}, TypeError, "compression_rate must be an int, got float"),
        ({"top_k_per_layer": "4"}, TypeError, "top_k_per_layer must be an int, got str"),
        ({"max_top_nodes": 2**63}, ValueError, "max_top_nodes must be an int of 64 bits"),
        ({"scale": "1"}, TypeError, "scale must be a number, got str"),
        ({"rope_base": "1"}, TypeError, "rope_base must be a number, got str"),
        ({"importance": None}, TypeError, "importance must be a str, got NoneType"),
    ],
)
def test_the_options_of_forward_and_backward_are_named(options, kind, message):
    q, k, v = torch.randn(3, 1, 10, 2, 8)
    out, gmax, gsum, parents = family.attention_forward(q, k, v)
    with pytest.raises(kind, match=f"attention_forward: {message}"):
        family.attention_forward(q, k, v, **options)
    with pytest.raises(kind, match=f"attention_backward: {message}"):
        family.attention_backward(out, q, k, v, out, gmax, gsum, parents, **options)
    with pytest.raises(TypeError, match="attention_forward: store_parents must be a bool, got int"):
        family.attention_forward(q, k, v, store_parents=1)


def test_heads_and_tokens_in_the_wrong_order_are_pointed_out(monkeypatch):
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)  # [B, H, T, K]
    with pytest.raises(
        ShapeMismatchError, match=r"as many rows as k .*would fit \[B, H, T, K\].*transpose\(1, 2\)"
    ):
        htree_ops.tree_attention(q, k, k)
    with pytest.raises(ShapeMismatchError) as caught:
        htree_ops.tree_attention(torch.randn(1, 4, 4, 8), k.mT.contiguous().mT[:, :, :2], k[:, :, :2])
    assert "transpose" not in str(caught.value)

    monkeypatch.setattr(attention, "_warned_of_transposed", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        htree_ops.tree_attention(q[:, :1], q, q)  # a suffix
        htree_ops.tree_attention(q.mT.mT.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2))
        torch._dynamo.reset()
        torch.compile(htree_ops.tree_attention, backend="eager", fullgraph=True)(q, q, q)
    with pytest.warns(UserWarning, match=r"read as 4 tokens of 9 heads.*transpose\(1, 2\)") as said:
        htree_ops.tree_attention(q, q, q)
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        htree_ops.tree_attention(q, q, q)


def test_what_a_type_checker_sees():
    """One overload per value of return_lse, with the keywords of the function, and words as literals."""
    tree = ast.parse(Path(attention.__file__).read_text())
    found = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "tree_attention"
    ]
    assert len(found) == 4
    assert [ast.unparse(node.returns) for node in found] == [
        "Tensor",
        "tuple[Tensor, Tensor]",
        "Tensor | tuple[Tensor, Tensor]",
        "Tensor | tuple[Tensor, Tensor]",
    ]
    keywords = [[argument.arg for argument in node.args.kwonlyargs] for node in found]
    assert all(names == keywords[-1] for names in keywords)
    for node in found:
        assert ast.unparse(node.args.kwarg.annotation) == "Unpack[TreeKeywords]"
    kinds = get_type_hints(options.TreeKeywords)
    assert set(kinds) == set(options.NAMES)
    assert get_args(kinds["importance"]) == ("lse_causal", "lse", "exp_joint")
    assert get_args(kinds["scope"]) == ("kv_head", "q_head")
