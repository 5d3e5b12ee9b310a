"""Frequencies of the caller, ``inv_freq`` (docs/semantics/tree_attention.md §1.4).

Drawn problems with and without them, forward and backward: test_tree_attention_properties.py and
test_tree_attention_gradients.py. On the tensor cores: test_tree_attention_gpu.py.
"""

import dataclasses
import json
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_attention_strategies import CPU_DTYPES, EVERY_IMPORTANCE, dtypes_of, problems, seeds

import htree_ops
import htree_ops.reference.tree_attention as ref
from htree_ops.ops.tree_attention import attention_backward, attention_forward
from htree_ops.ops.tree_attention.stages import rope_cache
from tests.support.cases import normal
from tests.support.devices import poisoned_memory
from tests.support.graphs import assert_stream_and_graph
from tests.support.tree_attention_calls import calls_with
from tests.support.tree_attention_cases import FREQUENCY_SHAPES
from tests.support.tree_attention_checks import (
    assert_epsilon_optimal,
    assert_gradients,
    assert_output,
    forced,
    reference_gradients,
)

ops = torch.ops.htree
OPTIONS = {"compression_rate": 4, "max_top_nodes": 8, "top_k": 2}
FREQUENCIES = (1.0, -0.3, 0.01, 0.0)


def of_base(base, width):
    """The frequencies of a base as the CPU computes them."""
    return tuple(1.0 / base ** (i / (width // 2)) for i in range(width // 2))


def results(q, k, v, case):
    """Output, states, lists and gradients."""
    with poisoned_memory():
        out, gmax, gsum, parents = ops.attention_forward(q, k, v, **case.reference_options())
    dout = normal(tuple(out.shape), out.dtype, out.device, 5)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with poisoned_memory():
        again = ops.attention(*leaves, **case.reference_options())
        gradients = torch.autograd.grad(again, leaves, dout) if out.numel() else []
    assert torch.equal(again, out)
    return [out, gmax, gsum], parents, list(gradients), dout


# ---- values


@given(data=st.data(), seed=seeds, base=st.sampled_from((10.0, 500.0, 10000.0, 5e5)))
def test_those_of_a_base_are_the_base(data, seed, base, device):
    """On the CPU bit for bit; a GPU computes the frequencies of a base itself, in another way."""
    drawn = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE, max_length=60))
    plain = dataclasses.replace(drawn, rope_base=base, inv_freq=None)
    case = dataclasses.replace(drawn, rope_base=10000.0, inv_freq=of_base(base, drawn.K))
    q, k, v = plain.make_qkv(device, seed)
    ours, theirs = results(q, k, v, case), results(q, k, v, plain)
    if device == "cpu":
        for mine, other in zip(ours[:3], theirs[:3], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, other, strict=True))
        return
    cpu = [x.cpu() for x in (q, k, v)]
    found = forced(*cpu, [x.cpu() for x in ours[1]], plain.reference_options())
    assert_output(ours[0][0].cpu(), found.out, cpu[2])


@given(data=st.data(), seed=seeds)
def test_zeros_rotate_nothing(data, seed, device):
    drawn = data.draw(problems(dtypes_of(device), importances=EVERY_IMPORTANCE, max_length=60))
    case = dataclasses.replace(drawn, rope_base=10000.0, inv_freq=(0.0,) * (drawn.K // 2))
    q, k, v = case.make_qkv(device, seed)
    (out, _, _), parents, gradients, dout = results(q, k, v, case)
    q, k, v, out, dout = (x.cpu() for x in (q, k, v, out, dout))
    options = dataclasses.replace(case, rope_base=None, inv_freq=None).reference_options()
    parents = [x.cpu() for x in parents]
    assert_epsilon_optimal(q, k, v, parents, options)
    assert_output(out, forced(q, k, v, parents, options).out, v)
    wanted = reference_gradients(q, k, v, dout, parents, options)
    assert_gradients([x.cpu() for x in gradients], wanted, dout, q, k, v)


@given(
    seed=seeds,
    width=st.sampled_from((2, 6, 8)),
    data=st.data(),
    stride=st.sampled_from((1, 2, 4)),
    span=st.sampled_from((None, 1, 2)),
    base=st.sampled_from((None, 10000.0)),
)
def test_a_cache_has_the_bits_of_the_whole_sequence(seed, width, data, stride, span, base):
    numbers = st.one_of(st.just(0.0), st.floats(-4, 4))
    inv_freq = (
        None if base is None else data.draw(st.lists(numbers, min_size=width // 2, max_size=width // 2))
    )
    tree = OPTIONS | {
        "selection_stride": stride,
        "selection_span": span,
        "rope_base": base,
        "inv_freq": inv_freq,
    }
    q, k, v = (
        normal((1, 50, heads, width), torch.float32, "cpu", seed % 10_000 + i)
        for i, heads in enumerate((4, 2, 2))
    )
    cache = htree_ops.TreeKVCache(1, 2, width, 50, dtype=torch.float32, page_size=8, **tree)
    rows = []
    for first in (0, 24, *range(32, 50)):
        last = {0: 24, 24: 32}.get(first, first + 1)
        cache.append(k[:, first:last], v[:, first:last])
        rows.append(cache.attend(q[:, first:last]))
    assert torch.equal(torch.cat(rows, 1), htree_ops.tree_attention(q, k, v, **tree))


def test_a_table_may_be_given_to_the_op_of_the_cache(device):
    """The table of rope_cache, and the one that the op makes."""
    q, k, v = (normal((1, 40, h, 8), torch.float32, device, h) for h in (4, 2, 3))
    v = v[:, :, :2]
    tree = OPTIONS | {"inv_freq": FREQUENCIES}
    cache = htree_ops.TreeKVCache(1, 2, 8, 40, dtype=torch.float32, device=device, page_size=8, **tree)
    cache.append(k, v)
    lengths, cu = cache.lengths, torch.tensor([0, 3], dtype=torch.int32, device=device)
    inputs = (q[0, -3:], cache.k_pool, cache.v_pool, cache.block_table, lengths, cu)
    table = rope_cache(8, 8, device=device, inv_freq=FREQUENCIES)
    made = htree_ops.ops.tree_cache.tree_cache_attention(*inputs, page_size=8, **tree)
    given = htree_ops.ops.tree_cache.tree_cache_attention(*inputs, rope_table=table, page_size=8, **tree)
    wanted = htree_ops.tree_attention(q, k, v, **tree)[0, -3:]
    for found in (made, given):
        torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_graph_keeps_the_frequencies():
    """Nothing waits for the device, and nothing of the call's host memory is read at replay."""
    q, k, v = (normal((1, 40, h, 8), torch.float32, "cuda", h) for h in (4, 2, 2))
    tree = OPTIONS | {"inv_freq": FREQUENCIES}
    cache = htree_ops.TreeKVCache(1, 2, 8, 40, dtype=torch.float32, device="cuda", page_size=8, **tree)
    cache.append(k, v)
    cu = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    pages = (cache.k_pool, cache.v_pool, cache.block_table, cache.lengths, cu)

    def both():
        rows = htree_ops.ops.tree_cache.tree_cache_attention(q[0], *pages, page_size=8, **tree)[0]
        return rows, ops.attention(q, k, v, 4, 8, 2, inv_freq=FREQUENCIES)

    assert_stream_and_graph(both, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rope_cache(dtype, device):
    numbers = tuple(0.0 if i == 3 else (-0.9) ** i for i in range(300))
    table = rope_cache(17, 600, dtype=dtype, device=device, inv_freq=numbers).cpu()
    wanted = torch.tensor(
        [[[f(p * x) for x in numbers] for p in range(17)] for f in (math.cos, math.sin)], dtype=torch.float64
    )
    torch.testing.assert_close(table.double(), wanted, rtol=0, atol=1e-7 if dtype == torch.float32 else 1e-14)
    torch.testing.assert_close(ref.rope_cache(17, 600, dtype=dtype, inv_freq=numbers), table)


# ---- torch's machinery


@pytest.mark.parametrize("name", ["ragged", "batch", "span"])
def test_opcheck(name, device):
    shape = next(x for x in FREQUENCY_SHAPES if x.name == f"{name}_inv_freq")
    found = calls_with(shape.with_dtype(torch.float32), device, "inv_freq")
    assert len(found) >= 10
    for call in found:
        call.opcheck()


def views(x, w, inv_freq=FREQUENCIES):
    q, k, v = (x @ w).split([32, 16, 16], dim=-1)
    heads = (q.unflatten(-1, (4, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (2, 8)))
    return htree_ops.tree_attention(*heads, **OPTIONS, inv_freq=inv_freq).flatten(2).cos()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_with_backward(dynamic, device):
    torch._dynamo.reset()
    compiled = torch.compile(views, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for T, numbers in ((40, FREQUENCIES), (57, FREQUENCIES), (57, [0.5, 0.0, 1, 0.2])):
        x = normal((2, T, 12), torch.float32, device, T).requires_grad_()
        w = normal((12, 64), torch.float32, device, 1, 0.3).requires_grad_()
        ours, theirs = (call(x, w, numbers) for call in (compiled, views))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        for a, b in zip(*(torch.autograd.grad(y.sum(), (x, w)) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    with pytest.raises(Exception, match="inv_freq must be a tuple of floats in compiled code, got a Tensor"):
        compiled(x, w, torch.tensor(FREQUENCIES))


def test_a_layer_compiles_and_exports_as_one_node(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = htree_ops.HTreeAttention.from_documents(32, 4, 2, inv_freq=FREQUENCIES, device=device, **OPTIONS)
    x = normal((2, 40, 32), torch.float32, device, 1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    with torch.no_grad():
        exported = torch.export.export(
            layer, (x,), dynamic_shapes={"x": {1: torch.export.Dim("T", min=33, max=100)}}
        )
        longer = normal((2, 71, 32), torch.float32, device, 3)
        torch.testing.assert_close(exported.module()(longer), layer(longer))
    nodes = [node for node in exported.graph.nodes if "htree" in str(node.target)]
    assert [str(node.target) for node in nodes] == ["htree._attention.default"]


@pytest.mark.parametrize("documents", [False, True])
def test_a_layer_rotates_as_the_function_does(documents, device):
    torch.manual_seed(0)
    layer = htree_ops.HTreeAttention.from_documents(
        32, 4, 2, inv_freq=list(FREQUENCIES), device=device, **OPTIONS
    )
    assert layer.options.inv_freq == FREQUENCIES
    x = torch.randn(1, 50, 32, device=device)
    q, k, v = layer._project(x)
    parts = (slice(0, 20), slice(20, 50)) if documents else (slice(0, 50),)
    wanted = [
        htree_ops.tree_attention(q[:, p], k[:, p], v[:, p], **OPTIONS, inv_freq=FREQUENCIES) for p in parts
    ]
    call = {"cu_seqlens": torch.tensor([0, 20, 50], dtype=torch.int32, device=device)} if documents else {}
    torch.testing.assert_close(layer(x, **call), layer.o_proj(torch.cat(wanted, 1).flatten(2)))
    layer.options = dataclasses.replace(layer.options, inv_freq=None)
    assert not torch.allclose(layer(x, **call), layer.o_proj(torch.cat(wanted, 1).flatten(2)), atol=1e-3)


# ---- how it is given and kept


@pytest.mark.parametrize(
    "given",
    [list(FREQUENCIES), torch.tensor(FREQUENCIES, dtype=torch.float64), range(4), [1, 0, 2, 0.5]],
    ids=["list", "tensor", "range", "ints"],
)
def test_sequences_and_tensors_are_floats(given):
    numbers = tuple(map(float, given))
    options = htree_ops.TreeOptions(inv_freq=given)
    assert options.inv_freq == numbers
    assert all(type(x) is float for x in options.inv_freq)
    assert hash(options) == hash(htree_ops.TreeOptions(inv_freq=numbers))
    assert options.to_dict()["inv_freq"] == list(numbers)
    assert htree_ops.TreeOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert f"inv_freq={numbers!r}" in repr(options)
    q, k, v = (normal((1, 30, h, 8), torch.float32, "cpu", h) for h in (4, 2, 2))
    wanted = htree_ops.tree_attention(q, k, v, **OPTIONS, inv_freq=numbers)
    assert torch.equal(htree_ops.tree_attention(q, k, v, **OPTIONS, inv_freq=given), wanted)
    out, gmax, gsum, parents = attention_forward(q, k, v, **OPTIONS, inv_freq=given)
    assert torch.equal(out, wanted)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(
        htree_ops.tree_attention(*leaves, **OPTIONS, inv_freq=given), leaves, torch.ones_like(out)
    )
    state = (out, gmax, gsum, parents)
    got = attention_backward(torch.ones_like(out), q, k, v, *state, **OPTIONS, inv_freq=given)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_layers_and_caches_keep_it():
    layer = htree_ops.HTreeAttention.from_documents(32, 4, 2, inv_freq=torch.tensor(FREQUENCIES), **OPTIONS)
    single = tuple(torch.tensor(FREQUENCIES).tolist())  # as float32 has them
    assert f"inv_freq={list(single)!r}" in repr(layer)
    cache = layer.make_cache(1, 40)
    assert cache.options.inv_freq == single
    assert f"inv_freq={list(single)!r}" in repr(cache)
    x = torch.randn(1, 12, 32)
    torch.testing.assert_close(layer(x, cache=cache), layer(x))
    state = cache.state_dict()
    assert state["factors"][1:].tolist() == list(single)
    layer.make_cache(1, 40).load_state_dict(state)
    layer.options = dataclasses.replace(layer.options, inv_freq=(1.0, 0.5, 0.25, 0.125))
    with pytest.raises(ValueError, match=r"options must be .*inv_freq=\[1.0, 0.5, .*, got "):
        layer.make_cache(1, 40).load_state_dict(state)
    with pytest.raises(ValueError, match=r"options of the layer \(inv_freq = \(1.0, 0.5"):
        layer(x, cache=cache)
    layer.options = dataclasses.replace(layer.options, inv_freq=None)
    with pytest.raises(ValueError, match=r"options must be .*inv_freq=None.*, got .*inv_freq=\["):
        layer.make_cache(1, 40).load_state_dict(state)


# ---- refusals

WRONG = [
    ({"inv_freq": [1.0] * 3}, ValueError, "inv_freq must have K/2 numbers, got 3 and K = 8"),
    ({"inv_freq": [1.0] * 8}, ValueError, "inv_freq must have K/2 numbers, got 8 and K = 8"),
    ({"inv_freq": []}, ValueError, "inv_freq must have K/2 numbers, got 0"),
    ({"inv_freq": [1.0, math.nan, 1.0, 1.0]}, ValueError, "inv_freq must be finite in float32, got nan at 1"),
    ({"inv_freq": [1.0, 1.0, 1.0, math.inf]}, ValueError, "inv_freq must be finite in float32, got inf at 3"),
    ({"inv_freq": [1e300] * 4}, ValueError, r"inv_freq must be finite in float32, got 1e\+300 at 0"),
    (
        {"inv_freq": FREQUENCIES, "rope_base": None},
        ValueError,
        "rope_base must keep its default 10000 where inv_freq is given, got None",
    ),
    (
        {"inv_freq": FREQUENCIES, "rope_base": 5e5},
        ValueError,
        "rope_base must keep its default 10000 where inv_freq is given, got 500000",
    ),
]
KINDS = [
    (1.0, "got float"),
    ("1234", "got str"),
    ([1.0, "2", 0.0, 0.0], r"inv_freq\[1\] must be a number, got str"),
    ([1.0, True, 0.0, 0.0], r"inv_freq\[1\] must be a number, got bool"),
    (torch.ones(2, 2), r"got torch.float32 \(2, 2\) on cpu"),
    (torch.ones(4, dtype=torch.int32), r"got torch.int32 \(4,\) on cpu"),
    (torch.ones(4, device="meta"), r"got torch.float32 \(4,\) on meta"),
]


def functions(device):
    """Every function with an inv_freq, as a function of options, by the name in its messages."""
    q, k, v = (normal((1, 30, h, 8), torch.float32, device, h) for h in (4, 2, 2))
    cu = torch.tensor([0, 30], dtype=torch.int32, device=device)
    cache = htree_ops.TreeKVCache(1, 2, 8, 32, dtype=torch.float32, device=device, page_size=8, **OPTIONS)
    cache.append(k, v)
    pages = (cache.k_pool, cache.v_pool, cache.block_table, cache.lengths, cu)
    state = attention_forward(q, k, v, **OPTIONS)
    return {
        "tree_attention": lambda **o: htree_ops.tree_attention(q, k, v, **OPTIONS, **o),
        "tree_attention_varlen": lambda **o: htree_ops.tree_attention_varlen(
            q[0], k[0], v[0], cu, cu, 30, 30, **OPTIONS, **o
        ),
        "attention_forward": lambda **o: attention_forward(q, k, v, **OPTIONS, **o),
        "attention_backward": lambda **o: attention_backward(state[0], q, k, v, *state, **OPTIONS, **o),
        "tree_cache_attention": lambda **o: htree_ops.ops.tree_cache.tree_cache_attention(
            q[0], *pages, page_size=8, **OPTIONS, **o
        ),
    }


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_numbers_are_named(options, error, message, device):
    for name, call in functions(device).items():
        with pytest.raises(error, match=f"^{name}: {message}"):
            call(**options)
    size = re.sub("K/2 numbers, got (.*) and K = 8", r"head_dim / 2 = 4 numbers, got \1", message)
    for name, make in (
        ("HTreeAttention", lambda **o: htree_ops.HTreeAttention(32, 4, 2, **OPTIONS, **o)),
        ("TreeKVCache", lambda **o: htree_ops.TreeKVCache(1, 2, 8, 40, **OPTIONS, **o)),
    ):
        if options["inv_freq"] == []:  # no width has none
            size = "inv_freq must have K/2 numbers, got 0"
        with pytest.raises(error, match=f"^{name}: {size}"):
            make(**options)


@pytest.mark.parametrize(("wrong", "message"), KINDS, ids=lambda x: str(x)[:20])
def test_wrong_kinds_are_named(wrong, message, device):
    for name, call in functions(device).items():
        with pytest.raises(TypeError, match=f"^{name}: .*{message}"):
            call(inv_freq=wrong)
    with pytest.raises(TypeError, match=f"^HTreeAttention: .*{message}"):
        htree_ops.HTreeAttention(32, 4, 2, **OPTIONS, inv_freq=wrong)
    with pytest.raises(TypeError, match=f"^rope_cache: .*{message}"):
        rope_cache(5, 8, inv_freq=wrong)


def test_wrong_tables_are_named():
    for options, message in (
        (
            {"inv_freq": FREQUENCIES, "base": 5.0},
            "base must keep its default 10000 where inv_freq is given, got 5",
        ),
        ({"inv_freq": [1.0]}, "inv_freq must have K/2 numbers, got 1 and K = 8"),
        ({"inv_freq": [math.nan] * 4}, "inv_freq must be finite in float32, got nan at 0"),
    ):
        with pytest.raises(ValueError, match=f"^rope_cache: {message}"):
            rope_cache(5, 8, **options)


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
def test_the_table_of_the_cpu_is_kept_for_its_frequencies_alone(dtype):
    """Caches of the same width and other frequencies, one after the other, as the CPU keeps their tables."""
    q, k = (normal((1, 20, 2, 8), dtype, "cpu", i) for i in range(2))
    found = []
    for numbers in (FREQUENCIES, None, (0.5, 0.25, 1.0, 2.0), FREQUENCIES):
        cache = htree_ops.TreeKVCache(1, 2, 8, 20, dtype=dtype, page_size=8, inv_freq=numbers, **OPTIONS)
        cache.append(k, k)
        found.append(cache.attend(q))
        assert torch.equal(found[-1], htree_ops.tree_attention(q, k, k, **OPTIONS, inv_freq=numbers))
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
