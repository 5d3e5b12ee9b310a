"""Where :class:`htree_ops.HTreeAttention` rotates: at the tokens' own places, as dense models do, or compact ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from htree_ops import HTreeAttention, TreeOptions, tree_attention

WIDTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 6
TREE: dict[str, Any] = {"compression_rate": 4, "top_k": 3, "max_top_nodes": 12}
BASE = 500.0
#: The attention has no float64 on CUDA.
DTYPES = {"cpu": torch.float64, "cuda": torch.float32}
CLOSE: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-8, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}


def layer(device: str, **options: Any) -> HTreeAttention:
    torch.manual_seed(3)
    given = TREE | {"dtype": DTYPES[device], "rope_base": BASE} | options
    return HTreeAttention(WIDTH, HEADS, KV_HEADS, DIM, device=device, **given)


def normal(device: str, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, dtype=torch.float64, generator=generator).to(device, DTYPES[device])


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, **CLOSE[got.dtype])


def rotated(x: Tensor, frequencies: Tensor, start: int = 0) -> Tensor:
    """x [B, T, heads, DIM], the first of the tokens at ``start``, by complex numbers."""
    places = torch.arange(start, start + x.shape[1], dtype=torch.float64, device=x.device)
    turns = torch.polar(torch.ones((), dtype=torch.float64, device=x.device), places[:, None] * frequencies)
    low, high = x.double().chunk(2, -1)
    pairs = torch.complex(low, high) * turns[:, None]
    return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)


def projected(module: HTreeAttention, x: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        project(x).unflatten(-1, (-1, DIM)) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    return rotated(q, frequencies), rotated(k, frequencies), v


def frequencies_of(base: float, device: str) -> Tensor:
    return base ** (-torch.arange(0, DIM, 2, dtype=torch.float64, device=device) / DIM)


@pytest.mark.parametrize("scope", ["kv_head", "q_head"])
@pytest.mark.parametrize("numbers", [None, (0.9, 0.02, -0.3)])
def test_own_positions_are_those_of_the_tokens(device, numbers, scope):
    options = {"scope": scope}
    options |= {} if numbers is None else {"inv_freq": numbers, "rope_base": 10000.0}
    module, x = layer(device, **options), normal(device, 2, 75, WIDTH).requires_grad_()
    frequencies = (
        frequencies_of(BASE, device)
        if numbers is None
        else torch.tensor(numbers, dtype=torch.float64, device=device)
    )
    bare = replace(module.options, rope_base=None, inv_freq=None)
    out = module(x)
    wanted = module.o_proj(tree_attention(*projected(module, x, frequencies), options=bare).flatten(2))
    assert_close(out, wanted)
    dout = normal(device, *out.shape)
    leaves = [x, *module.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted, leaves, dout), strict=True
    ):
        assert_close(ours, theirs)


def test_weights_of_a_dense_layer_give_its_rows_wherever_every_token_is_opened(device):
    module, x = layer(device, top_k=64, max_top_nodes=64), normal(device, 2, 200, WIDTH)
    q, k, v = projected(module, x, frequencies_of(BASE, device))
    heads = [y.transpose(1, 2) for y in (q, k, v)]
    dense = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert_close(module(x), module.o_proj(dense.flatten(2)))


@pytest.mark.parametrize(("tokens", "same"), [(12, True), (13, False), (75, False)])
def test_compact_positions_are_the_same_up_to_max_top_nodes(device, tokens, same):
    own, compact = layer(device), layer(device, positions="compact")
    x = normal(device, 2, tokens, WIDTH)
    q, k, v = (
        project(x).unflatten(-1, (-1, DIM)) for project in (compact.q_proj, compact.k_proj, compact.v_proj)
    )
    wanted = compact.o_proj(tree_attention(q, k, v, options=compact.options).flatten(2))
    assert torch.equal(compact(x), wanted)
    assert torch.allclose(own(x), wanted, **CLOSE[x.dtype]) is same


@pytest.mark.parametrize("positions", ["own", "compact"])
def test_tokens_from_a_cache_stand_where_they_stood(device, positions):
    module, x = layer(device, positions=positions, dtype=torch.float32), normal(device, 2, 75, WIDTH).float()
    cache = module.make_cache(2, 80)
    with torch.no_grad():
        parts = [module(part, cache=cache) for part in x.split([20, 1, 1, 33, 20], 1)]
        assert_close(torch.cat(parts, 1), module(x))
        cache.truncate([40, 61])  # the next tokens of the two stand at other places
        tail = torch.stack([x[0, 40:45], x[1, 61:66]])
        again = module(tail, cache=cache)
        whole = module(x)
    wanted = torch.stack([whole[0, 40:45], whole[1, 61:66]])
    assert_close(again, wanted)


@pytest.mark.parametrize("positions", ["own", "compact"])
def test_documents_and_padded_sequences_begin_at_place_0(device, positions):
    module, x = layer(device, positions=positions), normal(device, 2, 75, WIDTH)
    ends = torch.tensor([0, 20, 20, 64, 70], dtype=torch.int32, device=device)
    packed = module(x[0], cu_seqlens=ends)
    for start, end in ((0, 20), (20, 64), (64, 70)):
        assert_close(packed[start:end], module(x[:1, start:end])[0])
    assert not packed[70:].any()
    mask = torch.zeros(2, 75, dtype=torch.bool, device=device)
    mask[0, :7] = mask[1, 40:] = True
    padded = module(x, key_padding_mask=mask)
    assert_close(padded[0, 7:], module(x[:1, 7:])[0])
    assert_close(padded[1, :40], module(x[1:, :40])[0])


def test_without_a_base_nothing_is_rotated(device):
    x = normal(device, 1, 75, WIDTH)
    own, compact = (layer(device, rope_base=None, positions=p) for p in ("own", "compact"))
    assert torch.equal(own(x), compact(x))


def test_places_beyond_what_half_precision_counts(device):
    """Angles are computed in float64: in bfloat16 the places 257 and 256 are one."""
    module = layer(device, dtype=torch.bfloat16)
    q = torch.ones(1, 2, HEADS, DIM, dtype=torch.bfloat16, device=device)
    places = torch.tensor([1_000_000, 1_000_001], device=device)
    got, _ = module._rotated(q, q[:, :, :KV_HEADS], places)
    wanted = rotated(q.double(), frequencies_of(BASE, device), 1_000_000)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-9)


def test_a_compiled_layer_is_one_graph_with_one_length_for_all(device):
    module = layer(device, dtype=torch.float32)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (30, 75):
        x = normal(device, 2, tokens, WIDTH).float()
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)


def test_the_layer_says_where_it_rotates_and_refuses_other_words():
    assert "positions='own'" in repr(layer("cpu"))
    with pytest.raises(
        ValueError, match=r"^HTreeAttention: positions must be one of own, compact, got 'dense'$"
    ):
        layer("cpu", positions="dense")


def test_the_default_layer_is_the_recommended_one_and_the_documents_have_their_own():
    default = HTreeAttention(64, HEADS)
    assert (default.positions, default.index_dim) == ("own", 16)
    assert default.options == TreeOptions(top_k=128, max_top_nodes=8192)
    assert HTreeAttention(64, HEADS, top_k=7).options == TreeOptions(top_k=7, max_top_nodes=8192)
    assert HTreeAttention(64, HEADS, options=TreeOptions(top_k=7)).options == TreeOptions(top_k=7)
    for narrow in (HTreeAttention(WIDTH, HEADS), HTreeAttention(64, HEADS, index_dim=0)):
        assert (narrow.index_dim, narrow.options) == (0, TreeOptions(selection_span=2))
    for given in ({"selection_span": 4}, {"importance": "lse"}, {"compression_rate": 3, "index_dim": 0}):
        layer = HTreeAttention(64, HEADS, **given)
        given.pop("index_dim", None)
        assert (layer.index_dim, layer.options) == (0, TreeOptions(**given))
    assert HTreeAttention(WIDTH, HEADS, selection_span=None).options == TreeOptions()
    documents = HTreeAttention.from_documents(64, HEADS, KV_HEADS, 16, True, top_k=9)
    assert (documents.positions, documents.options) == ("compact", TreeOptions(top_k=9))
    assert documents.index_dim == 0
    assert documents.o_proj.bias is not None
    assert HTreeAttention.from_documents(WIDTH, HEADS, positions="own").positions == "own"


def test_a_cache_of_other_positions_is_refused():
    own, compact = layer("cpu"), layer("cpu", positions="compact")
    x = normal("cpu", 1, 4, WIDTH)
    with pytest.raises(
        ValueError, match=r"cache must have the options of the layer \(rope_base = None\), got 500"
    ):
        own(x, cache=compact.make_cache(1, 8))
