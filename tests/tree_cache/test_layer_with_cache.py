"""``HTreeAttention`` with a cache (docs/semantics/tree_cache.md §7.4), also under what surrounds a model: autocast,
torch.compile and recorded gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from htree_ops import HTreeAttention, TreeKVCache, quantize_model_, tree_attention

OPTIONS: dict[str, Any] = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 12}


def make(device: str, **options: Any) -> HTreeAttention:
    torch.manual_seed(0)
    return HTreeAttention(32, 4, 2, device=device, **OPTIONS | options)


def served(layer: HTreeAttention, x: Tensor, cache: TreeKVCache) -> Tensor:
    return torch.cat([layer(part, cache=cache) for part in x.split((17, 1, 1, 11), dim=1)], dim=1)


@pytest.mark.parametrize("scope", ["kv_head", "q_head"])
@pytest.mark.parametrize("stride", [1, 4])
def test_the_module_decodes_what_it_computes_at_once(device, scope, stride):
    torch.manual_seed(0)
    layer = HTreeAttention(32, 4, 2, selection_stride=stride, scope=scope, device=device, **OPTIONS)
    x = torch.randn(2, 30, 32, device=device)
    whole = layer(x)
    cache = layer.make_cache(2, 30)
    parts = [layer(part, cache=cache) for part in x.split((13, 1, 1, 1, 9, 1, 1, 1, 1, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="options of the layer"):
        HTreeAttention(32, 4, 2, device=device)(x, cache=cache)
    for batch in (1, 3):
        other = layer.make_cache(batch, 30)
        with pytest.raises(
            ValueError, match=f"HTreeAttention: cache must have the batch of x = 2, got {batch}: "
        ):
            layer(x, cache=other)
        assert other.host_lengths() == [0] * batch
    with pytest.raises(TypeError, match="cache must be a TreeKVCache"):
        layer(x, cache=3)
    with pytest.raises(
        TypeError, match=r"make_cache: device must be a torch\.device, a str or .*, got float"
    ):
        layer.make_cache(2, 30, device=2.5)
    on_meta = HTreeAttention(32, 4, 2, selection_stride=stride, device="meta", **OPTIONS)
    assert on_meta(torch.empty(2, 5, 32, device="meta"), cache=on_meta.make_cache(2, 30)).shape == (2, 5, 32)


class Wrapped(nn.Module):
    """A layer that shows no weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_the_cache_of_a_module_whose_projections_were_replaced(device):
    quantised, wrapped = (HTreeAttention(32, 4, 2, device=device, **OPTIONS) for _ in range(2))
    quantize_model_(quantised)
    wrapped.k_proj = Wrapped(wrapped.k_proj)
    x = torch.randn(2, 30, 32, device=device)
    for layer, kind in ((quantised, "FP8Linear"), (wrapped, "Wrapped")):
        with pytest.raises(ValueError, match=f"make_cache: dtype must be given, .* because {kind} in the"):
            layer.make_cache(2, 30)
        cache = layer.make_cache(2, 30, dtype=torch.float32)
        assert str(cache.device).split(":")[0] == device
        with torch.no_grad():
            parts = [layer(part, cache=cache) for part in x.split((17, 1, 12), dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", ["own", "compact"])
@pytest.mark.parametrize("stride", [1, 4])
def test_a_layer_with_an_index_decodes_what_it_computes_at_once(device, stride, positions):
    sizes: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "device": device}
    options: dict[str, Any] = {"selection_span": None, "selection_stride": stride, "positions": positions}
    torch.manual_seed(0)
    layer = HTreeAttention(**sizes, index_dim=16, **options, **OPTIONS)
    x = torch.randn(2, 60, 64, device=device)
    made = layer.make_cache(2, 60)
    assert (made.index_dim, made.index_dtype) == (16, torch.bfloat16)
    exact, coded = (
        layer.make_cache(2, 60, index_dtype=dtype) for dtype in (torch.float32, torch.float8_e4m3fn)
    )
    assert (exact.index_dtype, coded.index_dtype) == (torch.float32, torch.float8_e4m3fn)
    with torch.no_grad():
        wanted = layer(x)
        found, rounded, of_codes = (
            torch.cat([layer(part, cache=cache) for part in x.split((33, 1, 1, 24, 1), dim=1)], dim=1)
            for cache in (exact, made, coded)
        )
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    # An index that is rounded chooses otherwise now and then, but not where every token is seen.
    for near in (rounded, of_codes):
        torch.testing.assert_close(near[:, :12], wanted[:, :12], atol=1e-4, rtol=1e-4)
    same = torch.isclose(rounded, wanted, atol=1e-3, rtol=1e-3).all(-1)
    assert same.float().mean() > 0.8
    without = HTreeAttention(**sizes, index_dim=0, **options, **OPTIONS)
    with pytest.raises(ValueError, match="cache must have the index_dim of the layer = 16, got 0"):
        layer(x, cache=without.make_cache(2, 60))
    with pytest.raises(ValueError, match="cache must have the index_dim of the layer = 0, got 16"):
        without(x, cache=made)
    assert made.host_lengths() == [60, 60]


def test_without_a_cache_the_message_says_what_to_do():
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 8)
    with pytest.raises(
        ValueError, match="give the queries since the last multiple once more, or decode with a Tree"
    ):
        tree_attention(q, k, k, selection_stride=4, **OPTIONS)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cache_made_under_autocast_serves_under_autocast(dtype, quantised, device):
    layer = make(device, top_k=8, max_top_nodes=32)  # everything is opened, so that rounding selects nothing
    if quantised:
        quantize_model_(layer)
    x = torch.randn(2, 30, 32, device=device)
    with torch.no_grad(), torch.autocast(device, dtype):
        cache = layer.make_cache(2, 30)
        assert cache.dtype == dtype
        torch.testing.assert_close(served(layer, x, cache), layer(x), atol=0.03, rtol=0.03)
        assert layer.make_cache(2, 30, dtype=torch.float32).dtype == torch.float32
    with torch.autocast(device, enabled=False):
        assert quantised or layer.make_cache(2, 30).dtype == torch.float32


def test_autocast_leaves_float64_alone():
    layer = make("cpu", dtype=torch.float64)
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = layer.make_cache(2, 30)
        assert cache.dtype == torch.float64
        torch.testing.assert_close(served(layer, x, cache), layer(x))


@pytest.mark.parametrize("options", [{}, {"selection_stride": 4}, {"scope": "q_head"}], ids=str)
def test_a_compiled_step_with_gradients_is_the_eager_one(options, device):
    """It runs, and a backward through it raises when it comes, not when the step is compiled."""
    torch._dynamo.reset()
    layer = make(device, **options)
    x = torch.randn(2, 12, 32, device=device)
    cache, eager = layer.make_cache(2, 30), layer.make_cache(2, 30)
    step = torch.compile(lambda part: layer(part, cache=cache), fullgraph=True, backend="aot_eager")
    for part in x.split((9, 1, 1, 1), dim=1):
        got, wanted = step(part), layer(part, cache=eager)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        assert got.requires_grad
        assert wanted.requires_grad
        for out in (got, wanted):
            with pytest.raises(RuntimeError, match=r"tree_cache_step_ is not implemented.*torch\.no_grad"):
                out.sum().backward()
        assert all(p.grad is None for p in layer.q_proj.parameters())
    assert not cache.k_pool.requires_grad
    assert cache.lengths.tolist() == eager.lengths.tolist() == [12, 12]


def test_an_exported_step_serves_the_cache_that_it_was_exported_with(device):
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make(device, selection_stride=4)
            self.cache = self.layer.make_cache(2, 30)

        def forward(self, x):
            return self.layer(x, cache=self.cache)

    step, x = Step(), torch.randn(2, 14, 32, device=device)
    other = step.layer.make_cache(2, 30)
    with torch.no_grad():
        exported = torch.export.export(step, (x[:, :1],)).module()
        assert step.cache.lengths.tolist() == [0, 0]
        for part in x.split(1, dim=1):
            torch.testing.assert_close(exported(part), step.layer(part, cache=other), atol=1e-5, rtol=1e-5)
    assert step.cache.lengths.tolist() == [14, 14]


@pytest.mark.parametrize("options", [{}, {"positions": "compact"}, {"selection_span": None}], ids=str)
@pytest.mark.parametrize("stride", [1, 4, 16])
def test_prompts_of_several_lengths(stride, options, device):
    """Then single tokens, which not every sequence gets. Each sequence is as if it had come alone."""
    layer = make(device, compression_rate=16, selection_stride=stride, **options)
    x = torch.randn(3, 60, 32, device=device)
    steps = [[45, 3, 0], [1, 1, 1], [0, 1, 2], torch.tensor([3, 0, 9], dtype=torch.int32, device=device)]
    with torch.no_grad():
        wholes = [layer(x[b : b + 1])[0] for b in range(3)]
        cache = layer.make_cache(3, 60)
        held = [0, 0, 0]
        for lengths in steps:
            counts = list(map(int, lengths))
            rows = torch.full((3, max(counts), 32), torch.nan, device=device)  # padding may hold anything
            for b, (begin, count) in enumerate(zip(held, counts, strict=True)):
                rows[b, :count] = x[b, begin : begin + count]
            out = layer(rows, cache=cache, lengths=lengths)
            for b, (begin, count) in enumerate(zip(held, counts, strict=True)):
                own = wholes[b][begin : begin + count]
                torch.testing.assert_close(out[b, :count], own, atol=1e-4, rtol=1e-4)
                assert not out[b, count:].any()
            held = [n + count for n, count in zip(held, counts, strict=True)]
        assert cache.lengths.tolist() == held
        cache.check()
        with pytest.raises(ValueError, match="lengths must be None where cache is None, got list"):
            layer(x, lengths=[60, 60, 60])
        with pytest.raises(
            ValueError, match="HTreeAttention: lengths must be 3 numbers between 0 and 5, got"
        ):
            layer(x[:, :5], cache=cache, lengths=[6, 0, 0])
        with pytest.raises(
            TypeError, match="HTreeAttention: lengths must be a list of ints or a Tensor, got int"
        ):
            layer(x[:, :5], cache=cache, lengths=5)
