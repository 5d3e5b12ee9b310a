"""MustafarAttention: dense prompts, decoding from the cache, every exact storage of keys (docs/semantics §4.2)."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_kv_helpers import heads_last
from torch import Tensor

import htree_ops
from htree_ops import MustafarAttention
from htree_ops.errors import DeviceError, ShapeMismatchError, UnsupportedDtypeError
from htree_ops.ops.compressed_kv.attention import key_weight_from_queries
from htree_ops.reference import compressed_kv as reference
from htree_ops.reference.tree_attention.rotary import rope, rope_cache
from tests.support.cases import normal
from tests.support.compare import assert_close_spec
from tests.support.compressed_kv_cases import rows_with_outliers

BATCH, HEADS, KV_HEADS, WIDTH = 2, 8, 4, 64


def layer(device: str, **changes: Any) -> MustafarAttention:
    options = {"window": 4, "chunk": 8, "max_positions": 200, "dtype": torch.float16} | changes
    return MustafarAttention(HEADS, KV_HEADS, WIDTH, device=device, **options)


def qkv(
    device: str, length: int, dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, H, D], k and v [B, S, H_kv, D]."""
    return (
        normal((BATCH, length, HEADS, WIDTH), dtype, device, seed),
        heads_last(rows_with_outliers((BATCH, KV_HEADS, length, WIDTH), dtype, device, seed + 1)),
        normal((BATCH, length, KV_HEADS, WIDTH), dtype, device, seed + 2),
    )


def rotated(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """x [B, S, H, D] in float64, rotated by the module's table to 0, 1, ... or to ``positions``."""
    cos, sin = rope_cache(200, WIDTH, dtype=torch.float32, device=x.device)
    places = torch.arange(x.shape[1], device=x.device) if positions is None else positions
    return rope(x.double(), cos, sin, places)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64 of q [B, S, H, D], k and v, rotated."""
    return plain_attention(rotated(q), rotated(k), v)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in float64 of q [B, S, H, D], k and v as they are."""
    rows = (heads_last(x.double()) for x in (q, k, v))
    return heads_last(F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True))


EXACT: dict[str, dict[str, Any]] = {
    "plain": {"sparsity": 0.0, "bits": 16},
    "per head": {"bits": 16, "sparsity": (0.0, 0.0), "use_grouped_hadamard": True},
    "groups of 2": {"bits": 16, "sparsity": (0.0, 0.0), "use_grouped_hadamard": True, "head_group_num": 2},
    "groups of 4": {"bits": 16, "sparsity": (0.0, 0.0), "use_grouped_hadamard": True, "head_group_num": 4},
    "paged": {"sparsity": 0.0, "bits": 16, "page_size": 4},
}


@pytest.mark.parametrize("name", EXACT)
def test_decoding_continues_dense_attention(name, device):
    """With all channels in 16 bits, prompt and decoding differ by roundings to float16 alone."""
    module = layer(device, **EXACT[name])
    q, k, v = qkv(device, 50)
    expected = dense(q, k, v)
    cache = module.make_cache(BATCH, 64)
    out = [module(q[:, :30], k[:, :30], v[:, :30], cache=cache)]
    for t in range(30, 50):
        out.append(module(*(x[:, t : t + 1] for x in (q, k, v)), cache=cache))
    assert cache.compressed_lengths == [40, 40]
    # a rotated or transformed key is rounded to float16: scores of outliers move by D channels of 10 * 2^-11
    assert_close_spec(torch.cat(out, dim=1), expected, 2e-3, 4e-2, dtype=torch.float16)
    error = (torch.cat(out, dim=1).double() - expected).abs().mean()
    assert error < 1e-3


@pytest.mark.parametrize("bits", [8, 4])
def test_decoding_sees_what_the_cache_holds(bits, device):
    module = layer(device, bits=bits)
    q, k, v = qkv(device, 41)
    cache = module.make_cache(BATCH, 64)
    module(q[:, :40], k[:, :40], v[:, :40], cache=cache)
    assert module.keep == (32, 32)
    out = module(*(x[:, 40:] for x in (q, k, v)), cache=cache)
    keys, values = cache.to_dense()
    everything = torch.ones(BATCH, 41, dtype=torch.bool, device=device)
    query = rotated(q)[:, 40].half()
    expected, _ = reference.attention(query, heads_last(keys), heads_last(values), everything)
    assert_close_spec(out[:, 0], expected, 2e-3, 2e-3 * float(v.abs().max()))
    assert (out[:, 0].double() - dense(q, k, v)[:, 40]).abs().max() > 1e-3, "nothing was dropped"


def test_prompts_of_different_length(device):
    module = layer(device, sparsity=0.0, bits=16)
    q, k, v = qkv(device, 40)
    cache = module.make_cache(BATCH, 64)
    lengths = [33, 9]
    module(q[:, :33], k[:, :33], v[:, :33], cache=cache, lengths=lengths)
    assert cache.host_lengths() == lengths
    for step in range(5):
        own = [torch.stack([x[i, n + step] for i, n in enumerate(lengths)])[:, None] for x in (q, k, v)]
        out = module(*own, cache=cache)
        for i, n in enumerate(lengths):
            expected = dense(*(x[i : i + 1, : n + step + 1] for x in (q, k, v)))[0, -1]
            assert_close_spec(out[i, 0], expected, 2e-3, 4e-2)


def test_several_tokens_and_sequences_that_join(device):
    """A call with several tokens, and a prompt beside sequences that are under way, are as one token at a time."""
    module = layer(device, output_aware=True, split_size=256)
    q, k, v = qkv(device, 60)
    several, single = (module.make_cache(BATCH, 64) for _ in range(2))
    module(*(x[:, :20] for x in (q, k, v)), cache=several, lengths=[20, 0])
    module(*(x[:, :20] for x in (q, k, v)), cache=single, lengths=[20, 0])
    held = [20, 0]
    for counts in ([5, 31], [0, 1], [17, 0], [3, 3]):
        parts = [torch.full_like(x[:, : max(counts) + 1], math.nan) for x in (q, k, v)]
        for part, x in zip(parts, (q, k, v), strict=True):
            for b, (start, n) in enumerate(zip(held, counts, strict=True)):
                part[b, :n] = x[b, start : start + n]
        out = module(*parts, cache=several, lengths=counts)
        if single.key_weight is not None:
            single.key_weight = several.key_weight  # those of a whole prompt, which single tokens do not know
        for i in range(max(counts)):
            ones = [int(i < n) for n in counts]
            expected = module(*(x[:, i : i + 1] for x in parts), cache=single, lengths=ones)
            single.key_weight = several.key_weight
            for b, one in enumerate(ones):
                if one and device == "cpu":
                    assert torch.equal(out[b, i], expected[b, 0])
                elif one:
                    assert_close_spec(out[b, i], expected[b, 0].double(), 2e-3, 1e-2)
        held = [n + count for n, count in zip(held, counts, strict=True)]
        assert several.host_lengths() == single.host_lengths() == held
    own = key_weight_from_queries(rotated(q[1:, :31]).half(), KV_HEADS, 4)
    assert_close_spec(several.key_weight[1:], own.double(), 1e-2, 1e-2)


def test_padding_does_not_need_positions(device):
    module = layer(device, max_positions=12)
    q, k, v = qkv(device, 8)
    cache = module.make_cache(BATCH, 12)
    module(*(x[:, :7] for x in (q, k, v)), cache=cache, lengths=[7, 3])
    module(q, k, v, cache=cache, lengths=[5, 8])
    assert cache.host_lengths() == [12, 11]
    with pytest.raises(ValueError, match=r"max_positions = 12 must be at least the tokens .*, got 13"):
        module(*(x[:, :2] for x in (q, k, v)), cache=cache, lengths=[0, 2])


@pytest.mark.parametrize(("width", "value_width"), [(192, 128), (64, 192)])
def test_values_of_another_size(width, value_width, device):
    module = MustafarAttention(
        4,
        2,
        width,
        value_dim=value_width,
        sparsity=0.0,
        bits=16,
        rope_base=None,
        window=4,
        chunk=8,
        device=device,
        dtype=torch.float16,
    )
    assert module.keep == (width, value_width)
    q, k = (normal((BATCH, 30, heads, width), torch.float16, device, heads) for heads in (4, 2))
    v = normal((BATCH, 30, 2, value_width), torch.float16, device, 3)
    expected = plain_attention(q, k, v)
    cache = module.make_cache(BATCH, 30)
    out = [module(*(x[:, part] for x in (q, k, v)), cache=cache) for part in (slice(0, 17), slice(17, 30))]
    assert_close_spec(torch.cat(out, dim=1), expected, 2e-3, 1e-2)
    with pytest.raises(ShapeMismatchError, match=rf"value must be \[B, S, \d+, {value_width}\], got"):
        module(q, k, k)
    with pytest.raises(ShapeMismatchError, match="value_dim must be a multiple of 64"):
        MustafarAttention(4, 2, width, value_dim=32)
    with pytest.raises(ValueError, match=r"hadamard_group \* Dk must be a power of two"):
        MustafarAttention(4, 2, 192, use_grouped_hadamard=True)


def test_caches_have_the_dtype_of_the_module(device):
    module = layer(device)
    assert MustafarAttention(HEADS, device=device).dtype == torch.bfloat16
    assert module.dtype == module.make_cache(1, 8).dtype == torch.float16
    assert module.bfloat16().make_cache(1, 8).dtype == torch.bfloat16
    assert torch.nn.Sequential(module).float()[0].make_cache(1, 8).dtype == torch.float32
    assert module.make_cache(1, 8, dtype=torch.float16).dtype == torch.float16
    assert module.make_cache(1, 8, rollback=3).rollback == 3
    assert layer(device, dtype=torch.bfloat16).make_cache(1, 8).dtype == torch.bfloat16
    assert "dtype=torch.float32" in repr(module)
    with pytest.raises(UnsupportedDtypeError, match="dtype must be"):
        module.double().make_cache(1, 8)
    with pytest.raises(UnsupportedDtypeError, match="dtype"):
        layer(device, dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cache_made_under_autocast_serves_under_autocast(dtype, device):
    """Projections then give keys and values in the dtype of autocast, whatever that of the module."""
    module, heads = layer(device), HEADS + 2 * KV_HEADS
    projection = torch.nn.Linear(32, heads * WIDTH, device=device)
    with torch.no_grad(), torch.autocast(device, dtype):
        cache = module.make_cache(BATCH, 30)
        assert cache.dtype == dtype
        for n in (9, 1, 2):
            x = projection(torch.randn(BATCH, n, 32, device=device)).unflatten(2, (heads, WIDTH))
            assert module(*x.split((HEADS, KV_HEADS, KV_HEADS), dim=2), cache=cache).dtype == dtype
        assert module.make_cache(1, 8, dtype=torch.float16).dtype == torch.float16


def test_positions_are_the_callers_or_counted(device):
    module = layer(device, sparsity=0.0, bits=16)
    q, k, v = qkv(device, 20)
    counted, given = module.make_cache(BATCH, 64), module.make_cache(BATCH, 64)
    places = torch.arange(20, device=device)
    for start, stop in ((0, 18), (18, 19), (19, 20)):
        part = [x[:, start:stop] for x in (q, k, v)]
        one = module(*part, cache=counted)
        for position_ids in (places[start:stop], places[start:stop].expand(BATCH, -1)):
            assert torch.equal(module(*part, position_ids, None)[:, :1], module(*part, position_ids)[:, :1])
        assert torch.equal(module(*part, places[start:stop], given), one)
    far = module(q, k, v, places + 100)  # scores depend on distances alone
    assert_close_spec(far, dense(q, k, v), 2e-3, 4e-2)
    plain = layer(device, rope_base=None)
    expected = plain_attention(q, k, v)
    assert_close_spec(plain(q, k, v), expected, 2e-3, 4e-2)


def test_a_prompt_has_gradients(device):
    module = layer(device)
    leaves = [x.requires_grad_() for x in qkv(device, 13, torch.float32)]
    cache = module.make_cache(BATCH, 64, dtype=torch.float32)
    out = module(*leaves, cache=cache)
    without = module(*leaves)
    assert torch.equal(out, without)
    for a, b in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(without.sum(), leaves), strict=True
    ):
        assert torch.equal(a, b)
        assert a.abs().sum() > 0
    assert not cache.k_win.requires_grad


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to(torch.float16)]
)
def test_a_cast_leaves_the_rotary_table(cast, device):
    module = layer(device)
    expected = module(*qkv(device, 9))
    cast(torch.nn.Sequential(module))
    assert module.tables.dtype == torch.float32
    assert torch.equal(module(*qkv(device, 9)), expected)
    assert "tables" in dict(module.named_buffers())
    elsewhere = layer("meta").to_empty(device=device)
    assert torch.equal(elsewhere.half()(*qkv(device, 9)), expected)


@pytest.mark.parametrize("filling", [math.nan, math.inf])
def test_rows_behind_the_lengths_are_ignored(filling, device):
    module = layer(device, output_aware=True)
    clean, dirty = (qkv(device, 20, torch.float32) for _ in range(2))
    lengths = [7, 20]
    grads = []
    caches = [module.make_cache(BATCH, 64, dtype=torch.float32) for _ in range(2)]
    outs = []
    for inputs, cache in zip((clean, dirty), caches, strict=True):
        for x in inputs:
            x[0, 7:] = filling if inputs is dirty else 1.0
        leaves = [x.requires_grad_() for x in inputs]
        out = module(*leaves, cache=cache, lengths=lengths)
        outs.append(torch.cat([out[0, :7], out[1]]))
        grads.append(torch.autograd.grad(outs[-1].square().sum(), leaves))
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)
        assert a.isfinite().all()
        assert not a[0, 7:].any()
    for a, e in zip(*(cache.to_dense() for cache in caches), strict=True):
        assert torch.equal(a, e)
    assert torch.equal(module(*dirty, lengths=torch.tensor(lengths))[1], outs[0][7:])
    weights = [key_weight_from_queries(x[0], KV_HEADS, 4, lengths) for x in (clean, dirty)]
    assert torch.equal(*weights)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_decoded_token_refuses_a_backward(which, device):
    module = layer(device)
    cache = module.make_cache(BATCH, 64)
    q, k, v = qkv(device, 6)
    module(q[:, :5], k[:, :5], v[:, :5], cache=cache)
    step = [x[:, 5:].clone() for x in (q, k, v)]
    step[which].requires_grad_()
    before = copy.deepcopy(cache)
    out = module(*step, cache=cache)
    with pytest.raises(RuntimeError, match="kv_decode_attention"):
        out.sum().backward()
    with torch.no_grad():
        again = module(*step, cache=before)
    assert not again.requires_grad
    assert torch.equal(again, out)


def test_output_aware_keys(device):
    q, k, v = qkv(device, 30)
    weight = key_weight_from_queries(q, KV_HEADS, 8)
    assert_close_spec(
        weight, reference.key_weight_from_queries(heads_last(q), KV_HEADS, 8), 1e-5, 1e-6, dtype=torch.float32
    )
    ragged = key_weight_from_queries(q, KV_HEADS, 8, [30, 3])
    assert torch.equal(ragged[0], weight[0])
    expected = reference.key_weight_from_queries(heads_last(q[1:, :3]), KV_HEADS, 8)
    assert_close_spec(ragged[1:], expected, 1e-5, 1e-6)
    module = layer(device, output_aware=True, rope_base=None)
    cache = module.make_cache(BATCH, 64)
    module(q, k, v, cache=cache)
    oldest = heads_last(k[:, :24])
    rows = htree_ops.kv_compress(oldest, 32, 8, key_weight_from_queries(q, KV_HEADS, 4))
    assert torch.equal(cache.state_dict()["k_bitmap"], rows.bitmap)
    assert not torch.equal(rows.bitmap, htree_ops.kv_compress(oldest, 32, 8).bitmap)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "heads": ({"num_heads": 6}, ValueError, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
    "no heads": ({"num_heads": 0}, ValueError, "num_heads must be between 1"),
    "width": ({"head_dim": 80}, ShapeMismatchError, "a multiple of 64 between 64 and 512, got 80"),
    "sparsity": ({"sparsity": 1.5}, ValueError, r"sparsity must be between 0 and 1, got 1\.5"),
    "sparsity nan": ({"sparsity": float("nan")}, ValueError, "sparsity must be finite"),
    "bits": ({"bits": 3}, ValueError, "bits must be one of 16, 8, 4, got 3"),
    "group alone": ({"head_group_num": 2}, ValueError, "head_group_num = 2 needs use_grouped_hadamard"),
    "group": (
        {"head_group_num": 3, "use_grouped_hadamard": True},
        ValueError,
        "hadamard_group must divide H_kv = 4, got 3",
    ),
    "both": (
        {"sparsity": 0.5, "use_grouped_hadamard": True},
        ValueError,
        r"sparsity of keys must be 0, got 0\.5",
    ),
    "transform text": (
        {"use_grouped_hadamard": "yes"},
        TypeError,
        "use_grouped_hadamard must be a bool, got str",
    ),
    "transform int": ({"use_grouped_hadamard": 1}, TypeError, "use_grouped_hadamard must be a bool, got int"),
    "transform none": ({"use_grouped_hadamard": None}, TypeError, "use_grouped_hadamard must be a bool"),
    "aware": ({"output_aware": 1}, TypeError, "output_aware must be a bool, got int"),
    "base": ({"rope_base": -1.0}, ValueError, "rope_base must be positive and finite"),
    "scale": ({"scale": float("inf")}, ValueError, "scale must be finite"),
    "positions": ({"max_positions": 0}, ValueError, "max_positions must be between 1"),
    "window": ({"window": -1}, ValueError, "window must be between 0"),
    "chunk": ({"chunk": 0}, ValueError, "chunk must be between 1"),
    "page": ({"page_size": 3}, ValueError, "page_size must divide chunk = 256, got 3"),
    "split": ({"split_size": -1}, ValueError, "split_size must be between 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options(name):
    changes, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        MustafarAttention(**({"num_heads": 8, "num_kv_heads": 4, "head_dim": 64} | changes))


def test_wrong_calls():
    module = layer("cpu")
    q, k, v = qkv("cpu", 5)
    cache = module.make_cache(BATCH, 6)
    with pytest.raises(ShapeMismatchError, match=r"query must be \[B, S, 8, 64\], got"):
        module(k, k, v)
    with pytest.raises(ShapeMismatchError, match="S of query"):
        module(q, k[:, :3], v[:, :3])
    with pytest.raises(UnsupportedDtypeError, match="query must have dtype"):
        module(q.double(), k.double(), v.double())
    with pytest.raises(UnsupportedDtypeError, match="prefill: k must have dtype"):
        module(q.float(), k.float(), v.float(), cache=cache)
    module(q, k, v, cache=cache)
    with pytest.raises(
        ValueError, match="decode: sequence 0 holds 5 tokens; 5 more exceed the capacity of 6"
    ):
        module(q, k, v, cache=cache)
    module(q[:, :1], k[:, :1], v[:, :1], cache=cache)
    with pytest.raises(ValueError, match="exceed the capacity of 6"):
        module(q[:, :1], k[:, :1], v[:, :1], cache=cache)
    with pytest.raises(IndexError, match="MustafarAttention: position_ids must"):
        module(q, k, v, torch.arange(198, 203))
    for changes, message in (
        ({"sparsity": 0.25}, r"keep of the layer = \(32, 32\), got \(48, 48\)"),
        ({"bits": 4}, r"bits of the layer = \(8, 8\), got \(4, 4\)"),
        ({"window": 5}, "window of the layer = 4, got 5"),
    ):
        other = layer("cpu", **changes).make_cache(BATCH, 6)
        with pytest.raises(ValueError, match=f"MustafarAttention: cache must have {message}"):
            module(q, k, v, cache=other)
        assert other.host_lengths() == [0] * BATCH
    places = torch.arange(5)
    wrong: tuple[tuple[Any, type[Exception], str], ...] = (
        ([0, 1, 2, 3, 4], TypeError, "must be a Tensor, got list"),
        (places[:4], ShapeMismatchError, "must be S of query = 5"),
        (places.expand(3, 5), ShapeMismatchError, "must be B of query = 2"),
        (places[None, None], ShapeMismatchError, "must be 2-D"),
        (
            places.float(),
            UnsupportedDtypeError,
            r"must have dtype torch\.int32 or torch\.int64, got torch\.float32",
        ),
        (places.to("meta"), DeviceError, "must be on the device of query"),
    )
    for position_ids, kind, message in wrong:
        with pytest.raises(kind, match=f"MustafarAttention: .*position_ids {message}"):
            module(q, k, v, position_ids)
    for right in (places, places.int(), places.expand(2, 5)):
        torch.testing.assert_close(module(q, k, v, right), module(q, k, v))
    with pytest.raises(TypeError, match="cache must be a CompressedKVCache, got str"):
        module(q, k, v, cache="a")
    with pytest.raises(ShapeMismatchError, match=r"query must be \[3, 5, 8, 64\], with B of the cache, got"):
        module(q, k, v, cache=module.make_cache(3, 6))
    for lengths in ([6, 1], [-1, 1], [1]):
        with pytest.raises(ValueError, match="lengths must be 2 numbers between 0 and 5"):
            module(q, k, v, lengths=lengths)
    with pytest.raises(TypeError, match="lengths must be a list of ints"):
        module(q, k, v, lengths=[1.5, 2.0])
    counts = torch.tensor([5, 1])
    with pytest.raises(DeviceError, match=r"MustafarAttention: lengths must be on a device .* got meta"):
        module(q, k, v, lengths=counts.to("meta"))
    with pytest.raises(TypeError, match="MustafarAttention: lengths must be a dense tensor"):
        module(q, k, v, lengths=counts.to_sparse())
    with pytest.raises(DeviceError, match=r"make_cache: device must be a device of torch, .* got 'ab'"):
        module.make_cache(2, 10, device="ab")
    assert "keep=(32, 32), bits=(8, 8), hadamard_group=0" in repr(module)
    lists = layer("cpu", sparsity=[0.5, 0.25], bits=[4, 8])
    assert (lists.keep, lists.bits) == ((32, 48), (4, 8))
    with pytest.raises(TypeError, match="sparsity must be a number, got list"):
        layer("cpu", sparsity=[0.5])
    assert module.state_dict() == {}


def test_positions_beyond_the_rotary_table_are_refused(device):
    """The check needs shapes alone; without it CUDA would use the last angle and say nothing."""
    module = layer(device, max_positions=8)
    with pytest.raises(ValueError, match="make_cache: capacity must be at most max_positions = 8, got 9"):
        module.make_cache(BATCH, 9)
    q, k, v = qkv(device, 9)
    message = "max_positions = 8 must be at least the tokens with those that the cache holds, got 9"
    with pytest.raises(ValueError, match=message):
        module(q, k, v)
    cache = layer(device).make_cache(BATCH, 64)
    with pytest.raises(ValueError, match=message):
        module(q, k, v, cache=cache)
    assert cache.host_lengths() == [0, 0], "nothing may be stored"
    module(*(x[:, :8] for x in (q, k, v)), cache=cache, lengths=[8, 3])
    before = copy.deepcopy(cache.state_dict())
    last = [x[:, 8:] for x in (q, k, v)]
    with pytest.raises(ValueError, match=message):
        module(*last, cache=cache)
    assert cache.host_lengths() == [8, 3]
    for name, value in before.items():
        after = cache.state_dict()[name]
        assert torch.equal(after, value) if isinstance(value, Tensor) else after == value, name
    module(*last, torch.tensor([7], device=device), cache)  # positions that the caller gives are not checked
    plain = layer(device, max_positions=8, rope_base=None)
    plain(q, k, v, cache=plain.make_cache(BATCH, 9))
