"""What the backend for vLLM refuses at start and the words it does it with (docs/vllm.md); no vLLM is needed."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from htree_ops import TreeOptions
from htree_ops.integrations.vllm.index import (
    add_weights,
    check_weights,
    heads_of_rank,
    load_indexes,
    rows_of_index,
)
from htree_ops.integrations.vllm.pages import page_sizes, pools_of, table_width
from htree_ops.integrations.vllm.settings import (
    Served,
    check_engine,
    check_layer,
    layer_reasons,
    options_of_engine,
)
from htree_ops.integrations.vllm.versions import check_version, is_supported
from htree_ops.ops.index_loss.layers import draw_index
from htree_ops.ops.tree_cache import cache_layers, page_rows


def config(htree: Any = None, **changes: Any) -> Any:
    """What the backend reads of a VllmConfig."""
    of_model = {name: changes.pop(name) for name in ("attention_chunk_size",) if name in changes}
    text = SimpleNamespace(**({} if htree is None else {"htree": htree}), **of_model)
    sizes: dict[str, Any] = {
        "block_size": 256,
        "decode_context_parallel_size": 1,
        "speculative": None,
        "is_hybrid": False,
    }
    sizes.update(changes)
    method = sizes["speculative"]
    drafts = changes.get("drafts", 4)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, is_hybrid=sizes["is_hybrid"]),
        cache_config=SimpleNamespace(block_size=sizes["block_size"]),
        parallel_config=SimpleNamespace(decode_context_parallel_size=sizes["decode_context_parallel_size"]),
        speculative_config=None
        if method is None
        else SimpleNamespace(method=method, num_speculative_tokens=drafts),
    )


def test_options_are_those_of_the_checkpoint():
    given = {"compression_rate": 4, "top_k": 8, "max_top_nodes": 32, "positions": "own"}
    options = TreeOptions(compression_rate=4, top_k=8, max_top_nodes=32, rope_base=None)
    assert options_of_engine(config(given), 64) == Served(options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("recommended", Served(TreeOptions(top_k=128, max_top_nodes=8192), 32, says_a_width=True)),
        ({"index_dim": 64}, Served(TreeOptions(max_top_nodes=8192), 64, says_a_width=True)),
        ({"index_dim": 0}, Served(TreeOptions(), 0, says_a_width=True)),
        (
            {"index_dim": None, "selection_span": 2},
            Served(TreeOptions(selection_span=2), 0, says_a_width=True),
        ),
    ],
    ids=str,
)
def test_an_index_has_the_width_that_the_checkpoint_says(given, expected):
    found = options_of_engine(config(given), 128)
    assert found == expected._replace(options=replace(expected.options, rope_base=None))
    assert found.options.top_nodes == expected.options.top_nodes


@pytest.mark.parametrize("given", [None, {}])
def test_options_are_the_recommended_ones_without(given):
    assert options_of_engine(config(given), 64) == Served(TreeOptions(selection_span=2, rope_base=None))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"index_dim": 24}, ValueError, "index_dim must be .*, got 24"),
        ({"index_dim": 32, "selection_span": 2}, ValueError, "index_dim must be 0 beside selection_span = 2"),
        ({"positions": "compact"}, NotImplementedError, "must be 'own', got 'compact'"),
        ({"importance": "lse"}, NotImplementedError, "'lse_causal' or 'exp_joint', got 'lse'"),
        ({"scope": "q_head"}, NotImplementedError, "scope'.* must be 'kv_head', got 'q_head'"),
        ({"topk": 4}, ValueError, "must have keys among .*, got 'topk'"),
        ("speed", TypeError, "config.htree must be a dict of options or 'recommended', got 'speed'"),
        ({"top_k": 0}, ValueError, "top_k"),
    ],
    ids=str,
)
def test_options_refuse(given, error, words):
    with pytest.raises(error, match=words):
        options_of_engine(config(given), 64)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"block_size": 24}, ValueError, "multiple of compression_rate = 16, got 24: give --block-size 32"),
        ({"block_size": 8}, ValueError, "got 8: give --block-size 16"),
        (
            {"decode_context_parallel_size": 2},
            NotImplementedError,
            "decode-context-parallel-size 2: set it to 1",
        ),
        ({"speculative": "eagle3"}, NotImplementedError, "got method 'eagle3': use one of ngram"),
        (
            {"is_hybrid": True},
            NotImplementedError,
            "layers of state is not supported: leave --attention-backend",
        ),
        ({"attention_chunk_size": 8192}, NotImplementedError, "attention in chunks is not supported"),
    ],
    ids=str,
)
def test_engines_are_refused(changes, error, words):
    with pytest.raises(error, match=words):
        check_engine(config(**changes), TreeOptions())


def test_pages_keep_the_lists_that_drafts_need():
    engine = config(speculative="ngram", drafts=7)
    with pytest.raises(ValueError, match="at most 3 times selection_stride = 2, got 7"):
        check_engine(engine, TreeOptions(selection_stride=2))
    for stride in (1, 4):
        check_engine(engine, TreeOptions(selection_stride=stride))


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("changes", [{}, {"speculative": "ngram"}, {"block_size": 16}], ids=str)
def test_engines_are_served(changes, stride):
    check_engine(config(**changes), TreeOptions(selection_stride=stride))


LAYERS = [
    ({"use_mla": True}, r"\(MLA\) has no keys of heads: leave --attention-backend out"),
    ({"use_sparse": True}, "sparse attention of its own"),
    ({"has_sliding_window": True}, r"sliding window is not supported: give --hf-overrides"),
    ({"has_sink": True}, "attention sinks"),
    ({"use_mm_prefix": True}, "only causal attention of a decoder"),
    ({"use_non_causal": True}, "only causal attention of a decoder"),
    ({"attn_type": "encoder_only"}, "only causal attention of a decoder"),
    ({"kv_cache_dtype": "fp8_e4m3"}, "must be auto, float16 or bfloat16, got fp8_e4m3"),
    ({"use_per_head_quant_scales": True}, "--kv-cache-dtype must be auto"),
    ({"use_kv_connector": True}, "leave --kv-transfer-config out"),
    ({"use_pcp": True}, "--prefill-context-parallel-size 1"),
    ({"head_size": 33}, "even number of channels, got 33"),
]


@pytest.mark.parametrize(("properties", "words"), LAYERS, ids=str)
def test_layers_have_reasons(properties, words):
    (reason,) = layer_reasons(**properties)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(reason)


def test_a_plain_layer_has_none():
    assert layer_reasons(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16) == []
    check_layer(head_size=128, logits_soft_cap=0.0)


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"logits_soft_cap": 30.0}, "soft cap of the scores is not supported, got 30.0"),
        ({"alibi_slopes": [0.5]}, "ALiBi is not supported"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "share the cache of another one"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"sinks": torch.zeros(4)}, "sinks"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_layers_are_refused(properties, words):
    with pytest.raises(NotImplementedError, match=words):
        check_layer(**properties)


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.26.0", True),
        ("0.26.1+cpu", True),
        ("0.25.4", False),
        ("0.27.0", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_versions(version, served):
    assert is_supported(version) == served
    if served:
        check_version(version)
    else:
        with pytest.raises(RuntimeError, match=f"vllm>=0.26,<0.27, got {version}"):
            check_version(version)


def test_the_table_is_as_wide_as_the_engine_makes_it():
    assert [table_width(n, 16) for n in (1, 128, 129, 2048)] == [8, 8, 16, 128]
    assert [table_width(n, 256) for n in (1, 256, 257)] == [1, 1, 2]
    assert table_width(100, 48) == 4


def test_pools_are_views_of_whole_pages():
    """Keys first, values behind them, in the space of the pages."""
    options = TreeOptions(compression_rate=4, top_k=4, max_top_nodes=16, selection_span=2, rope_base=None)
    sizes = page_sizes(options, 8, 32)
    assert sizes.layers == cache_layers(256, 4, 16) == 3
    assert (sizes.tokens, sizes.index_dim) == (8, 0)
    assert (sizes.key_rows, sizes.value_rows) == page_rows(8, 3, 4, 2) == (8 + 2 + 1 + 4, 8 + 2 + 1)
    stride = sizes.elements(2, 6, 6, torch.float32) + 10  # vLLM may give more
    memory = torch.arange(float(5 * stride))
    cache = memory.as_strided((5, 2, 8, 12), (stride, 96, 12, 1))
    keys, values, *others = pools_of(cache, sizes, 6, 6)
    assert others == [None, None, None]
    assert (keys.shape, values.shape) == ((5, 2, 15, 6), (5, 2, 11, 6))
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert keys.data_ptr() == memory.data_ptr()
    assert float(values[0, 0, 0, 0]) == keys.numel()
    for wrong in (cache[1:], memory[: 5 * 200].view(5, 200).as_strided((5, 2, 8, 12), (200, 96, 12, 1))):
        with pytest.raises(ValueError, match=r"must be \d pages of at least"):
            pools_of(wrong, sizes, 6, 6)


def test_index_keys_stand_in_the_page():
    """First, so that they begin where the memory does; they count in the page."""
    options = TreeOptions(compression_rate=4, top_k=4, max_top_nodes=16, rope_base=None)
    plain, sizes = (page_sizes(options, 8, 32, width) for width in (0, 16))
    assert sizes.elements(2, 6, 6, torch.float32) - plain.elements(2, 6, 6, torch.float32) == 2 * 8 * 16
    stride = sizes.elements(2, 6, 6, torch.float32)
    memory = torch.arange(float(5 * stride))
    pools = pools_of(memory.as_strided((5, 2, 8, 12), (stride, 96, 12, 1)), sizes, 6, 6)
    assert pools.index_keys.shape == (5, 2, 8, 16)
    assert [int(pool[0, 0, 0, 0]) for pool in (pools.index_keys, pools.keys)] == [0, pools.index_keys.numel()]
    assert int(pools.values[-1, -1, -1, -1]) == len(memory) - 1
    assert all(pool.is_contiguous() for pool in pools if pool is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_of_leaders_stand_in_the_page(dtype):
    options = TreeOptions(compression_rate=4, top_k=3, max_top_nodes=16, selection_stride=2, rope_base=None)
    plain, sizes = page_sizes(replace(options, selection_stride=1), 8, 32, 16), page_sizes(options, 8, 32, 16)
    wanted = 4 * (1 + 3 * 2 * 3) * 4  # bytes of 4 leaders: their tokens, and lists of 3 layers and 2 heads
    stride = sizes.elements(2, 6, 6, dtype)
    assert stride - plain.elements(2, 6, 6, dtype) == wanted // dtype.itemsize
    memory = torch.zeros(5 * stride, dtype=dtype)
    pools = pools_of(memory.as_strided((5, 2, 8, 12), (stride, 96, 12, 1)), sizes, 6, 6)
    assert (pools.leaders.shape, pools.lists.shape) == ((5, 4), (5, 4, 3, 2, 3))
    begins = [pools.leaders, pools.lists, pools.index_keys, pools.keys, pools.values]
    ends = [x.data_ptr() + x.nbytes for x in begins]
    assert [x.data_ptr() for x in begins] == [memory.data_ptr(), *ends[:-1]]
    assert ends[-1] == memory.data_ptr() + memory.nbytes
    assert pools.index_keys.data_ptr() % 16 == memory.data_ptr() % 16


class Layer(torch.nn.Module):
    """An attention layer of an engine."""

    def __init__(self, index_dim: int | None, *, says_a_width: bool = True) -> None:
        super().__init__()
        self.impl = SimpleNamespace()
        if index_dim is not None:
            self.impl = SimpleNamespace(index_dim=index_dim, says_a_width=says_a_width)


def names_loaded(layer: Layer) -> list[str]:
    """The names under which a loader gets what a checkpoint has."""
    model = torch.nn.ModuleList([layer])
    loader = SimpleNamespace(module=model)
    load = partial(load_indexes, Layer, lambda self, weights: [name for name, _ in weights])
    names = ["0.self_attn.q_proj.weight", "0.self_attn.index_key_weight", "0.self_attn.index_query_weight"]
    first: list[str] = load(loader, ((name, torch.zeros(2, 64, 32)) for name in names))
    again: list[str] = load(loader, ((name, torch.zeros(2, 64, 32)) for name in first))
    assert again == first  # the loader of a model calls that of its parts
    assert first[0] == names[0]
    return first[1:]


def test_weights_of_an_index_go_to_the_layers_that_choose_by_it():
    found = ["0.self_attn.attn.index_key_weight", "0.self_attn.attn.index_query_weight"]
    assert names_loaded(Layer(32)) == found
    for layer in (Layer(None), Layer(0)):  # dense attention, and index_dim = 0
        assert names_loaded(layer) == []
    with pytest.raises(ValueError, match=r"must have 'index_dim', 32 to choose by .* or 0 to leave it out"):
        names_loaded(Layer(0, says_a_width=False))


@pytest.mark.parametrize(
    ("total", "ranks", "heads", "expected"),
    [(8, 4, 2, [0, 2, 4, 6]), (4, 4, 1, [0, 1, 2, 3]), (2, 4, 1, [0, 0, 1, 1]), (1, 2, 1, [0, 0])],
)
def test_a_rank_has_its_own_heads_of_an_index(total, ranks, heads, expected):
    weight = torch.arange(total)[:, None, None].expand(-1, 4, 2)
    for rank, first in enumerate(expected):
        own = heads_of_rank(weight, heads, rank, ranks)
        assert own[:, 0, 0].tolist() == list(range(first, first + heads))


def test_an_index_must_have_been_loaded():
    layer = torch.nn.Module()
    add_weights(layer, (4, 2), 64, 32)
    query_weight, key_weight = layer.index_query_weight, layer.index_key_weight
    assert (query_weight.shape, key_weight.shape) == ((4, 64, 32), (2, 64, 32))
    with pytest.raises(
        ValueError, match=r"index of config.htree\['index_dim'\] = 32, got none: htree_ops.fit_index"
    ):
        check_weights(layer)
    drawn = draw_index(4, 2, 64, 32, None, torch.float32)
    query_weight.copy_(drawn[0])
    key_weight.copy_(drawn[1])
    with pytest.warns(UserWarning, match="never fitted"):
        check_weights(layer)
    key_weight.mul_(1.5)
    check_weights(layer)
    query, key = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    index_query, index_key = rows_of_index(layer, query, key)
    torch.testing.assert_close(index_key[3, 1], key[3, 1] @ key_weight[1])
    torch.testing.assert_close(
        index_query[3, 1], query[3, 2] @ query_weight[2] + query[3, 3] @ query_weight[3]
    )
